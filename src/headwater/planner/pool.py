"""What the planner believes of workers: step times, room, links. Input of the fast simulation."""

from dataclasses import dataclass
from functools import cached_property

from headwater.perf.curve import StepCurve
from headwater.perf.model import StepShape
from headwater.router.disagg import HIDDEN_PARTS as HIDDEN_PARTS
from headwater.router.disagg import NOTICE_MS as NOTICE_MS


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
        return StepTables.of(self.curve, self.chunk_tokens + self.max_num_seqs)

    @cached_property
    def transfer_token_ms(self) -> float:
        return self.kv_bytes_per_token / self.link_bytes_per_ms


@dataclass(frozen=True, slots=True)
class StepTables:
    """A curve, looked up by whole tokens, and the straight line that prices use."""

    shared: tuple[float, ...]
    chunk_ms: float
    """Of a step that prefills, whatever its size."""
    token_ms: float

    @classmethod
    def of(cls, curve: StepCurve, most_tokens: int) -> "StepTables":
        shared = tuple(curve.shared_ms(tokens) for tokens in range(most_tokens + 2))
        full = StepShape(most_tokens, 0.0)
        least = StepShape(1.0, 0.0)
        token_ms = (curve.step_ms(full) - curve.step_ms(least)) / max(1, most_tokens - 1)
        return cls(shared, curve.step_ms(least), token_ms)
