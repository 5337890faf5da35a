"""Cross-memory attach: the kernel copies between two processes of one host, a thousand spans per system call.

Works for any memory of the peer, if the kernel permits it: the same user or CAP_SYS_PTRACE, no stricter Yama scope, a
shared PID namespace. Tried when the link is made, by reading a landmark in the peer's memory.
"""

import ctypes
import errno
import os
from array import array
from typing import NamedTuple

from headwater.errors import LinkUnavailable, PeerLost, RegionGone, TransferError
from headwater.transfer.base import Grant, PeerSession, RemoteRegion
from headwater.transfer.blocks import Chunk, joined
from headwater.transfer.card import RegionKind
from headwater.transfer.outcome import Stop
from headwater.transfer.regions import Region

_CPU_KINDS: tuple[RegionKind, ...] = ("shared", "memory")
_LANDMARK_BYTES = 16


class CmaBackend:
    """See the module docstring."""

    name = "cma"

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._read = getattr(libc, "process_vm_readv", None)
        self._write = getattr(libc, "process_vm_writev", None)
        for call in (self._read, self._write):
            if call is not None:
                call.restype = ctypes.c_ssize_t
                call.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]

    def unavailable(self) -> str:
        return "" if self._read and self._write else "this C library has no process_vm_readv"

    def serves(self, local: RegionKind, remote: RegionKind) -> bool:
        return local in _CPU_KINDS and remote in _CPU_KINDS

    def connect(self, session: PeerSession, stop: Stop) -> "CmaLink":
        if not session.same_host:
            raise LinkUnavailable("the peer is not on this host, or its Unix socket cannot be reached from here")
        if not session.peer_pid:
            raise LinkUnavailable("the peer lives in a PID namespace that cannot be seen from here")
        link = CmaLink(session.peer_pid, self._read, self._write)
        link.probe(*session.landmark)
        return link

    def grant(self, region: Region, offer: bytes) -> Grant:
        if region.card.kind not in _CPU_KINDS:
            raise LinkUnavailable(f"region {region.card.id} is a {region.card.kind}")
        return Grant(address=region.buffer.address)

    def forget(self, region: Region) -> None:
        """Nothing is kept per region."""

    def close(self) -> None:
        """There is nothing to close."""


class _Step(NamedTuple):
    region: Region
    remote: RemoteRegion
    local_vectors: "array[int]"
    remote_vectors: "array[int]"
    num_bytes: int
    write: bool


class CmaLink:
    lanes = 1

    def __init__(
        self, pid: int, read: "ctypes._NamedFuncPointer | None", write: "ctypes._NamedFuncPointer | None"
    ) -> None:
        self._pid = pid
        self._calls = (read, write)

    def probe(self, address: int, landmark: bytes) -> None:
        """Raise `LinkUnavailable` unless the peer's memory can be read, and is the peer's."""
        found = ctypes.create_string_buffer(_LANDMARK_BYTES)
        here = array("Q", [ctypes.addressof(found), _LANDMARK_BYTES])
        try:
            self._call(False, here, array("Q", [address, _LANDMARK_BYTES]), _LANDMARK_BYTES)
        except TransferError as error:
            raise LinkUnavailable(error.message) from None
        if len(landmark) != _LANDMARK_BYTES or found.raw != landmark:
            raise LinkUnavailable("the process at the other end of the socket is not the one with the memory")

    def attach(self, remote: RemoteRegion) -> None:
        if not remote.address:
            raise LinkUnavailable("the peer gave no address")

    def prepare(self, region: Region, remote: RemoteRegion, chunk: Chunk, *, write: bool) -> _Step:
        here = _vectors(region.buffer.address, *joined(chunk.local, chunk.lengths))
        there = _vectors(remote.address, *joined(chunk.remote, chunk.lengths))
        return _Step(region, remote, here, there, chunk.num_bytes, write)

    def move(self, step: _Step, stop: Stop) -> None:
        with step.region.hold, step.remote.hold:
            self._call(step.write, step.local_vectors, step.remote_vectors, step.num_bytes)

    def close(self) -> None:
        """There is nothing to close."""

    def _call(self, write: bool, here: "array[int]", there: "array[int]", num_bytes: int) -> None:
        call = self._calls[write]
        if call is None:
            raise LinkUnavailable("this C library has no process_vm_readv")
        moved = call(self._pid, here.buffer_info()[0], len(here) // 2, there.buffer_info()[0], len(there) // 2, 0)
        if moved == num_bytes:
            return
        # A short count means that one address was bad; there is no errno then.
        raise _error(ctypes.get_errno() if moved < 0 else errno.EFAULT)


def _error(code: int) -> TransferError:
    if code == errno.ESRCH:
        return PeerLost("the peer's process is gone")
    if code == errno.EFAULT:
        return RegionGone("memory of the transfer is not mapped (any more)")
    return LinkUnavailable(f"the kernel refuses access to the peer's memory: {os.strerror(code)}")


def _vectors(address: int, offsets: list[int], lengths: list[int]) -> "array[int]":
    return array("Q", [number for at, size in zip(offsets, lengths, strict=True) for number in (address + at, size)])
