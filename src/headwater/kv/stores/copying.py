"""Copying a block between two buffers without keeping other Python threads from running."""

import ctypes

from headwater.transfer.memory import address_of

_SMALL_BYTES = 128 << 10
"""Below, a slice assignment is faster than a call that gives up the interpreter lock, and as short."""


def copy(target: memoryview, source: memoryview) -> None:
    """Both of the same length."""
    size = len(target)
    if size < _SMALL_BYTES:
        target[:] = source
        return
    if len(source) != size:
        raise ValueError(f"a block of {len(source)} bytes does not fit a buffer of {size}")
    ctypes.memmove(_address(target), _address(source), size)


def _address(view: memoryview) -> int:
    return address_of(view) if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
