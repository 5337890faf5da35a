"""Shared memory on one host: the peer's region is mapped here, a transfer is a copy.

Works for regions made by `Agent.allocate`; the memory file is sealed, so a peer cannot cut it short under our feet.
Small blocks are copied as slices, large ones by `memmove`, which lets other Python threads run meanwhile.
"""

import ctypes
from typing import NamedTuple

from headwater.errors import LinkUnavailable, TransferError
from headwater.transfer.base import Grant, PeerSession, RemoteRegion
from headwater.transfer.blocks import Chunk
from headwater.transfer.card import RegionKind
from headwater.transfer.memory import map_sealed
from headwater.transfer.outcome import Stop
from headwater.transfer.regions import Region

_SMALL_BYTES = 32 << 10
"""Below, a call that gives up the interpreter lock costs more than the copy."""


class SharedBackend:
    """See the module docstring."""

    name = "shm"

    def unavailable(self) -> str:
        return ""

    def serves(self, local: RegionKind, remote: RegionKind) -> bool:
        return remote == "shared" and local in ("shared", "memory")

    def connect(self, session: PeerSession, stop: Stop) -> "SharedLink":
        if not session.same_host:
            raise LinkUnavailable("the peer is not on this host, or its Unix socket cannot be reached from here")
        return SharedLink()

    def grant(self, region: Region, offer: bytes) -> Grant:
        if region.card.kind != "shared":
            raise LinkUnavailable(f"region {region.card.id} was not allocated as shared memory")
        return Grant(fd=region.buffer.fd)

    def forget(self, region: Region) -> None:
        """Nothing is kept per region."""

    def close(self) -> None:
        """Mappings belong to sessions."""


class _Step(NamedTuple):
    region: Region
    remote: RemoteRegion
    small: tuple[memoryview, memoryview, list[tuple[slice, slice]]]
    large: list[tuple[int, int, int]]


class SharedLink:
    lanes = 1

    def attach(self, remote: RemoteRegion) -> None:
        fd, remote.fd = remote.fd, -1
        if fd < 0:
            raise LinkUnavailable("the peer sent no descriptor")
        try:
            remote.buffer = map_sealed(fd, remote.card.num_bytes)
        except TransferError as error:
            raise LinkUnavailable(error.message) from None

    def prepare(self, region: Region, remote: RemoteRegion, chunk: Chunk, *, write: bool) -> _Step:
        here, there = region.buffer, remote.buffer
        if there is None or there.view is None:
            raise LinkUnavailable("the region was taken back")
        target, source = (there, here) if write else (here, there)
        to, at = (chunk.remote, chunk.local) if write else (chunk.local, chunk.remote)
        small = [
            (slice(t, t + n), slice(s, s + n))
            for t, s, n in zip(to, at, chunk.lengths, strict=True)
            if n < _SMALL_BYTES
        ]
        large = [
            (target.address + t, source.address + s, n)
            for t, s, n in zip(to, at, chunk.lengths, strict=True)
            if n >= _SMALL_BYTES
        ]
        views = (there.view, region.view) if write else (region.view, there.view)
        return _Step(region, remote, (*views, small), large)

    def move(self, step: _Step, stop: Stop) -> None:
        with step.region.hold, step.remote.hold:
            target, source, pairs = step.small
            for to, at in pairs:
                target[to] = source[at]
            for to_address, at_address, length in step.large:
                ctypes.memmove(to_address, at_address, length)

    def close(self) -> None:
        """Mappings belong to sessions."""
