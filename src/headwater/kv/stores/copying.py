"""Copying a block between two buffers: summed on the way, and without keeping other Python threads from running."""

import ctypes

from headwater.kv.checksum import Checksum, checksum
from headwater.transfer.memory import address_of

_SMALL_BYTES = 128 << 10
"""Below, a slice assignment is faster than a call that gives up the interpreter lock, and as short."""
SLICE_BYTES = 256 << 10
"""Summed while it is still in the cache of the processor that moved it."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy between views of the same length."""
    size = len(target)
    if size < _SMALL_BYTES:
        target[:] = source
        return
    _check(size, source)
    ctypes.memmove(_address(target), _address(source), size)


def copy_summed(target: memoryview, source: memoryview, block_id: bytes) -> int:
    """Copy between views of the same length; the checksum of what has arrived."""
    size = len(target)
    _check(size, source)
    if size < _SMALL_BYTES:
        target[:] = source
        return checksum(block_id, target)
    to, at = _address(target), _address(source)
    total = Checksum(block_id)
    for start in range(0, size, SLICE_BYTES):
        ctypes.memmove(to + start, at + start, min(SLICE_BYTES, size - start))
        total.add(target[start : start + SLICE_BYTES])
    return total.value()


def _check(size: int, source: memoryview) -> None:
    if len(source) != size:
        raise ValueError(f"a block of {len(source)} bytes does not fit a buffer of {size}")


def _address(view: memoryview) -> int:
    return address_of(view) if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
