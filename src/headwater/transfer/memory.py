"""Buffers as addresses: what a back-end needs of memory that others own.

A `Buffer` keeps its owner alive and exported, so the memory cannot move or be freed before `release()`.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
from pathlib import Path
from typing import Any

from headwater.errors import TransferRefused

_CGROUP = Path("/sys/fs/cgroup")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Buffer:
    """`num_bytes` bytes at `address`; `view` gives them to Python (None for memory the CPU cannot touch)."""

    __slots__ = ("_owner", "address", "device", "fd", "num_bytes", "origin", "readonly", "view")

    def __init__(self, owner: object, view: memoryview | None, address: int, num_bytes: int) -> None:
        self._owner: object = owner
        self.view = view
        self.address = address
        self.num_bytes = num_bytes
        self.readonly = view is not None and view.readonly
        self.device = 0
        """Number of the device whose memory it is."""
        self.fd = -1
        """A sealed memory file that holds the same bytes from offset 0, or a plain file; -1 if none."""
        self.origin: object = None
        """Where the bytes lie, if that is nowhere on this host."""

    def shared(self) -> "Buffer":
        """Another one on the same memory file, to be released on its own."""
        other = Buffer(self, None if self.view is None else memoryview(self.view), self.address, self.num_bytes)
        other.readonly = self.readonly
        other.fd = os.dup(self.fd)
        return other

    def release(self) -> None:
        """Let the owner go. Idempotent."""
        if self.view is not None:
            self.view.release()
            self.view = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        owner, self._owner = self._owner, None
        if isinstance(owner, mmap.mmap):
            # A prepared transfer may still hold a view; the mapping then goes with it.
            with contextlib.suppress(BufferError):
                owner.close()


def buffer_of(source: Any) -> Buffer:
    """Anything with the buffer protocol, or a CPU tensor with `data_ptr`. Raises `TransferRefused`."""
    if hasattr(source, "data_ptr"):
        return _tensor_buffer(source)
    try:
        view = memoryview(source).cast("B")
    except TypeError as error:
        raise TransferRefused(f"{type(source).__name__} is no contiguous buffer: {error}") from None
    if not view.nbytes:
        raise TransferRefused("an empty buffer has nothing to register")
    return Buffer(None, view, address_of(view), view.nbytes)


def allocate(num_bytes: int, *, lazily: bool = False) -> Buffer:
    """Zeroed memory that peers on this host can map, all of it taken now: none of it can be found missing later.

    It vanishes with the last process that holds it. `lazily`: taken page by page as it is written, like any other
    memory. Raises `TransferRefused` if there is not enough.
    """
    available = available_bytes()
    if not 0 < num_bytes <= available:
        # Taking it anyway would end in the kernel killing some process.
        raise TransferRefused(f"cannot allocate {num_bytes} bytes: {available} are available")
    fd = os.memfd_create("headwater-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if lazily:
            os.ftruncate(fd, num_bytes)
        else:
            os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return _mapped(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        raise TransferRefused(f"cannot allocate {num_bytes} bytes: {error.strerror}") from None


def map_sealed(fd: int, num_bytes: int) -> Buffer:
    """Map memory a peer sent, and own `fd`. Refused unless the peer can no longer cut it short under our feet."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size < num_bytes:
            raise TransferRefused("the peer's memory is not sealed, or shorter than it says")
        return _mapped(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        raise TransferRefused(f"the peer's memory cannot be mapped: {error}") from None
    except TransferRefused:
        os.close(fd)
        raise


def address_of(view: memoryview) -> int:
    """Where a buffer lies, read-only ones included."""
    raw = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(raw), 0)
    try:
        return int(raw.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))


def available_bytes() -> int:
    """What the kernel can give without swapping or going beyond the limit of our container."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise TransferRefused("/proc/meminfo does not say how much memory is available")
    available = int(found[1]) << 10
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limit = int((_CGROUP / "memory.max").read_text())
        available = min(available, limit - int((_CGROUP / "memory.current").read_text()))
    return available


def _mapped(fd: int, num_bytes: int) -> Buffer:
    mapping = mmap.mmap(fd, num_bytes)
    view = memoryview(mapping)
    made = Buffer(mapping, view, address_of(view), num_bytes)
    made.fd = fd
    return made


def _tensor_buffer(tensor: Any) -> Buffer:
    if not tensor.is_contiguous():
        raise TransferRefused("only contiguous tensors can be registered")
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        raise TransferRefused("an empty tensor has nothing to register")
    address = tensor.data_ptr()
    if tensor.device.type != "cpu":
        made = Buffer(tensor, None, address, num_bytes)
        made.device = tensor.get_device()
        return made
    view = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
    return Buffer(tensor, view, address, num_bytes)


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of CPython's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )
