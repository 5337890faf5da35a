"""What a worker of ours and the vLLM processes below it say to each other about KV blocks of other workers.

Between vLLM's memory and other workers blocks pass through *slots*: host memory of our worker that vLLM's processes on
the same host map. A slot holds one block of all tensor-parallel ranks (`vllm_heads`). Who owns a slot is decided in our
worker alone; requests carry slot numbers in vLLM's `kv_transfer_params`, and vLLM's processes answer over a datagram
socket in a private folder.
"""

import mmap
import os
import socket
from typing import Any, Self

import msgspec

from headwater.errors import ConfigError

CONNECTOR = "HandoffConnector"
MODULE = "headwater.kv.connectors.vllm_handoff"

_EXPORT = "headwater_export"
_LOAD = "headwater_load"
_SEND_S = 5.0
MAX_NEWS_BYTES = 4096


class ExportParams(msgspec.Struct, frozen=True):
    """Of a request whose prompt another worker wants: copy its blocks, from `first_block` on, to these slots."""

    stream: int
    first_block: int
    slots: list[int]

    def request_params(self) -> dict[str, Any]:
        return {_EXPORT: msgspec.to_builtins(self)}

    @classmethod
    def of(cls, params: dict[str, Any] | None) -> Self | None:
        return msgspec.convert(params[_EXPORT], cls) if params and _EXPORT in params else None


class LoadParams(msgspec.Struct, frozen=True):
    """Of a request whose KV is in slots: that of its first `num_tokens` tokens, `first_block` blocks left out."""

    first_block: int
    num_tokens: int
    slots: list[int]

    def request_params(self) -> dict[str, Any]:
        return {_LOAD: msgspec.to_builtins(self)}

    @classmethod
    def of(cls, params: dict[str, Any] | None) -> Self | None:
        return msgspec.convert(params[_LOAD], cls) if params and _LOAD in params else None


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """A rank has its KV caches. The first word of each."""

    rank: int
    num_ranks: int
    layout: str
    """Equal names, exchangeable slots."""
    slot_bytes: int


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    """So many blocks of this rank lie in their slots, in order from the first one that was asked for."""

    rank: int
    stream: int
    num_blocks: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A rank writes no more of this request."""

    rank: int
    stream: int


News = Registered | Exported | Ended

decode_news = msgspec.msgpack.Decoder(News).decode


class StagingAddress(msgspec.Struct, frozen=True):
    """In `kv_connector_extra_config`."""

    pid: int
    fd: int
    """The memory file, as that process calls it."""
    num_bytes: int
    socket: str

    def config(self) -> dict[str, Any]:
        return {"staging": msgspec.to_builtins(self)}

    @classmethod
    def of(cls, extra: dict[str, Any]) -> Self:
        try:
            return msgspec.convert(extra.get("staging"), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{CONNECTOR} is given its memory by a worker of Headwater: {error}") from error


class StagingClient:
    """In a vLLM worker: the slots' memory, and the way back."""

    def __init__(self, address: StagingAddress) -> None:
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(fd, address.num_bytes)
        finally:
            os.close(fd)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(_SEND_S)
        self._socket.connect(address.socket)
        self._encode = msgspec.msgpack.Encoder().encode

    def tell(self, news: News) -> None:
        """Raises `OSError` when our worker is gone, or hung."""
        self._socket.send(self._encode(news))

    def close(self) -> None:
        self._socket.close()
