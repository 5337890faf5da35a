"""The scheduler's own view of a sequence, and its states.

WAITING -> PREFILLING -> DECODING -> ENDED
   |            ^           ^
   +-> LOADING -+-----------+           blocks come from outside (`headwater.scheduler.outside`)
   ^______|_____|___________|           preempted, or loading too late: blocks given up, tokens kept
any state -> ENDED                      finished, aborted, failed, past its deadline
"""

import enum
from array import array
from dataclasses import dataclass, field
from typing import Self

from headwater.errors import InternalError
from headwater.kv.identity import chain_block_ids
from headwater.protocol.request import EngineRequest, ErrorInfo, SequenceOutput, TokenLogprobs
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.outside import Export
from headwater.scheduler.plan import Sequence
from headwater.types import BLOCK_ID_BYTES, BlockId


class State(enum.Enum):
    WAITING = enum.auto()
    LOADING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Sequence):
    """A sequence with what the scheduler decides by. What does not change while it lives is worked out once."""

    rank: tuple[int, int]
    """Seniority: the smaller goes first and is preempted last. (-priority, order of arrival here)."""
    namespace: bytes
    max_total_tokens: int
    """Length at which it ends."""
    stoppable_from: int
    """Length from which a stop token ends it."""
    stop_ids: frozenset[int]
    state: State = State.WAITING
    block_ids: bytearray = field(default_factory=bytearray)
    """Ids of its full blocks as far as they are known, joined; empty without prefix caching."""
    num_slots: int = 0
    """Tokens that fit in the block table."""
    planned_in_step: int = -1
    unreported_cached_tokens: int | None = 0
    """To be told in the first output; None once it was."""
    leads: bytes | None = None
    """Id of the block it computes next, under which it is known as a leader."""
    leader: Self | None = None
    """The sequence that computes a prefix this one waits for, ..."""
    shared_blocks: int = 0
    """... and how long that prefix is."""
    load_s: float | None = None
    """Its blocks come from outside, if they come within so long of its admission."""
    load_until: float = 0.0
    """When that time is up, while it loads."""
    export: Export | None = None

    def extend_block_ids(self, num_blocks: int, block_size: int) -> None:
        """Know the ids of the first `num_blocks` blocks, which are full."""
        known = len(self.block_ids) // BLOCK_ID_BYTES
        if known < num_blocks:
            parent = BlockId(bytes(self.block_ids[-BLOCK_ID_BYTES:])) if known else None
            tokens = self.token_ids[known * block_size : num_blocks * block_size].tobytes()
            self.block_ids += chain_block_ids(self.namespace, tokens, block_size, parent=parent)

    def output(
        self,
        token_ids: list[int],
        finish_reason: str | None,
        logprob: TokenLogprobs | None = None,
        *,
        stop_token_id: int | None = None,
        error: ErrorInfo | None = None,
    ) -> SequenceOutput:
        """What one step has to say about it."""
        cached, self.unreported_cached_tokens = self.unreported_cached_tokens, None
        logprobs = None if logprob is None else [logprob]
        return SequenceOutput(self.stream, token_ids, finish_reason, stop_token_id, cached, logprobs, error)

    def check(self, block_size: int) -> None:
        """Raise `InternalError` when it contradicts itself."""
        running = self.state in (State.LOADING, State.PREFILLING, State.DECODING)
        uncomputed = self.num_tokens - self.num_computed_tokens
        num_known = len(self.block_ids) // BLOCK_ID_BYTES
        problems = [
            (self.num_slots != len(self.block_table) * block_size, "its slots are not its blocks"),
            (running and self.num_computed_tokens > self.num_slots, "it computed beyond its blocks"),
            (not running and (self.num_slots or self.num_computed_tokens), "it holds blocks but does not run"),
            (uncomputed < 1, "nothing is left to compute"),
            (self.state is State.DECODING and uncomputed != 1, "it decodes with a prompt left to compute"),
            (num_known * block_size > self.num_tokens, "it knows ids of blocks that are not full"),
            (self.state is State.LOADING and self.load_s is None, "it loads and expects nothing"),
        ]
        broken = [message for failed, message in problems if failed]
        if broken:
            raise InternalError(f"stream {self.stream} ({self.state.name}): {'; '.join(broken)}")


def seniority(entry: Entry) -> tuple[int, int]:
    return entry.rank


def new_entry(request: EngineRequest, token_ids: "array[int]", order: int, limits: SchedulerLimits) -> Entry:
    """A waiting entry for a request that passed `SchedulerLimits.check`, which gave its tokens."""
    sampling = request.sampling
    num_prompt = len(request.prompt) // token_ids.itemsize
    stop_ids = frozenset[int]() if sampling.goes_past_end else limits.eos_token_ids
    entry = Entry(
        stream=request.stream,
        request=request,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        rank=(-request.priority, order),
        namespace=request.namespace or limits.namespace,
        max_total_tokens=min(num_prompt + sampling.max_tokens, limits.max_model_len, limits.capacity_tokens),
        stoppable_from=num_prompt + sampling.min_tokens,
        stop_ids=stop_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else stop_ids,
    )
    if limits.prefix_caching:
        entry.block_ids += request.block_ids
        entry.extend_block_ids(entry.num_tokens // limits.block_size, limits.block_size)
    return entry
