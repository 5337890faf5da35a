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
    levels = _levels(first, expected)
    for shape in _SHAPES:
        fit.observe_prior(shape.features(), _leveled_ms(shape, levels, expected), _WEIGHT / len(_SHAPES))
    for shape, duration_ms in first:
        if 1 / _FAR < duration_ms / (_leveled_ms(shape, levels, expected) or duration_ms) < _FAR:
            fit.observe(shape.features(), duration_ms)


def _levels(first: Sequence[tuple[StepShape, float]], expected: StepPredictor) -> dict[bool, float]:
    """Median of measured over expected, of steps with prefill and of those without: engines differ in that most."""
    ratios: dict[bool, list[float]] = {}
    for shape, duration_ms in first:
        expected_ms = expected.step_ms(shape)
        if expected_ms > 0:
            ratios.setdefault(shape.prefill_tokens > 0, []).append(duration_ms / expected_ms)
    return {prefills: median(found) for prefills, found in ratios.items()}


def _leveled_ms(shape: StepShape, levels: dict[bool, float], expected: StepPredictor) -> float:
    prefills = shape.prefill_tokens > 0
    return levels.get(prefills, levels.get(not prefills, 1.0)) * expected.step_ms(shape)
