"""The memory of a host tier: one sealed memory file with the block table and the payloads, on huge pages if it may.

The node's process writes the table; workers map it read-only, look up without asking anyone, and copy payloads in and
out of places that the node's process gave them. The file has no name: it goes when the last process that holds it
does, so nothing is left behind by a crash. Its size cannot be changed by anyone once it is made.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

import msgspec

from headwater.config.units import about_bytes
from headwater.errors import ConfigError, StoreError
from headwater.kv.space import PAGE_BYTES
from headwater.kv.table import RECORD_BYTES, index_bytes
from headwater.transfer.memory import address_of, available_bytes

_HUGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAX_BYTES = 1 << 46


class PoolLayout(msgspec.Struct, frozen=True, array_like=True):
    """Where things lie in the file: records, index, then payloads from a huge page boundary on."""

    capacity: int
    """Blocks at most."""
    data_bytes: int

    @property
    def records_bytes(self) -> int:
        return self.capacity * RECORD_BYTES

    @property
    def table_bytes(self) -> int:
        return _whole(self.records_bytes + index_bytes(self.capacity), PAGE_BYTES)

    @property
    def data_offset(self) -> int:
        return _whole(self.table_bytes, _HUGE_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.data_offset + _whole(self.data_bytes, _HUGE_BYTES)


class SharedPool:
    """See the module docstring. `data` holds payloads, `records` and `index` the table."""

    def __init__(self, fd: int, layout: PoolLayout, *, owner: bool) -> None:
        """Owns `fd`."""
        self.fd, self.layout = fd, layout
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if owner else 0)
        self._table = mmap.mmap(fd, layout.table_bytes, prot=prot)
        self._data = mmap.mmap(fd, layout.file_bytes - layout.data_offset, offset=layout.data_offset)
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
            self._data.madvise(mmap.MADV_HUGEPAGE)
        self._views = [memoryview(self._table), memoryview(self._data)]
        table, data = self._views
        index_end = layout.records_bytes + index_bytes(layout.capacity)
        self.records = table[: layout.records_bytes]
        self.index = table[layout.records_bytes : index_end]
        self.data = data[: layout.data_bytes]
        self.address = address_of(self.data)

    @classmethod
    def create(cls, data_bytes: int, capacity: int) -> "SharedPool":
        """All memory is taken now, so that none of it can be found missing later. Raises `ConfigError`."""
        if data_bytes < PAGE_BYTES:
            raise ConfigError(f"a host tier of {data_bytes} bytes has no room for blocks", hint="give it more")
        layout = PoolLayout(capacity, data_bytes)
        available = available_bytes()
        if layout.file_bytes > available:
            raise ConfigError(
                f"a host tier of {about_bytes(data_bytes)} does not fit: {about_bytes(available)} are available",
                hint="give it less, or stop what takes the memory",
            )
        fd = os.memfd_create("headwater-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.file_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            pool = cls(fd, layout, owner=True)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"cannot make a host tier of {data_bytes} bytes: {error.strerror}") from None
        try:
            _populate(pool.address, pool._views[1].nbytes)
        except OSError as error:
            pool.close()
            raise ConfigError(f"cannot take {data_bytes} bytes for the host tier: {error.strerror}") from None
        return pool

    @classmethod
    def attach(cls, fd: int, layout: PoolLayout) -> "SharedPool":
        """Map the pool of another process, and own `fd`. Refused unless it can no longer be cut short under us."""
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            sane = 0 < layout.data_bytes < _MAX_BYTES and 0 < layout.capacity < 1 << 32
            if not (sealed and sane and os.fstat(fd).st_size >= layout.file_bytes):
                raise StoreError("the node's memory is not sealed, or shorter than it says")
            return cls(fd, layout, owner=False)
        except OSError as error:
            os.close(fd)
            raise StoreError(f"the node's memory cannot be mapped: {error.strerror}") from None
        except StoreError:
            os.close(fd)
            raise

    def view(self, offset: int, num_bytes: int) -> memoryview:
        return self.data[offset : offset + num_bytes]

    def huge_bytes(self) -> int:
        """How much of the payload memory is on huge pages now."""
        return _huge_bytes_at(self.address)

    def close(self) -> None:
        """Idempotent. Memory somebody still looks at is unmapped when they stop."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        for view in (self.records, self.index, self.data, *self._views):
            view.release()
        for mapping in (self._table, self._data):
            with contextlib.suppress(BufferError):  # a view of a block is still in use
                mapping.close()


def _whole(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _populate(address: int, num_bytes: int) -> None:
    """Have the kernel take the memory, huge pages where it has them. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    step = 256 << 20
    for start in range(0, num_bytes, step):
        length = ctypes.c_size_t(min(step, num_bytes - start))
        if libc.madvise(ctypes.c_void_p(address + start), length, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                # Before Linux 5.14: touching does it, and then a lack of memory is a signal instead of an error.
                ctypes.memset(address + start, 0, length.value)
                continue
            raise OSError(code, os.strerror(code))


def _huge_bytes_at(address: int) -> int:
    found = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if line.startswith(f"{address:08x}-"):
                found = True
            elif found and line.startswith("ShmemPmdMapped:"):
                return int(line.split()[1]) << 10
    return 0
