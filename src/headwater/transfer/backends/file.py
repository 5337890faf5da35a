"""Files of this host, or of this very agent: vectored reads and writes on a descriptor that the owner passes on.

A file may be cut short at any time; a read that ends early or a write that would grow it is an error, never silence.
"""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwater.errors import LinkUnavailable, RegionGone, TransferError
from headwater.transfer.base import Grant, PeerSession, RemoteRegion
from headwater.transfer.blocks import Chunk, joined
from headwater.transfer.card import RegionKind
from headwater.transfer.outcome import Stop
from headwater.transfer.regions import Region

_Vectored = Callable[[int, Sequence[memoryview], int], int]


class FileBackend:
    """See the module docstring."""

    name = "file"

    def unavailable(self) -> str:
        return ""

    def serves(self, local: RegionKind, remote: RegionKind) -> bool:
        return remote == "file" and local in ("shared", "memory")

    def connect(self, session: PeerSession, stop: Stop) -> "FileLink":
        if not session.same_host:
            raise LinkUnavailable("descriptors of files travel only between processes of one host")
        return FileLink()

    def grant(self, region: Region, offer: bytes) -> Grant:
        if region.card.kind != "file":
            raise LinkUnavailable(f"region {region.card.id} is no file")
        return Grant(fd=region.buffer.fd)

    def forget(self, region: Region) -> None:
        """Nothing is kept per region."""

    def close(self) -> None:
        """Descriptors belong to regions and sessions."""


class _Step(NamedTuple):
    region: Region
    remote: RemoteRegion
    parts: list[tuple[int, list[memoryview]]]
    write: bool


class FileLink:
    lanes = 2

    def attach(self, remote: RemoteRegion) -> None:
        if remote.fd < 0:
            raise LinkUnavailable("the peer sent no descriptor")

    def prepare(self, region: Region, remote: RemoteRegion, chunk: Chunk, *, write: bool) -> _Step:
        view = region.view
        starts, sizes = joined(chunk.remote, chunk.lengths)
        parts: list[tuple[int, list[memoryview]]] = []
        spans = iter(zip(chunk.local, chunk.lengths, strict=True))
        for start, size in zip(starts, sizes, strict=True):
            views: list[memoryview] = []
            while size:
                at, length = next(spans)
                views.append(view[at : at + length])
                size -= length
            parts.append((start, views))
        return _Step(region, remote, parts, write)

    def move(self, step: _Step, stop: Stop) -> None:
        call = os.pwritev if step.write else os.preadv
        with step.region.hold, step.remote.hold:
            for start, views in step.parts:
                _check_size(step, start + sum(map(len, views)))
                _whole(call, step.remote.fd, views, start)

    def close(self) -> None:
        """Descriptors belong to sessions."""


def _check_size(step: _Step, end: int) -> None:
    size = os.fstat(step.remote.fd).st_size
    if end > size:
        raise RegionGone(f"the file is {size} bytes long, the transfer needs {end}")


def _whole(call: _Vectored, fd: int, views: list[memoryview], start: int) -> None:
    wanted = sum(map(len, views))
    try:
        moved = call(fd, views, start)
        if moved < wanted:
            # Seldom: a signal or a full disk. One buffer after the other says which.
            _rest(call, fd, views, start, moved)
    except OSError as error:
        raise TransferError(f"the file cannot be used: {error.strerror}") from None


def _rest(call: _Vectored, fd: int, views: list[memoryview], start: int, moved: int) -> None:
    at = start
    for view in views:
        done = max(0, min(len(view), start + moved - at))
        while done < len(view):
            more = call(fd, [view[done:]], at + done)
            if not more:
                raise RegionGone(f"the file ends at byte {at + done}")
            done += more
        at += len(view)
