"""Copying a block between two buffers: summed on the way, and without keeping other Python threads from running."""

import ctypes

from headwater.kv.checksum import AT_ONCE_BYTES, Checksum, checksum
from headwater.transfer.memory import address_of

_SMALL_BYTES = 128 << 10
"""Up to here a slice assignment is faster than a call that gives up the interpreter lock, and as short."""
SLICE_BYTES = 256 << 10
"""Summed while it is still in the cache of the processor that moved it."""
_first_byte, _address_of_byte, _move = ctypes.c_char.from_buffer, ctypes.addressof, ctypes.memmove


def copy(target: memoryview, source: memoryview) -> None:
    """Copy between views of the same length."""
    size = len(target)
    if size <= _SMALL_BYTES:
        target[:] = source
    elif len(source) == size:
        _move(_address(target), _address(source), size)
    else:
        raise _misfit(target, source)


def copy_summed(target: memoryview, source: memoryview, block_id: bytes) -> int:
    """Copy between views of the same length; the checksum of what has arrived."""
    size = len(target)
    if size <= AT_ONCE_BYTES:
        copy(target, source)
        return checksum(block_id, target)
    if len(source) != size:
        raise _misfit(target, source)
    to, at = _address(target), _address(source)
    total = Checksum(block_id)
    for start in range(0, size, SLICE_BYTES):
        _move(to + start, at + start, min(SLICE_BYTES, size - start))
        total.add(target[start : start + SLICE_BYTES])
    return total.value()


def _misfit(target: memoryview, source: memoryview) -> ValueError:
    return ValueError(f"a block of {len(source)} bytes does not fit a buffer of {len(target)}")


def _address(view: memoryview) -> int:
    return address_of(view) if view.readonly else _address_of_byte(_first_byte(view))
