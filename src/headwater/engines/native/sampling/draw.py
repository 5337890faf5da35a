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
        self._columns = vocab_size // _BLOCK
        padded = -(-vocab_size // _BLOCK) * _BLOCK
        self._weights = np.zeros(padded, dtype=np.float32)
        self._scaled = np.empty(vocab_size, dtype=np.float32)
        """(logits - peak) / temperature."""

    def load(self, logits: Floats, peak: np.float32) -> None:
        """Take in a row, which must stay as it is meanwhile. `peak` is its largest value and must be finite."""
        self._logits = logits
        self._peak = peak
        self._temperature: float | None = None
        self._largest: Largest | None = None

    def mass(self, temperature: float = 1.0) -> float:
        """Sum of exp((logits - peak) / temperature)."""
        if self._temperature != temperature:
            self._all_weights(temperature)
        return self._total

    def log_total(self) -> float:
        """Natural logarithm of the sum of exp(logits)."""
        return float(self._peak) + math.log(self.mass())

    def largest(self) -> Largest:
        """The `MAX_TOP` largest tokens that are not masked (fewer if there are fewer)."""
        if self._largest is None:
            token_ids = np.flatnonzero(self._logits >= self._bound_by_rank(MAX_TOP))
            values = self._logits[token_ids]
            order = np.argsort(-values, kind="stable")[:MAX_TOP]
            self._largest = Largest(values[order], token_ids[order])
        return self._largest

    def draw(self, cuts: Cuts, temperature: float, uniform: float) -> int:
        """The token at quantile `uniform` of the truncated distribution."""
        if cuts.keep_all:
            weights = self._all_weights(temperature)
            return weights.find(uniform * weights.total, "right")
        for count in (*_WIDENING, self._vocab_size):
            if count >= min(cuts.top_k, self._vocab_size):
                token_id = self._draw_among(count, cuts, temperature, uniform)
                if token_id is not None:
                    return token_id
        raise AssertionError("the whole vocabulary holds all that the cuts let through")

    def _draw_among(self, count: int, cuts: Cuts, temperature: float, uniform: float) -> int | None:
        """Draw if the `count` largest tokens hold all that the cuts let through; None if they do not."""
        values = self._top_values(count, temperature)
        complete = len(values) < count or count == self._vocab_size
        if cuts.min_p > 0:
            kept = values[: int(np.searchsorted(-values, -cuts.floor, side="right"))]
            complete |= len(kept) < len(values)
            values = kept
        if cuts.top_k:
            values, complete = values[: cuts.top_k], True
        if not complete and (cuts.min_p > 0 or cuts.top_p >= 1):
            return None
        total = None if complete else self.mass(temperature)
        weights = self._accumulate(values)
        last, kept_mass = len(values) - 1, weights.total
        if cuts.top_p < 1:
            goal = cuts.top_p * (kept_mass if total is None else total)
            if goal > kept_mass and not complete:
                return None
            last = weights.find(goal, "left")
            kept_mass = weights.up_to(last)
        place = min(weights.find(uniform * kept_mass, "right"), last)
        if count <= MAX_TOP:
            return int(self.largest().token_ids[place])
        equal = int(np.searchsorted(-values, -values[place], side="left"))
        return int(np.flatnonzero(self._scaled == values[place])[place - equal])

    def _top_values(self, count: int, temperature: float) -> Floats:
        """The `count` largest scaled values that are not masked, falling; fewer if there are fewer."""
        if count <= MAX_TOP:
            return self._scale(self.largest().values, temperature)
        self.mass(temperature)
        values = self._scaled
        if count < self._vocab_size:
            values = np.partition(values, self._vocab_size - count)[-count:]
        values = -np.sort(-values)
        return values[: int(np.searchsorted(-values, -_LEAST, side="right"))]

    def _bound_by_rank(self, rank: int) -> np.float32:
        """At least `rank` values are no less than this: each of `rank` columns of a grid has one."""
        if rank > self._columns:
            return _LEAST
        maxima = self._logits[: self._columns * _BLOCK].reshape(_BLOCK, self._columns).max(axis=0)
        bound: np.float32 = np.partition(maxima, self._columns - rank)[self._columns - rank]
        return max(bound, _LEAST)

    def _scale(self, values: Floats, temperature: float, out: Floats | None = None) -> Floats:
        scaled = np.subtract(values, self._peak, out=out)
        return scaled if temperature == 1.0 else np.multiply(scaled, np.float32(1.0 / temperature), out=scaled)

    def _all_weights(self, temperature: float) -> "_Weights":
        weights = self._accumulate(self._scale(self._logits, temperature, self._scaled))
        self._temperature, self._total = temperature, weights.total
        return weights

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
        self._blocks = weights.reshape(-1, _BLOCK)
        self._block = -1
        if len(self._blocks) == 1:
            self._ends = np.cumsum(weights, dtype=np.float64)[-1:]
        else:
            self._ends = np.cumsum(self._blocks.sum(axis=1), dtype=np.float64)
        self.total = float(self._ends[-1])

    def find(self, target: float, side: Literal["left", "right"]) -> int:
        """First index whose running sum exceeds (`right`) or reaches (`left`) the target.

        Where rounding puts the target beyond the last weight, the last index that has weight.
        """
        block = min(int(self._ends.searchsorted(target, side=side)), len(self._ends) - 1)
        within = self._within(block)
        index = int(within.searchsorted(target, side=side))
        if index == _BLOCK:
            index = int(within.searchsorted(within[-1], side="left"))
        return block * _BLOCK + index

    def up_to(self, index: int) -> float:
        """Running sum at `index`, that weight included."""
        return float(self._within(index // _BLOCK)[index % _BLOCK])

    def _within(self, block: int) -> NDArray[np.float64]:
        if block != self._block:
            self._block = block
            self._sums: NDArray[np.float64] = np.cumsum(self._blocks[block], dtype=np.float64)
            if block:
                self._sums += self._ends[block - 1]
        return self._sums
