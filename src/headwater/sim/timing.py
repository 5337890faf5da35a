"""How long a simulated engine step takes."""

from dataclasses import dataclass
from typing import Protocol

from headwater.perf.model import StepShape
from headwater.perf.roofline import Roofline
from headwater.scheduler.plan import StepPlan


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
class RooflineTimes:
    """Named hardware and model, from arithmetic."""

    roofline: Roofline

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        return self.roofline.step_ms(plan_shape(plan))


@dataclass(frozen=True, slots=True)
class Slowed:
    """Other times, multiplied."""

    times: StepTimes
    factor: float

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        return self.factor * self.times.duration_ms(plan, used_share)
