"""The half of the hand-off connector that lies in each vLLM worker: copies blocks between vLLM's memory and slots.

Copies are in order with computing: what a step has computed leaves before the next one, what is loaded is there before
the step that reads it. Loads are cut into pieces, a few a step, so that other sequences go on decoding meanwhile. On a
device the way out to the slots is waited for on a thread.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from headwater.errors import ConfigError
from headwater.kv.connectors.vllm_heads import SlotPart, slot_part
from headwater.kv.connectors.vllm_layout import Layout
from headwater.kv.connectors.vllm_staging import Ended, Exported, News, Registered, StagingAddress, StagingClient
from headwater.kv.connectors.vllm_worker import BlockCopier

_log = logging.getLogger(__name__)

_PIECES_PER_STEP = 4
"""Of 64 MiB each."""


@dataclass(frozen=True)
class SlotLoad:
    """Blocks that are in slots, and where they belong."""

    request_id: str
    slots: list[int]
    block_ids: list[int]


@dataclass(frozen=True)
class SlotExport:
    """Blocks that a step makes ready, and their slots; `num_blocks` of the request are out then."""

    stream: int
    block_ids: list[int]
    slots: list[int]
    num_blocks: int


class HandoffWorker:
    """See the module docstring. Called from the thread that drives the device."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, layout: Layout, address: StagingAddress) -> None:
        self._configs = vllm_config, kv_cache_config
        self._layout = layout
        self._rank = vllm_config.parallel_config.rank % layout.num_ranks
        self._client = StagingClient(address)
        self._slots = torch.empty(0)
        """This rank's part of every slot: [slots, rows, bytes]."""
        self._writes = True
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="kv-handoff")
        self._copier: BlockCopier | None = None
        self._loads: deque[tuple[SlotLoad, int]] = deque()
        self._broken: set[int] = set()
        """Streams of which a block is not in its slot, so that none after it is told of. The teller's own."""

    def close(self) -> None:
        self._teller.shutdown()
        self._client.close()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        copier = self._copier = BlockCopier(kv_caches, self._layout.num_blocks)
        if copier.block_bytes != self._layout.block_bytes:
            told = self._layout.block_bytes
            raise ConfigError(f"blocks have {copier.block_bytes} bytes in memory and {told} by vLLM's configuration")
        part = slot_part(*self._configs, self._layout, self._rank, kv_caches.values())
        self._slots, self._writes = part.of(_slots(self._client, part)), part.writes
        self._client.tell(Registered(self._rank, self._layout.num_ranks, part.layout, part.slot_bytes))

    def start_loads(self, loads: Sequence[SlotLoad]) -> None:
        self._loads += [(load, 0) for load in loads]

    @torch.inference_mode()
    def advance(self) -> set[str]:
        """Put some more in place; the requests all of whose blocks are there now."""
        ended: set[str] = set()
        copier = self._blocks()
        for _ in range(_PIECES_PER_STEP):
            if not self._loads:
                break
            load, start = self._loads.popleft()
            end = min(start + copier.piece_blocks, len(load.slots))
            staged = copier.staging(end - start)
            torch.index_select(self._slots, 0, torch.tensor(load.slots[start:end]), out=self._by_row(staged))
            copier.scatter(staged, load.block_ids[start:end])
            if end < len(load.slots):
                self._loads.appendleft((load, end))
            else:
                ended.add(load.request_id)
        return ended

    @torch.inference_mode()
    def export(self, exports: Sequence[SlotExport]) -> None:
        copier = self._blocks()
        for export in exports:
            if not self._writes:
                self._teller.submit(self._tell, Exported(self._rank, export.stream, export.num_blocks))
                continue
            out = export.num_blocks - len(export.slots)
            for start in range(0, len(export.slots), copier.piece_blocks):
                slots = export.slots[start : start + copier.piece_blocks]
                buffer, wait = copier.gather(export.block_ids[start : start + len(slots)])
                out += len(slots)
                self._teller.submit(self._put, buffer, wait, slots, Exported(self._rank, export.stream, out))

    def end(self, streams: Sequence[int]) -> None:
        """Nothing more of these is written; told after all that was."""
        for stream in streams:
            self._teller.submit(self._end, Ended(self._rank, stream))

    def _put(self, buffer: torch.Tensor, wait: Callable[[], None], slots: list[int], news: Exported) -> None:
        if news.stream in self._broken:
            return
        try:
            wait()
            for slot, block in zip(slots, self._by_row(buffer), strict=True):
                self._slots[slot].copy_(block)  # ten times as fast as `index_copy_` on bytes
        except RuntimeError as error:
            _log.warning("KV blocks for another worker could not be copied to their slots: %s", error)
            self._broken.add(news.stream)
            return
        self._tell(news)

    def _end(self, news: Ended) -> None:
        self._broken.discard(news.stream)
        self._tell(news)

    def _tell(self, news: News) -> None:
        try:
            self._client.tell(news)
        except OSError as error:
            _log.warning("the worker above does not hear of KV blocks: %s", error)

    def _by_row(self, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks of this rank, shaped as its parts of slots are."""
        return blocks.view(len(blocks), *self._slots.shape[1:])

    def _blocks(self) -> BlockCopier:
        if self._copier is None:
            raise ConfigError("vLLM has not registered its KV caches")
        return self._copier


def _slots(client: StagingClient, part: SlotPart) -> torch.Tensor:
    num_slots = len(client.memory) // part.slot_bytes
    if not num_slots:
        raise ConfigError(f"blocks of {part.slot_bytes} bytes do not fit {len(client.memory)}", hint="--kv-staging")
    memory = torch.frombuffer(client.memory, dtype=torch.uint8, count=num_slots * part.slot_bytes)
    return memory.view(num_slots, part.slot_bytes)
