"""Online least squares with coefficients that are never negative.

Time grows with work, so every coefficient of a time model is >= 0; that also makes predictions monotone and never
negative. Errors count relative to the duration (a 1 ms error matters in a 5 ms step, not in a 5 s one), old samples
fade with a half-life, and outliers are bounded by Huber's weight on a running scale of the residuals. State is the
pair (G, h) of weighted normal equations, so fits of several observers can be added up.

The minimiser is found by cyclic coordinate descent with projection (Franc, Hlavac, Navara, "Sequential
Coordinate-wise Algorithm for the Non-negative Least Squares Problem", CAIP 2005).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

_HUBER = 2.5
_MIN_WEIGHT = 0.02
_MIN_SCALE = 0.01
_SCALE_MEMORY = 0.02
_MAX_SWEEPS = 40
"""Per solution; the next one starts where this one ended."""
_TOLERANCE = 1e-6
_PATIENCE = 256


class FitState(msgspec.Struct, frozen=True):
    """What travels and is stored: enough to continue elsewhere."""

    gram: list[float]
    """Row-major, over scaled features."""
    moment: list[float]
    weight: float
    error: float


@dataclass(frozen=True, slots=True)
class FitQuality:
    num_samples: float
    """Effective: faded, weighted."""
    relative_error: float
    """Running mean of |measured - predicted| / predicted."""
    num_outliers: int


class NonNegativeFit:
    """See the module docstring. `scales`: the typical size of each feature, for conditioning."""

    def __init__(self, scales: Sequence[float], *, half_life: float = 1000.0) -> None:
        size = len(scales)
        self._scales = tuple(scales)
        self._decay = 0.5 ** (1.0 / half_life)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._weight = 0.0
        self._error = 0.2
        self._outliers = 0
        self._scaled = [0.0] * size
        self._stale = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Per unit of each feature, as of the last solution: at most 256 samples behind, and none at first."""
        if self._stale >= self._patience():
            self._solve()
        return tuple(value / scale for value, scale in zip(self._scaled, self._scales, strict=True))

    def predict(self, features: Sequence[float]) -> float:
        return sum(coefficient * feature for coefficient, feature in zip(self.coefficients, features, strict=True))

    def observe(self, features: Sequence[float], measured: float) -> None:
        """One sample; durations that are not positive and finite are ignored."""
        if not 0.0 < measured < float("inf"):
            return
        weight = self._robust_weight(features, measured) if self._weight > 0 else 1.0
        self._fade()
        self._add(features, measured, weight)
        if self._stale >= self._patience():
            self._solve()

    def observe_prior(self, features: Sequence[float], expected: float, weight: float) -> None:
        """A belief, worth `weight` samples; it fades like any sample."""
        self._add(features, expected, weight)
        self._stale = _PATIENCE

    def quality(self) -> FitQuality:
        return FitQuality(self._weight, self._error, self._outliers)

    def state(self) -> FitState:
        return FitState([value for row in self._gram for value in row], list(self._moment), self._weight, self._error)

    def merge(self, state: FitState) -> None:
        """Add what another observer saw. Raises `ValueError` for a fit of another shape."""
        size = len(self._scales)
        if len(state.moment) != size or len(state.gram) != size * size:
            raise ValueError(f"a fit of {len(state.moment)} features cannot be merged into one of {size}")
        for i in range(size):
            self._moment[i] += state.moment[i]
            for j in range(size):
                self._gram[i][j] += state.gram[i * size + j]
        total = self._weight + state.weight
        if total > 0:
            self._error = (self._error * self._weight + state.error * state.weight) / total
        self._weight = total
        self._solve()

    def _patience(self) -> int:
        return min(_PATIENCE, 1 + int(self._weight) // 8)

    def _robust_weight(self, features: Sequence[float], measured: float) -> float:
        predicted = sum(
            value * feature / scale for value, feature, scale in zip(self._scaled, features, self._scales, strict=True)
        )
        residual = abs(measured - predicted) / max(predicted, 1e-9)
        limit = _HUBER * max(self._error, _MIN_SCALE)
        self._error += _SCALE_MEMORY * (min(residual, 2 * limit) - self._error)
        if residual <= limit:
            return 1.0
        self._outliers += 1
        return max(_MIN_WEIGHT, limit / residual)

    def _fade(self) -> None:
        # Instead of shrinking all sums, new samples could grow; six by six is cheap enough to do it plainly.
        decay = self._decay
        for row in self._gram:
            for j, value in enumerate(row):
                row[j] = value * decay
        self._moment = [value * decay for value in self._moment]
        self._weight *= decay

    def _add(self, features: Sequence[float], measured: float, weight: float) -> None:
        relative = [feature / (scale * measured) for feature, scale in zip(features, self._scales, strict=True)]
        for i, left in enumerate(relative):
            if left:
                row = self._gram[i]
                weighted = weight * left
                self._moment[i] += weighted
                for j, right in enumerate(relative):
                    row[j] += weighted * right
        self._weight += weight
        self._stale += 1

    def _solve(self) -> None:
        gram, moment, values = self._gram, self._moment, self._scaled
        for _ in range(_MAX_SWEEPS):
            largest_step = 0.0
            for i, row in enumerate(gram):
                if row[i] <= 0.0:
                    continue
                gradient = sum(map(float.__mul__, row, values)) - moment[i]
                updated = max(0.0, values[i] - gradient / row[i])
                largest_step = max(largest_step, abs(updated - values[i]))
                values[i] = updated
            if largest_step <= _TOLERANCE * max(map(abs, values), default=0.0):
                break
        self._stale = 0
