"""What to believe of step times before, and just after, the first steps of a class were measured.

A few steps cannot tell what of their time was constant and what was work, and a model that takes it all for constant
sees no use in cached prefixes. So their proportions are taken from a usual engine, or from the roofline of hardware
that is known by name, and only the level from what was measured: the median of measured over expected, so that a worker
that lies from the first step on is outvoted. That counts as a little evidence: enough to decide what measurements leave
open, soon outweighed where they do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from headwater.perf.fit import NonNegativeFit
from headwater.perf.shape import StepShape

NUM_FIRST = 16
"""Samples that the level is taken from."""
_WEIGHT = 0.1
"""Samples that all of the prior together is worth."""
_FAR = 4.0
"""A first sample that is so many times off the others says nothing."""
_SHAPES = (
    *(StepShape(tokens, tokens * tokens / 2) for tokens in (16, 256, 1024, 4096, 8192)),
    *(StepShape(0, 0, sequences, 1000.0 * sequences) for sequences in (1, 8, 64)),
    StepShape(0, 0, 8, 200_000),
    StepShape(1024, 5e5, 8, 16_000),
)


class StepPredictor(Protocol):
    def step_ms(self, shape: StepShape) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearSteps:
    """The seven coefficients of `headwater.perf.model`."""

    coefficients: tuple[float, ...]

    def step_ms(self, shape: StepShape) -> float:
        return sum([value * feature for value, feature in zip(self.coefficients, shape.features(), strict=True)])


USUAL = LinearSteps((0.0, 10.0, 0.02, 1e-6, 6.0, 0.05, 5e-5))
"""About a 70B model on one server; only ratios matter."""


def believe(fit: NonNegativeFit, first: Sequence[tuple[StepShape, float]], expected: StepPredictor) -> None:
    """Give a new fit the prior that its first samples leave, and those of them that are of the same level. Without
    samples, the level is the expected one."""
    ratios = [duration_ms / usual for shape, duration_ms in first if (usual := expected.step_ms(shape))]
    level = median(ratios) if ratios else 1.0
    for shape in _SHAPES:
        fit.observe_prior(shape.features(), level * expected.step_ms(shape), _WEIGHT / len(_SHAPES))
    for shape, duration_ms in first:
        if 1 / _FAR < duration_ms / (level * expected.step_ms(shape) or duration_ms) < _FAR:
            fit.observe(shape.features(), duration_ms)
