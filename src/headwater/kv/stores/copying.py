"""Copying a block between two buffers: summed on the way, and without keeping other Python threads from running."""

import ctypes

from headwater.kv.checksum import PART_BYTES, Checksum, checksum
from headwater.transfer.memory import address_of

_SMALL_BYTES = 128 << 10
"""Up to here a slice assignment is faster than a call that gives up the interpreter lock, and as short."""
_first_byte, _address_of_byte, _move = ctypes.c_char.from_buffer, ctypes.addressof, ctypes.memmove
"""Looked up once: a lookup costs as much as the call."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy between views of the same length."""
    size = len(target)
    if size <= _SMALL_BYTES:
        target[:] = source
    elif len(source) == size:
        _move(_place(target), _address(source), size)
    else:
        raise _misfit(target, source)


def copy_summed(target: memoryview, source: memoryview, block_id: bytes) -> int:
    """Copy between views of the same length; the checksum of what has arrived."""
    size = len(target)
    if size <= PART_BYTES:
        copy(target, source)
        return checksum(block_id, target)
    if len(source) != size:
        raise _misfit(target, source)
    to, at = _place(target), _address(source)
    total = Checksum(block_id)
    for start in range(0, size, PART_BYTES):
        _move(to + start, at + start, min(PART_BYTES, size - start))
        total.add(target[start : start + PART_BYTES])
    return total.value()


def _misfit(target: memoryview, source: memoryview) -> ValueError:
    return ValueError(f"a block of {len(source)} bytes does not fit a buffer of {len(target)}")


def _place(target: memoryview) -> int:
    """Where it lies. Raises `TypeError` if it is not to be written to."""
    return _address_of_byte(_first_byte(target))


def _address(source: memoryview) -> int:
    return address_of(source) if source.readonly else _place(source)
