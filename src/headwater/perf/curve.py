"""Step times as a curve: what a simulator that takes millions of steps looks up.

A step of T prompt tokens which attend to A token pairs, and n decoding sequences over K tokens of context, takes

    G(T + n)  +  [T > 0] p0 + p1 T + p2 A  +  [n > 0] q0 + q1 n + q2 K

G is what all tokens share: flat while weights are read from memory, steep once arithmetic limits, monotone. The two
attentions add. With a constant G this is the learned model of `headwater.perf.model`; a real curve says besides that
decodes which ride with a chunk of prefill are nearly free. Fitted to any predictor of single steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from headwater.perf.fit import NonNegativeFit
from headwater.perf.model import STEP_SCALES, StepShape
from headwater.perf.roofline import StepPredictor

_KNOTS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ROUNDS = 60
_SEQUENCES = (1, 4, 16, 32, 64, 128, 256)
_CONTEXTS = (256, 2048, 8192)
_PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CACHED = (0, 2048, 16384)
_DECODE_TOKENS = 512
"""Joint tokens of a larger step are those of a prefill."""


@dataclass(frozen=True, slots=True)
class StepCurve:
    """See the module docstring. All in ms."""

    knots: tuple[tuple[float, float], ...]
    """(joint tokens, G there), ascending; linear between them and beyond the last two."""
    prefill_ms: float = 0.0
    prefill_token_ms: float = 0.0
    prefill_pair_ms: float = 0.0
    decode_ms: float = 0.0
    decode_sequence_ms: float = 0.0
    decode_context_token_ms: float = 0.0

    @classmethod
    def of(cls, coefficients: Sequence[float]) -> Self:
        """The learned model: c0 to c6 of `headwater.perf.model`."""
        step, *rest = coefficients
        return cls(((0.0, step), (1.0, step)), *rest)

    @classmethod
    def fit(cls, steps: StepPredictor) -> Self:
        """The closest curve to what a predictor says of steps without mixture, relative to their duration."""
        fit = NonNegativeFit((1.0,) * len(_KNOTS) + STEP_SCALES[1:])
        samples = [(_features(shape), steps.step_ms(shape)) for shape in _shapes()]
        for _ in range(_ROUNDS):
            for features, expected_ms in samples:
                fit.observe_prior(features, expected_ms, 1.0 / len(samples))
            values = fit.coefficients
        heights = [sum(values[: number + 1]) for number in range(len(_KNOTS))]
        return cls(tuple(zip(map(float, _KNOTS), heights, strict=True)), *values[len(_KNOTS) :])

    def scaled(self, *, prefill: float = 1.0, decode: float = 1.0) -> Self:
        """Other times: those of steps that prefill and those of steps that decode, multiplied. Joint work is told
        apart by its size, as both kinds of step are."""
        return replace(
            self,
            knots=tuple((tokens, ms * (decode if tokens <= _DECODE_TOKENS else prefill)) for tokens, ms in self.knots),
            prefill_ms=self.prefill_ms * prefill,
            prefill_token_ms=self.prefill_token_ms * prefill,
            prefill_pair_ms=self.prefill_pair_ms * prefill,
            decode_ms=self.decode_ms * decode,
            decode_sequence_ms=self.decode_sequence_ms * decode,
            decode_context_token_ms=self.decode_context_token_ms * decode,
        )

    def shared_ms(self, tokens: float) -> float:
        """G."""
        left, right = next((pair for pair in pairwise(self.knots) if tokens <= pair[1][0]), self.knots[-2:])
        slope = (right[1] - left[1]) / (right[0] - left[0])
        return max(self.knots[0][1], left[1] + slope * (tokens - left[0]))

    def step_ms(self, shape: StepShape) -> float:
        """Predicted duration of one step; 0 for an empty one."""
        tokens = shape.prefill_tokens + shape.decode_sequences
        if tokens <= 0:
            return 0.0
        duration_ms = self.shared_ms(tokens)
        if shape.prefill_tokens > 0:
            duration_ms += self.prefill_ms + self.prefill_token_ms * shape.prefill_tokens
            duration_ms += self.prefill_pair_ms * shape.prefill_pairs
        if shape.decode_sequences > 0:
            duration_ms += self.decode_ms + self.decode_sequence_ms * shape.decode_sequences
            duration_ms += self.decode_context_token_ms * shape.decode_context_tokens
        return duration_ms


def _shapes() -> Iterable[StepShape]:
    for sequences in _SEQUENCES:
        for context in _CONTEXTS:
            yield StepShape(0, 0, sequences, sequences * context)
    for tokens in _PROMPTS:
        for cached in _CACHED:
            yield StepShape(tokens, tokens * (cached + (tokens + 1) / 2))


def _features(shape: StepShape) -> tuple[float, ...]:
    tokens = shape.prefill_tokens + shape.decode_sequences
    ramps = [min(1.0, max(0.0, (tokens - left) / (right - left))) for left, right in pairwise(_KNOTS)]
    if tokens > _KNOTS[-1]:
        ramps[-1] = (tokens - _KNOTS[-2]) / (_KNOTS[-1] - _KNOTS[-2])
    return (1.0, *ramps, *shape.features()[1:])
