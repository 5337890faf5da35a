"""Device memory of one host: CUDA IPC handles between processes, copies by the driver. Needs libcuda alone.

Serves device <-> device, and device <-> host memory that is ours or shared by the peer; host memory is page-locked when
it is first used, so that copies run at the speed of the bus. A device pointer of another host is not for this back-end.

Not exercised by the tests of machines without a GPU.
"""

import ctypes
import os
import threading
from typing import Any, NamedTuple

import msgspec

from headwater.errors import LinkUnavailable, TransferError
from headwater.transfer.base import Grant, PeerSession, RemoteRegion
from headwater.transfer.blocks import Chunk
from headwater.transfer.card import RegionKind
from headwater.transfer.memory import map_sealed
from headwater.transfer.outcome import Stop
from headwater.transfer.regions import Region

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """How to get at a region of a device."""

    pid: int
    device: int
    handle: bytes
    offset: int
    """Of the region in the allocation that the handle names."""


class Driver:
    """The few calls of libcuda that are needed. Each raises `LinkUnavailable` with the driver's reason."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LinkUnavailable(f"there is no CUDA driver here: {error}") from None
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self._call("cuInit", 0)

    def use(self, device: int) -> None:
        """Work on this device in this thread."""
        with self._lock:
            if device not in self._contexts:
                handle, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(handle), device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                self._contexts[device] = context
        self._call("cuCtxSetCurrent", self._contexts[device])

    def export(self, address: int) -> tuple[bytes, int]:
        """Handle of the allocation around an address, and where in it the address lies."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        pointer = ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(bytearray(handle)), address - base.value

    def open(self, handle: bytes) -> int:
        pointer = ctypes.c_uint64()
        copied = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), copied, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return pointer.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def lock_pages(self, address: int, num_bytes: int) -> None:
        self._call(
            "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE)
        )

    def unlock_pages(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy(self, spans: list[tuple[int, int, int]]) -> None:
        """Copy (to, from, length) spans and wait for all."""
        for to, at, length in spans:
            self._call("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(at), ctypes.c_size_t(length), None)
        self._call("cuStreamSynchronize", None)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise LinkUnavailable(f"{name}: {(text.value or b'error %d' % code).decode()}")


class CudaBackend:
    """See the module docstring."""

    name = "cuda"

    def __init__(self) -> None:
        self._driver: Driver | None = None
        self._locked: set[int] = set()
        self._lock = threading.Lock()

    def unavailable(self) -> str:
        try:
            self.driver()
        except LinkUnavailable as error:
            return error.message
        return ""

    def driver(self) -> Driver:
        with self._lock:
            if self._driver is None:
                self._driver = Driver()
            return self._driver

    def serves(self, local: RegionKind, remote: RegionKind) -> bool:
        if local == "device":
            return remote in ("device", "shared")
        return remote == "device" and local in ("shared", "memory")

    def connect(self, session: PeerSession, stop: Stop) -> "CudaLink":
        if not session.same_host:
            raise LinkUnavailable("CUDA IPC does not leave the host")
        return CudaLink(self)

    def grant(self, region: Region, offer: bytes) -> Grant:
        if region.card.kind == "shared":
            return Grant(fd=region.buffer.fd)
        driver = self.driver()
        driver.use(region.buffer.device)
        handle, offset = driver.export(region.buffer.address)
        made = _Offer(os.getpid(), region.buffer.device, handle, offset)
        return Grant(address=region.buffer.address, offer=msgspec.msgpack.encode(made))

    def lock_pages(self, address: int, num_bytes: int) -> None:
        """Once; memory that cannot be locked is only slower."""
        with self._lock:
            if address in self._locked:
                return
            self._locked.add(address)
        try:
            self.driver().lock_pages(address, num_bytes)
        except LinkUnavailable:
            with self._lock:
                self._locked.discard(address)

    def forget(self, region: Region) -> None:
        with self._lock:
            known = region.buffer.address in self._locked
            self._locked.discard(region.buffer.address)
        if known:
            self.driver().unlock_pages(region.buffer.address)

    def close(self) -> None:
        """The driver stays loaded, as libraries do."""
        with self._lock:
            locked, self._locked = self._locked, set()
        for address in locked:
            self.driver().unlock_pages(address)


class _Step(NamedTuple):
    region: Region
    remote: RemoteRegion
    device: int
    spans: list[tuple[int, int, int]]


class CudaLink:
    lanes = 1

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._opened: list[tuple[int, int]] = []

    def attach(self, remote: RemoteRegion) -> None:
        if remote.card.kind == "shared":
            self._attach_shared(remote)
            return
        try:
            offer = msgspec.msgpack.decode(remote.offer, type=_Offer)
        except msgspec.MsgspecError as error:
            raise LinkUnavailable(f"the peer's handle is unusable: {error}") from None
        remote.state = offer.device
        if offer.pid == os.getpid():
            return  # a handle cannot be opened by the process that made it
        driver = self._backend.driver()
        driver.use(offer.device)
        base = driver.open(offer.handle)
        self._opened.append((offer.device, base))
        remote.address = base + offer.offset

    def _attach_shared(self, remote: RemoteRegion) -> None:
        fd, remote.fd = remote.fd, -1
        try:
            remote.buffer = map_sealed(fd, remote.card.num_bytes)
        except TransferError as error:
            raise LinkUnavailable(error.message) from None
        remote.address = remote.buffer.address

    def prepare(self, region: Region, remote: RemoteRegion, chunk: Chunk, *, write: bool) -> _Step:
        ours, theirs = region.buffer.address, remote.address
        pairs = zip(chunk.local, chunk.remote, chunk.lengths, strict=True)
        if write:
            spans = [(theirs + there, ours + here, size) for here, there, size in pairs]
        else:
            spans = [(ours + here, theirs + there, size) for here, there, size in pairs]
        device = region.buffer.device if region.card.kind == "device" else remote.state
        self._backend.driver().use(device)
        if region.card.kind != "device":
            self._backend.lock_pages(ours, region.buffer.num_bytes)
        return _Step(region, remote, device, spans)

    def move(self, step: _Step, stop: Stop) -> None:
        driver = self._backend.driver()
        with step.region.hold, step.remote.hold:
            driver.use(step.device)
            driver.copy(step.spans)

    def close(self) -> None:
        opened, self._opened = self._opened, []
        for device, base in opened:
            try:
                self._backend.driver().use(device)
                self._backend.driver().close(base)
            except LinkUnavailable:
                continue  # the peer's process is gone, and its memory with it
