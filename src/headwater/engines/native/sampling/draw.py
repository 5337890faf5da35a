"""One token from one row of logits: exact truncation and inverse CDF, without ever sorting the vocabulary.

A row is laid out as a grid of 64 rows and as many columns as needed (padded with -inf): sums and maxima over columns
are long vector operations in a fixed order. The largest tokens are found among the columns with the largest maxima;
only rows whose 64 best tokens do not settle the cut are looked at whole, and then only the tokens that share a narrow
band of logits with the cut are sorted.

Rows are handled one at a time with operations whose order depends on the vocabulary size alone, so a row gives the
same bits alone and in any batch. Ties are broken by the lower token id.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_TOP = 64
"""Most tokens `RowSampler.largest` can report, and the size of the first cut."""

_GRID_ROWS = 64
_BANDS_PER_NAT = 64
_NUM_BANDS = 64 * _BANDS_PER_NAT


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
        return np.float32(math.log(self.min_p)) if self.min_p > 0 else np.finfo(np.float32).min


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest scaled logits, in falling order."""

    values: NDArray[np.float32]
    token_ids: NDArray[np.intp]


class RowSampler:
    """Working memory for one vocabulary size. `load` a row, then ask. Not for use from two threads."""

    def __init__(self, vocab_size: int) -> None:
        columns = -(-vocab_size // _GRID_ROWS)
        self._vocab_size = vocab_size
        self._padded = np.full(_GRID_ROWS * columns, -np.inf, dtype=np.float32)
        self._weights = np.empty_like(self._padded)
        self._bands = np.empty(vocab_size, dtype=np.intp)
        self._grid = self._padded.reshape(_GRID_ROWS, columns)
        self._weight_grid = self._weights.reshape(_GRID_ROWS, columns)
        self.scaled = self._padded[:vocab_size]
        """(logits - largest logit) / temperature of the loaded row."""

    def load(self, logits: NDArray[np.float32], peak: np.float32, temperature: float = 1.0) -> None:
        """Take in a row. `peak` is its largest value and must be finite."""
        np.subtract(logits, peak, out=self.scaled)
        if temperature != 1.0:
            np.multiply(self.scaled, np.float32(1.0 / temperature), out=self.scaled)

    def column_mass(self) -> NDArray[np.float32]:
        """Sum of exp(scaled) over each column of the grid."""
        np.exp(self._padded, out=self._weights)
        mass: NDArray[np.float32] = self._weight_grid.sum(axis=0)
        return mass

    def log_total(self) -> float:
        """Natural logarithm of the sum of exp(scaled)."""
        return math.log(float(self.column_mass().sum(dtype=np.float64)))

    def largest(self, count: int = MAX_TOP) -> Largest:
        """The `count` largest tokens that are not masked (fewer if there are fewer)."""
        maxima = self._grid.max(axis=0)
        if len(maxima) > MAX_TOP:
            least = np.partition(maxima, len(maxima) - MAX_TOP)[len(maxima) - MAX_TOP]
        else:
            least = np.float32(-np.inf)
        candidates = self.scaled >= least if least > -np.inf else self.scaled > -np.inf
        token_ids = np.flatnonzero(candidates)
        values = self.scaled[token_ids]
        order = np.argsort(-values, kind="stable")[:count]
        return Largest(values[order], token_ids[order])

    def draw(self, cuts: Cuts, uniform: float) -> int:
        """The token at quantile `uniform` of the truncated distribution."""
        if cuts.keep_all:
            return self._draw_from_all(uniform)
        token_id = self._draw_from_largest(cuts, uniform)
        return self._draw_wide(cuts, uniform) if token_id is None else token_id

    def _draw_from_all(self, uniform: float) -> int:
        cumulative = np.cumsum(self.column_mass(), dtype=np.float64)
        column = _quantile(cumulative, uniform * cumulative[-1])
        before = cumulative[column - 1] if column else 0.0
        within = np.cumsum(self._weight_grid[:, column], dtype=np.float64)
        row = _quantile(within, uniform * cumulative[-1] - before)
        return row * len(cumulative) + column

    def _draw_from_largest(self, cuts: Cuts, uniform: float) -> int | None:
        """Draw if the largest tokens hold every token the cuts let through; None if they do not."""
        largest = self.largest()
        keep = len(largest.values)
        settled = keep < MAX_TOP
        if 0 < cuts.top_k <= keep:
            keep, settled = cuts.top_k, True
        if cuts.min_p > 0:
            above = int(np.searchsorted(-largest.values[:keep], -cuts.floor, side="right"))
            keep, settled = above, settled or above < keep
        cumulative = np.cumsum(np.exp(largest.values[:keep].astype(np.float64)))
        if cuts.top_p < 1:
            if settled:
                total = cumulative[-1]
            elif cuts.top_k or cuts.min_p > 0:
                return None
            else:
                total = self.column_mass().sum(dtype=np.float64)
            reached = int(np.searchsorted(cumulative, cuts.top_p * total, side="left"))
            if reached < keep:
                keep, settled = reached + 1, True
        if not settled:
            return None
        return int(largest.token_ids[_quantile(cumulative[:keep], uniform * cumulative[keep - 1])])

    def _draw_wide(self, cuts: Cuts, uniform: float) -> int:
        """Cut and draw by bands of nearly equal logits; only tokens of the cut's and of the drawn band are ordered."""
        bands = self._assign_bands()
        weights = self._weights[: self._vocab_size]
        if cuts.min_p > 0:
            np.multiply(weights, self.scaled >= cuts.floor, out=weights)
        mass: NDArray[np.float64] = np.bincount(bands, weights=weights, minlength=_NUM_BANDS).astype(
            np.float64, copy=False
        )
        limit = None
        if cuts.top_k:
            counts = np.cumsum(np.bincount(bands, minlength=_NUM_BANDS))
            top_k = min(cuts.top_k, self._vocab_size)
            band = int(np.searchsorted(counts, top_k, side="left"))
            limit = top_k - int(counts[band] - np.count_nonzero(bands == band))
            mass = mass[: band + 1]
            mass[band] = self._members(band, limit)[1][-1]
        if cuts.top_p < 1:
            cumulative = np.cumsum(mass)
            goal = cuts.top_p * cumulative[-1]
            band = int(np.searchsorted(cumulative, goal, side="left"))
            within = self._members(band, limit if band == len(mass) - 1 else None)[1]
            limit = int(np.searchsorted(within, goal - cumulative[band] + mass[band], side="left")) + 1
            mass = mass[: band + 1]
            mass[band] = within[min(limit, len(within)) - 1]
        cumulative = np.cumsum(mass)
        target = uniform * cumulative[-1]
        band = _quantile(cumulative, target)
        token_ids, within = self._members(band, limit if band == len(mass) - 1 else None)
        return int(token_ids[_quantile(within, target - cumulative[band] + mass[band])])

    def _assign_bands(self) -> NDArray[np.intp]:
        """The band of each token. Leaves exp(scaled) in the weights."""
        np.multiply(self._padded, np.float32(-_BANDS_PER_NAT), out=self._weights)
        np.minimum(self._weights, np.float32(_NUM_BANDS - 1), out=self._weights)
        self._bands[:] = self._weights[: self._vocab_size]
        np.exp(self._padded, out=self._weights)
        return self._bands

    def _members(self, band: int, limit: int | None) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The tokens of a band in falling order, and their cumulative weight."""
        token_ids = np.flatnonzero(self._bands == band)
        token_ids = token_ids[np.argsort(-self.scaled[token_ids], kind="stable")][:limit]
        return token_ids, np.cumsum(self._weights[token_ids], dtype=np.float64)


def _quantile(cumulative: NDArray[np.float64], target: float) -> int:
    """First index whose cumulative mass exceeds `target`; rounding never leads to an index without mass."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    if index == len(cumulative):
        index = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return index
