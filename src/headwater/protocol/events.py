"""What workers tell the rest of the cluster: KV blocks stored and removed, load and step timings.

Batches carry a sequence number per worker life (`epoch`), so that a gap is seen and healed by replay or snapshot.
"""

import msgspec

from headwater.types import Tier


class BlocksStored(msgspec.Struct, frozen=True, omit_defaults=True, tag="stored"):
    """Consecutive full blocks became resident. `block_ids`: 16 bytes each, in prefix order."""

    block_ids: bytes
    parent: bytes | None = None
    """Id of the block before the first one; None at the start of a sequence."""
    tier: Tier = "device"


class BlocksRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag="removed"):
    block_ids: bytes
    tier: Tier = "device"


class BlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag="cleared"):
    """Nothing is resident any more in this tier (None: in any tier)."""

    tier: Tier | None = None


class StepTiming(msgspec.Struct, frozen=True, array_like=True):
    """One measured engine step: what was in it and how long it took."""

    num_prefill_tokens: int
    num_prefill_context_tokens: int
    """Sum over prefilling sequences of (new tokens x mean context they attended to)."""
    num_decode_sequences: int
    num_decode_context_tokens: int
    """Sum of the context lengths of the decoding sequences."""
    duration_ms: float


class FrontendLoad(msgspec.Struct, frozen=True, array_like=True):
    """What one frontend has at a worker, by its own reckoning, so that the others can count with it."""

    frontend_id: str
    num_prefilling: int
    """Sequences before their first token."""
    num_decoding: int
    prefill_tokens: int
    """Prompt tokens of the former that were not expected in the cache."""
    prefill_pairs: float
    """Tokens that these attend to, summed."""
    context_tokens: int
    """Prompt tokens of all its sequences."""


class HandoffCounts(msgspec.Struct, frozen=True, array_like=True):
    """Prompts of this worker that others were to compute, since it started."""

    done: int
    fell_back: int
    """Of the others: those whose rest was computed here after all."""
    blocks_moved: int
    """KV blocks read from others."""
    blocks_sent: int
    """KV blocks offered to others."""


class StoreCounts(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks between this worker and its node's store, since it started."""

    loaded: int
    short: int
    """Requests of which fewer blocks came than were expected."""
    stored: int
    dropped: int
    """Not offered, because too much was under way."""
    token_ms: dict[Tier, float] = {}
    """What loading a token of a prompt takes by tier, as far as it is known here."""


class LoadReport(msgspec.Struct, frozen=True, omit_defaults=True, tag="load"):
    """State of one engine after a step. Idle engines repeat it about once a second as a heartbeat."""

    num_running: int
    num_waiting: int
    waiting_prefill_tokens: int
    """Prompt tokens not yet computed, running or waiting."""
    kv_blocks_total: int
    kv_blocks_free: int
    """Allocatable at once: never used or evictable."""
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens served from cache since start."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    timings: list[StepTiming] = []
    """Steps since the last report, the newest last; bounded."""
    frontends: list[FrontendLoad] = []
    """Those with open sequences, if more than one frontend is connected."""
    num_loading: int = 0
    """Of the running ones: those whose KV blocks come from elsewhere."""
    kv_blocks_held: int = 0
    """Not of running sequences: read or written by others for a moment more."""
    handoffs: HandoffCounts | None = None
    """None at a worker that never had any."""
    store: StoreCounts | None = None
    """None at a worker without a store."""
    turns: int = 0
    """Reports made by the engine's own loop: a number that stands still tells of a loop that is stuck."""
    starved_ms: float = 0.0
    """Since the last of those: how long a thread of the worker could have run and got no processor."""
    away: str = ""
    """Why the engine can be given nothing now, although the worker is there: what it is attached to does not answer."""
    quiet_prefill: bool = False
    """Whether nothing is heard of the engine while it computes prompts, in however many steps."""
    num_whole: int = 0
    """Of its sequences: those whose answer comes all at once, so that nothing is heard until then."""
    relays: bool = False
    """Whether answers pass as they are: what a server holds back in the middle of one, say a tool's arguments, is not
    heard either."""


WorkerEvent = BlocksStored | BlocksRemoved | BlocksCleared | LoadReport


class EventBatch(msgspec.Struct, frozen=True):
    worker_id: str
    epoch: int
    """Changes when the worker restarts; numbering begins again at 0."""
    sequence: int
    timestamp: float
    events: list[WorkerEvent]


class EventSnapshot(msgspec.Struct, frozen=True):
    """State that all batches up to and including `sequence` add up to."""

    worker_id: str
    epoch: int
    sequence: int
    stored: list[BlocksStored]
    load: LoadReport | None = None
