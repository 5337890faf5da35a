"""What a simulated run leaves behind."""

from dataclasses import dataclass, field

from headwater.sim.handoffs import HandoffTotals
from headwater.sim.history import LoadHistory
from headwater.types import Tier


@dataclass(slots=True)
class SimRecord:
    """What happened to one request."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    worker: int = -1
    predicted_cached_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    prefiller: int = -1
    """The worker that computed its prompt, where that is another one."""


@dataclass(slots=True)
class SimResult:
    records: list[SimRecord]
    """Of those that were served, in order of arrival."""
    duration_s: float
    busy_ms: list[float]
    prefill_tokens: list[int]
    num_steps: int = 0
    num_refused: int = 0
    """By the router's queue."""
    loaded_blocks: dict[Tier, int] = field(default_factory=dict[Tier, int])
    """From tiers outside the engines."""
    num_prefill_workers: int = 0
    """The first ones; 0: every worker does both."""
    handoffs: HandoffTotals = field(default_factory=HandoffTotals)
    history: LoadHistory = field(default_factory=LoadHistory)
