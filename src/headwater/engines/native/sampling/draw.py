"""One token from one row of logits: exact truncation and inverse CDF, without ordering the whole vocabulary.

The 64 largest tokens nearly always hold all that the cuts let through; rows where they do not are widened step by
step. Sums run over blocks of 256 values in a fixed order.

Rows are handled one at a time with operations whose order depends on the vocabulary size alone, so a row gives the
same bits alone and in any batch. Ties are broken by the lower token id.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MAX_TOP = 64
"""Most tokens `RowSampler.largest` can report."""

_WIDENING = (MAX_TOP, 2048, 16384)
"""How many of the largest tokens are ordered, until they hold all that the cuts let through."""
_BLOCK = 256
_LEAST = np.finfo(np.float32).min
"""Below every value but -inf, which marks masked tokens."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Which tokens may be drawn. Applied in the order min_p, top_k, top_p, each on what the one before left."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def keep_all(self) -> bool:
        return self.top_k == 0 and self.top_p >= 1.0 and self.min_p <= 0.0

    @property
    def floor(self) -> np.float32:
        """Least scaled logit that min_p lets through; masked tokens are always below."""
        return np.float32(math.log(self.min_p)) if self.min_p > 0 else _LEAST


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest scaled logits, in falling order."""

    values: Floats
    token_ids: NDArray[np.intp]


class RowSampler:
    """Working memory for one vocabulary size. `load` a row, then ask. Not for use from two threads."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._padded = np.full(-(-vocab_size // _BLOCK) * _BLOCK, -np.inf, dtype=np.float32)
        self._weights = np.empty_like(self._padded)
        self.scaled = self._padded[:vocab_size]
        """(logits - largest logit) / temperature of the loaded row."""

    def load(self, logits: Floats, peak: np.float32, temperature: float = 1.0) -> None:
        """Take in a row. `peak` is its largest value and must be finite."""
        np.subtract(logits, peak, out=self.scaled)
        if temperature != 1.0:
            np.multiply(self.scaled, np.float32(1.0 / temperature), out=self.scaled)

    def mass(self) -> float:
        """Sum of exp(scaled)."""
        return self._accumulate(self._padded).total

    def largest(self, count: int = MAX_TOP) -> Largest:
        """The `count` largest tokens that are not masked (fewer if there are fewer)."""
        token_ids = np.flatnonzero(self.scaled >= self._bound_by_rank(count))
        values = self.scaled[token_ids]
        order = np.argsort(-values, kind="stable")[:count]
        return Largest(values[order], token_ids[order])

    def draw(self, cuts: Cuts, uniform: float) -> int:
        """The token at quantile `uniform` of the truncated distribution."""
        if cuts.keep_all:
            weights = self._accumulate(self._padded)
            return weights.find(uniform * weights.total, "right")
        for count in (*_WIDENING, self._vocab_size):
            if count >= min(cuts.top_k, self._vocab_size):
                token_id = self._draw_among(count, cuts, uniform)
                if token_id is not None:
                    return token_id
        raise AssertionError("the whole vocabulary holds all that the cuts let through")

    def _draw_among(self, count: int, cuts: Cuts, uniform: float) -> int | None:
        """Draw if the `count` largest tokens hold all that the cuts let through; None if they do not."""
        values = self._top_values(count)
        complete = len(values) < count or count == self._vocab_size
        if cuts.min_p > 0:
            kept = values[: int(np.searchsorted(-values, -cuts.floor, side="right"))]
            complete |= len(kept) < len(values)
            values = kept
        if cuts.top_k:
            values, complete = values[: cuts.top_k], True
        if not complete and (cuts.min_p > 0 or cuts.top_p >= 1):
            return None
        total = None if complete else self.mass()
        weights = self._accumulate(values)
        last, kept_mass = len(values) - 1, weights.total
        if cuts.top_p < 1:
            goal = cuts.top_p * (kept_mass if total is None else total)
            if goal > kept_mass and not complete:
                return None
            last = weights.find(goal, "left")
            kept_mass = weights.up_to(last)
        place = min(weights.find(uniform * kept_mass, "right"), last)
        equal = int(np.searchsorted(-values, -values[place], side="left"))
        return int(np.flatnonzero(self.scaled == values[place])[place - equal])

    def _top_values(self, count: int) -> Floats:
        """The `count` largest values that are not masked, falling; fewer if there are fewer."""
        if count <= MAX_TOP:
            values = self.scaled[self.scaled >= self._bound_by_rank(count)]
        elif count < self._vocab_size:
            values = np.partition(self.scaled, self._vocab_size - count)[-count:]
        else:
            values = self.scaled
        values = -np.sort(-values)[:count]
        return values[: int(np.searchsorted(-values, -_LEAST, side="right"))]

    def _bound_by_rank(self, rank: int) -> np.float32:
        """At least `rank` values are no less than this: each of `rank` columns has one."""
        maxima = self._padded.reshape(_BLOCK, -1).max(axis=0)
        if rank >= len(maxima):
            return _LEAST
        bound: np.float32 = np.partition(maxima, len(maxima) - rank)[len(maxima) - rank]
        return max(bound, _LEAST)

    def _accumulate(self, values: Floats) -> "_Weights":
        """exp(values) in the working memory, until the next call."""
        count = len(values)
        padded = self._weights[: -(-count // _BLOCK) * _BLOCK]
        np.exp(values, out=padded[:count])
        padded[count:] = 0
        return _Weights(padded)


class _Weights:
    """Weights and where their running sum reaches a target, found by blocks."""

    def __init__(self, weights: Floats) -> None:
        self._weights = weights
        self._ends = np.cumsum(weights.reshape(-1, _BLOCK).sum(axis=1), dtype=np.float64)
        self.total = float(self._ends[-1])

    def find(self, target: float, side: Literal["left", "right"]) -> int:
        """First index whose running sum exceeds (`right`) or reaches (`left`) the target.

        Where rounding puts the target beyond the last weight, the last index that has weight.
        """
        block = min(int(np.searchsorted(self._ends, target, side=side)), len(self._ends) - 1)
        within = self._within(block)
        index = int(np.searchsorted(within, target, side=side))
        if index == _BLOCK:
            index = int(np.searchsorted(within, within[-1], side="left"))
        return block * _BLOCK + index

    def up_to(self, index: int) -> float:
        """Running sum at `index`, that weight included."""
        return float(self._within(index // _BLOCK)[index % _BLOCK])

    def _within(self, block: int) -> NDArray[np.float64]:
        before = self._ends[block - 1] if block else 0.0
        within: NDArray[np.float64] = before + np.cumsum(
            self._weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64
        )
        return within
