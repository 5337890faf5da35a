"""Host memory through which KV blocks pass between vLLM's memory and other workers, in slots of one block each.

Made before vLLM starts, which is told where it lies; how large a slot is, and how blocks are laid out in it, is known
once every rank has said what it registered. The memory file vanishes with the processes that hold it. Lives on the
event loop.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater.engines.base import KvMemory
from headwater.errors import ModelError
from headwater.kv.connectors.vllm_staging import (
    CONNECTOR,
    MAX_NEWS_BYTES,
    MODULE,
    Ended,
    Exported,
    News,
    Registered,
    StagingAddress,
    decode_news,
)
from headwater.runtime.owned_folder import OwnedFolder
from headwater.transfer.memory import allocate

_REGISTER_S = 10.0
_MAX_READ = 256
"""Datagrams in one turn of the loop."""


class Staging:
    """See the module docstring. `on_news` hears of exports once `registered` has returned."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = allocate(num_bytes, lazily=True)
        self.layout = ""
        self.slot_bytes = 0
        self.num_ranks = 0
        self.on_news: Callable[[Exported | Ended], None] | None = None
        self._free: list[int] = []
        self._folder = OwnedFolder("vllm-kv-")
        self._path = str(self._folder.path / "news")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self._path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read)
        self._ranks: dict[int, Registered] = {}
        self._all_registered = asyncio.Event()
        self._closed = False

    def connector(self, pid: int) -> dict[str, Any]:
        """What vLLM is to be told, as its `KVTransferConfig` takes it; `pid`: this process."""
        address = StagingAddress(pid, self.buffer.fd, self.buffer.num_bytes, self._path)
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": address.config(),
            "kv_load_failure_policy": "recompute",
        }

    async def registered(self) -> None:
        """Every rank has its KV memory. Raises `ModelError` when they do not say so, or differ."""
        try:
            await asyncio.wait_for(self._all_registered.wait(), _REGISTER_S)
        except TimeoutError as error:
            raise ModelError(f"vLLM has started without {CONNECTOR}") from error
        first = self._ranks[0]
        if any(msgspec.structs.replace(rank, rank=0) != first for rank in self._ranks.values()):
            raise ModelError("vLLM's ranks lay out their KV blocks differently")
        self.layout, self.num_ranks, self.slot_bytes = first.layout, first.num_ranks, first.slot_bytes
        self._free = list(range(self.num_slots))[::-1]

    @property
    def num_slots(self) -> int:
        return self.buffer.num_bytes // self.slot_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def blocks(self) -> KvMemory:
        """What a transfer agent registers. Only passing through: no cache, so the CPU's view is not offered."""
        return KvMemory(self.num_slots, self.slot_bytes, self.buffer, None)

    def take(self, count: int) -> list[int] | None:
        """None: there is not room for so many now."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: Sequence[int]) -> None:
        self._free += slots

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self.buffer.release()
        self._folder.close()

    def _read(self) -> None:
        for _ in range(_MAX_READ):
            try:
                news: News = decode_news(self._socket.recv(MAX_NEWS_BYTES))
            except (BlockingIOError, InterruptedError):
                return
            if isinstance(news, Registered):
                self._ranks[news.rank] = news
                if len(self._ranks) == news.num_ranks:
                    self._all_registered.set()
            elif self.on_news is not None:
                self.on_news(news)
