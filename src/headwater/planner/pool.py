"""What the planner believes of workers: step times, room, links. Input of the fast simulation."""

from dataclasses import dataclass
from functools import cached_property

from headwater.perf.curve import StepCurve
from headwater.perf.model import StepShape
from headwater.router.disagg import HIDDEN_PARTS as HIDDEN_PARTS
from headwater.router.disagg import NOTICE_MS as NOTICE_MS
from headwater.router.price import StepCosts


@dataclass(frozen=True)
class WorkerModel:
    """One worker, as far as time and room go."""

    curve: StepCurve
    kv_tokens: int
    chunk_tokens: int = 2048
    """Tokens of one step."""
    max_num_seqs: int = 256
    link_bytes_per_ms: float = 50e6
    """Out of this worker, when it prefills for others."""
    kv_bytes_per_token: float = 160e3
    name: str = ""
    """Of its class: workers of one name are exchangeable."""
    num_gpus: int = 1
    """For figures per GPU alone."""

    @cached_property
    def tables(self) -> "StepTables":
        """Worked out where it is simulated: a frontend that only passes models on never needs them."""
        return StepTables.of(self.curve, self.chunk_tokens, self.max_num_seqs)

    @cached_property
    def transfer_token_ms(self) -> float:
        return self.kv_bytes_per_token / self.link_bytes_per_ms


@dataclass(frozen=True, slots=True)
class StepTables:
    """A curve, looked up by whole tokens, and the straight lines that prices use."""

    shared: tuple[float, ...]
    costs: StepCosts

    @classmethod
    def of(cls, curve: StepCurve, chunk_tokens: int, max_num_seqs: int) -> "StepTables":
        most_tokens = chunk_tokens + max_num_seqs
        shared = tuple(curve.shared_ms(tokens) for tokens in range(most_tokens + 2))
        full = StepShape(most_tokens, 0.0)
        least = StepShape(1.0, 0.0)
        costs = StepCosts(
            prefill_step_ms=curve.step_ms(least),
            prefill_token_ms=(curve.step_ms(full) - curve.step_ms(least)) / max(1, most_tokens - 1),
            prefill_pair_ms=curve.prefill_pair_ms,
            decode_step_ms=shared[1] + curve.decode_ms,
            decode_sequence_ms=curve.decode_sequence_ms + (shared[max_num_seqs] - shared[0]) / max_num_seqs,
            decode_context_token_ms=curve.decode_context_token_ms,
            chunk_tokens=chunk_tokens,
        )
        return cls(shared, costs)
