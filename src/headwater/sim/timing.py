"""How long a simulated engine step takes, and what a router may be made to believe of it."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from headwater.perf.aiconfigurator import SiliconSteps
from headwater.perf.model import StepModel, StepShape
from headwater.perf.prior import StepPredictor
from headwater.scheduler.plan import StepPlan

_BELIEF_SAMPLES = 1000.0


class StepTimes(Protocol):
    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        """`used_share`: part of the KV blocks that running sequences hold."""
        ...


def plan_shape(plan: StepPlan) -> StepShape:
    return StepShape(plan.num_prefill_tokens, plan.prefill_context_tokens, plan.num_decode, plan.decode_context_tokens)


@dataclass(frozen=True, slots=True)
class DynamoPolynomial:
    """The default step times of the mocker of NVIDIA Dynamo 1.6, so that figures compare.

    Prefill: a polynomial in the tokens of the step. Decode, if any sequence emits: one in the share of KV in use.
    """

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        tokens = plan.num_prefill_tokens
        prefill_ms = 16.50 + 0.01518 * tokens + 4.21e-7 * tokens * tokens if tokens else 0.0
        if not plan.num_decode and not any(piece.samples for piece in plan.slices):
            return prefill_ms
        return prefill_ms + 5.74 + 54.01 * used_share - 25.74 * used_share * used_share


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """What a predictor says of each step: arithmetic on named hardware, or what was learned from a real cluster."""

    steps: StepPredictor

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        return self.steps.step_ms(plan_shape(plan))


@dataclass(frozen=True, slots=True)
class SiliconTimes:
    """Named hardware and model, from measured operators. Loaded where it is used, since tables are large."""

    device: str
    model: str
    tensor_parallel: int
    engine: str

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        return _silicon_steps(self).step_ms(plan_shape(plan))


@lru_cache(maxsize=4)
def _silicon_steps(times: SiliconTimes) -> SiliconSteps:
    return SiliconSteps.named(times.device, times.model, times.tensor_parallel, times.engine)


@dataclass(frozen=True, slots=True)
class Slowed:
    """Other times, multiplied."""

    times: StepTimes
    factor: float

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        return self.factor * self.times.duration_ms(plan, used_share)


@dataclass(frozen=True, slots=True)
class Belief:
    """How wrong a router's time model is, relative; the same for all workers."""

    prefill_error: float = 0.0
    decode_error: float = 0.0

    def model(self, times: StepTimes, capacity_tokens: int, max_batched_tokens: int) -> StepModel:
        """The model of a router that knows `times`, apart from the error."""
        samples: list[tuple[StepShape, float]] = []
        for tokens in (256, 1024, 4096, max_batched_tokens):
            for context in (tokens / 2, 4 * tokens):
                shape = StepShape(tokens, tokens * context)
                samples.append((shape, _duration_ms(times, shape, capacity_tokens) * (1 + self.prefill_error)))
        for share in (0.02, 0.1, 0.2, 0.4, 0.6, 0.8):
            for sequences in (4, 32):
                shape = StepShape(decode_sequences=sequences, decode_context_tokens=share * capacity_tokens)
                samples.append((shape, _duration_ms(times, shape, capacity_tokens) * (1 + self.decode_error)))
        model = StepModel()
        model.believe(samples, _BELIEF_SAMPLES)
        return model


def _duration_ms(times: StepTimes, shape: StepShape, capacity_tokens: int) -> float:
    plan = StepPlan(
        (),
        int(shape.decode_sequences),
        int(shape.prefill_tokens),
        int(shape.prefill_pairs),
        int(shape.decode_context_tokens),
    )
    return times.duration_ms(plan, shape.decode_context_tokens / capacity_tokens)
