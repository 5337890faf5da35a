"""Online least squares with coefficients that are never negative.

Time grows with work, so every coefficient of a time model is >= 0; that also makes predictions monotone and never
negative. Errors count relative to the duration, measured or predicted, whichever is longer: a 1 ms error matters in a
5 ms step, not in a 5 s one, and a sample that is far too short has no more say than one that is far too long. Old
samples fade with a half-life, and outliers are bounded by Huber's weight on a running median of the errors, which holds
as long as less than half of the samples are wrong. State is the pair (G, h) of weighted normal equations, so fits of
several observers can be added up.

The minimiser is found by cyclic coordinate descent with projection (Franc, Hlavac, Navara, "Sequential
Coordinate-wise Algorithm for the Non-negative Least Squares Problem", CAIP 2005).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

_HUBER = 2.5
_MIN_WEIGHT = 0.02
_MIN_SCALE = 0.005
_MAX_SCALE = 10.0
_SCALE_MEMORY = 0.02
_MAX_SWEEPS = 40
"""Per solution; the next one starts where this one ended."""
_TOLERANCE = 1e-6
_PATIENCE = 256
_MAX_GAIN = 1e9


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
    """Running median of |measured - predicted| / predicted."""
    num_outliers: int


class NonNegativeFit:
    """See the module docstring. `scales`: the typical size of each feature, for conditioning."""

    def __init__(self, scales: Sequence[float], *, half_life: float = 1000.0) -> None:
        size = len(scales)
        self._scales = tuple(scales)
        self._growth = 2.0 ** (1.0 / half_life)
        self._gain = 1.0
        """What a sample counts now. Growing it fades all earlier ones; sums are in these units."""
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._weight = 0.0
        self._error = 0.2
        self._outliers = 0
        self._scaled = [0.0] * size
        self._coefficients = (0.0,) * size
        self._stale = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Per unit of each feature, as of the last solution: at most 256 samples behind, and none at first."""
        if self._stale >= self._patience():
            self._solve()
        return self._coefficients

    def predict(self, features: Sequence[float]) -> float:
        return sum([value * feature for value, feature in zip(self.coefficients, features, strict=True)])

    def observe(self, features: Sequence[float], measured: float) -> None:
        """One sample; durations that are not positive and finite are ignored."""
        if not 0.0 < measured < float("inf"):
            return
        predicted = self._last_prediction(features)
        weight = self._robust_weight(predicted, measured) if self._weight > 0 else 1.0
        self._fade()
        self._add(features, measured, max(measured, predicted), weight)
        if self._stale >= self._patience():
            self._solve()

    def observe_prior(self, features: Sequence[float], expected: float, weight: float) -> None:
        """A belief, worth `weight` samples; it fades like any sample."""
        self._add(features, expected, expected, weight)
        self._stale = _PATIENCE

    def quality(self) -> FitQuality:
        return FitQuality(self.num_samples, self._error, self._outliers)

    @property
    def num_samples(self) -> float:
        """Effective: faded, weighted."""
        return self._weight / self._gain

    def state(self) -> FitState:
        gain = self._gain
        gram = [value / gain for row in self._gram for value in row]
        return FitState(gram, [value / gain for value in self._moment], self.num_samples, self._error)

    def merge(self, state: FitState) -> None:
        """Add what another observer saw. Raises `ValueError` for a fit of another shape."""
        size = len(self._scales)
        if len(state.moment) != size or len(state.gram) != size * size:
            raise ValueError(f"a fit of {len(state.moment)} features cannot be merged into one of {size}")
        gain = self._gain
        for i in range(size):
            self._moment[i] += gain * state.moment[i]
            for j in range(size):
                self._gram[i][j] += gain * state.gram[i * size + j]
        total = self.num_samples + state.weight
        if total > 0:
            self._error = (self._error * self.num_samples + state.error * state.weight) / total
        self._weight = gain * total
        self._solve()

    def _patience(self) -> int:
        return min(_PATIENCE, 1 + int(self.num_samples) // 8)

    def _last_prediction(self, features: Sequence[float]) -> float:
        """By the last solution, without looking for a better one."""
        return sum(
            [
                value * feature / scale
                for value, feature, scale in zip(self._scaled, features, self._scales, strict=True)
            ]
        )

    def _robust_weight(self, predicted: float, measured: float) -> float:
        residual = abs(measured - predicted) / max(predicted, 1e-9)
        self._error = min(max(self._error, _MIN_SCALE), _MAX_SCALE)
        limit = _HUBER * self._error
        self._error *= 1.0 + _SCALE_MEMORY if residual > self._error else 1.0 - _SCALE_MEMORY
        if residual <= limit:
            return 1.0
        self._outliers += 1
        return max(_MIN_WEIGHT, limit / residual)

    def _fade(self) -> None:
        self._gain *= self._growth
        if self._gain > _MAX_GAIN:
            self._gram = [[value / self._gain for value in row] for row in self._gram]
            self._moment = [value / self._gain for value in self._moment]
            self._weight /= self._gain
            self._gain = 1.0

    def _add(self, features: Sequence[float], measured: float, unit: float, weight: float) -> None:
        """One equation, in parts of `unit`."""
        relative = [feature / (scale * unit) for feature, scale in zip(features, self._scales, strict=True)]
        weight *= self._gain
        target = measured / unit
        for i, left in enumerate(relative):
            if left:
                row = self._gram[i]
                weighted = weight * left
                self._moment[i] += weighted * target
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
        self._coefficients = tuple([value / scale for value, scale in zip(values, self._scales, strict=True)])
        self._stale = 0
