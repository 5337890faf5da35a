"""One worker as a router sees it, and one sequence that it was given."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.protocol.cluster import Instance
from headwater.protocol.events import LoadReport
from headwater.router.foreign import Both, Foreign
from headwater.router.price import UNKNOWN, Occupancy, StepCosts


def time_class(instance: Instance) -> str:
    """Workers whose step times are one model: same hardware, same weights, same engine."""
    return f"{instance.hardware}/{instance.engine}/{instance.card.fingerprint}"


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker as the router sees it. Policies read it, only the view changes it."""

    instance: Instance
    connected: bool = False
    load: LoadReport | None = None
    booked_sequences: int = 0
    booked_prefill_tokens: int = 0
    """Prompt tokens sent, expected to be computed there, and not known to be."""
    booked_prefill_pairs: float = 0.0
    """Tokens that these attend to, summed."""
    booked_context_tokens: int = 0
    """Prompt tokens of the sequences that have not ended."""
    booked_kv_tokens: int = 0
    """Of these, the tokens that were not cached there when they were sent: KV that is theirs alone."""
    num_prefilling: int = 0
    """Sequences of which no token has come."""
    booked_output_tokens: int = 0
    """Expected of the sequences that have not ended."""
    prefilled_ms: float = 0.0
    """Time of the prefills that have ended there, ..."""
    began_ms: float = 0.0
    """... and its sum over the sequences that decode, at their first tokens."""
    held_up_ms: float = 0.0
    """Hence the prefill time that these have waited for, summed."""
    foreign: Foreign | None = None
    """What other frontends have there, as of its last report."""
    foreign_tokens: int = 0
    """All of that that is yet to be computed."""
    load_tokens: int = 0
    """All of the above together: tokens that this worker has yet to compute."""
    life: int = 0
    """Bookings of an earlier life are void."""
    costs: StepCosts | None = None
    """Predicted step times of its class; None while nothing is known."""
    speed_factor: float = 1.0
    """How much slower than its class it has proven to be."""
    sent_tokens: int = 0
    """Prompt tokens ever sent there to be computed."""
    occupied: Occupancy | None = None
    """What it has to do, for prices; None when that has changed since `occupy`."""
    worker_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.worker_id = self.instance.worker_id

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens of a full step."""
        return self.instance.max_num_batched_tokens or UNKNOWN.chunk_tokens

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens to compute, other frontends' included."""
        return self.booked_prefill_tokens + (self.foreign.prefill_tokens if self.foreign is not None else 0)

    @property
    def backlog_sequences(self) -> int:
        """Sequences before their first token, other frontends' included."""
        return self.num_prefilling + (self.foreign.num_prefilling if self.foreign is not None else 0)

    @property
    def num_decoding(self) -> int:
        return self.booked_sequences - self.num_prefilling

    @property
    def usable(self) -> bool:
        """Whether it can be given work of its role."""
        return self.connected and self.instance.state == "ready" and not self.away

    @property
    def away(self) -> str:
        """Why its engine can be given nothing, by its own last report."""
        return self.load.away if self.load is not None else ""

    @property
    def eligible(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.usable and self.instance.role != "prefill"

    def occupy(self) -> Occupancy:
        """`occupied`, worked out anew."""
        whole = self if self.foreign is None else Both(self, self.foreign)
        self.occupied = Occupancy.of(self.costs or UNKNOWN, whole)
        return self.occupied

    def refresh(self) -> None:
        self.occupied = None
        self.held_up_ms = (self.booked_sequences - self.num_prefilling) * self.prefilled_ms - self.began_ms
        self.load_tokens = self.booked_prefill_tokens + self.booked_output_tokens + self.foreign_tokens


@dataclass(slots=True, eq=False)
class Booking:
    """One sequence that a worker has been given."""

    worker: WorkerView
    life: int
    prefill_tokens: int
    prefill_pairs: float
    context_tokens: int
    kv_tokens: int
    output_tokens: int
    keys: Sequence[int]
    """Of the prompt's blocks: they count as resident until they are computed and the worker tells."""
    cached_tokens: int = 0
    """Of the prompt, expected to be there."""
    began_ms: float = 0.0
    """The worker's prefill time at the first token."""
    prefilling: bool = True
    """Until the prompt has been computed."""
    open: bool = True
