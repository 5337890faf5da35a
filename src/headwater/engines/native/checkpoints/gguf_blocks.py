"""GGUF's quantised blocks taken apart into codes, scales and offsets, without a loss.

Every value of these types is `scale * code + offset` rounded once to float32: products of the stored half-precision
scales with codes are exact in float32. Types that do not fit this form are left to the `gguf` package.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headwater.engines.native.base import QuantisedTensor

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]
_SIXTEEN: Final = np.uint8(16)
_Parts = tuple[_Bytes, _Floats, _Floats]
"""Codes [blocks, groups, group], scale and offset [blocks, groups]."""


def quantised_tensor(rows: _Bytes, type_name: str, block_bytes: int) -> QuantisedTensor | None:
    """The matrix whose rows are the blocks in `rows` [N, bytes]; None for a type that does not fit."""
    if type_name not in _TYPES:
        return None
    take_apart, bits = _TYPES[type_name]
    codes, scale, offset = take_apart(rows.reshape(-1, block_bytes))
    count = rows.shape[0]
    return QuantisedTensor(
        codes=np.ascontiguousarray(codes.reshape(count, -1), np.uint8),
        scale=np.ascontiguousarray(scale.reshape(count, -1), np.float32),
        offset=np.ascontiguousarray(offset.reshape(count, -1), np.float32),
        group=codes.shape[-1],
        bits=bits,
    )


def _half(blocks: _Bytes, start: int) -> _Floats:
    """[blocks, 1]"""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    """Low nibbles of all bytes, then high ones, along the last axis."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _centred(codes: _Bytes, scale: _Floats, zero: int) -> _Parts:
    """value = scale * (code - zero)"""
    return codes, scale, np.float32(-zero) * scale


def _q4_0(blocks: _Bytes) -> _Parts:
    return _centred(_nibbles(blocks[:, None, 2:]), _half(blocks, 0), 8)


def _q4_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, None, 4:]), _half(blocks, 0), _half(blocks, 2)


def _fifth_bits(packed: _Bytes) -> _Bytes:
    """[blocks, 4] -> [blocks, 1, 32], worth 16 each."""
    return np.unpackbits(packed, axis=-1, bitorder="little")[:, None, :] * _SIXTEEN


def _q5_0(blocks: _Bytes) -> _Parts:
    return _centred(_nibbles(blocks[:, None, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), 16)


def _q5_1(blocks: _Bytes) -> _Parts:
    codes = _nibbles(blocks[:, None, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Parts:
    return _centred(blocks[:, None, 2:] ^ np.uint8(0x80), _half(blocks, 0), 128)


def _k_parameters(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Scale and offset of the eight groups of a Q4_K or Q5_K block: 6-bit multiples of the block's own."""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (both & 15) | (first >> 6 << 4)], axis=1)
    offsets = np.concatenate([second & 63, (both >> 4) | (second >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), -_half(blocks, 2) * offsets.astype(np.float32)


def _q4_k(blocks: _Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return codes, *_k_parameters(blocks)


def _q5_k(blocks: _Bytes) -> _Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    groups = np.arange(8, dtype=np.uint8)[None, :, None]
    high = (blocks[:, None, 16:48] >> groups & 1).astype(np.uint8)
    return low | high * _SIXTEEN, *_k_parameters(blocks)


def _q6_k(blocks: _Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).astype(np.uint8)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _centred((low | high * _SIXTEEN).reshape(-1, 16, 16), scale, 32)


_TYPES: Final[dict[str, tuple[Callable[[_Bytes], _Parts], int]]] = {
    "Q4_0": (_q4_0, 4),
    "Q4_1": (_q4_1, 4),
    "Q5_0": (_q5_0, 8),
    "Q5_1": (_q5_1, 8),
    "Q8_0": (_q8_0, 8),
    "Q4_K": (_q4_k, 4),
    "Q5_K": (_q5_k, 8),
    "Q6_K": (_q6_k, 8),
}
