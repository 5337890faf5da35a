"""Random numbers that are a function of (seed, position), with no state to keep, move or lose.

Philox 4x32 with ten rounds (Salmon et al., 2011), vectorised over positions. The key is the seed modulo 2**64, the
counter is the position, so a preempted, batched or moved sequence draws the same numbers.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]
"""32-bit words in 64-bit lanes, so that products do not overflow."""


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over lanes of counters under one key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c1 = product1 & _WORD
        c2 = (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c3 = product0 & _WORD
        k0 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(seed: int, first_position: int, count: int) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each of `count` positions."""
    positions = np.arange(first_position, first_position + count, dtype=np.uint64)
    zeros = np.zeros_like(positions)
    key = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    high, low, _, _ = philox4x32((positions & _WORD, positions >> _SHIFT, zeros, zeros), key)
    bits = ((high << _SHIFT) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
