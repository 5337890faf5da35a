"""Decides what one engine computes in each step. Events in (add, abort, commit), plans and outputs out; no I/O.

    add -> waiting -> schedule: decodes, then running prefills, then admissions -> executor -> commit

- Every running sequence decodes in every step; what is left of the token budget prefills, in chunks
  (`headwater.scheduler.budget`). Seniority is (priority, order of arrival) throughout. A waiting sequence that lacks
  blocks is not overtaken, so none starves.
- A sequence gets the blocks of all its tokens at admission, and admission leaves a reserve for the growth of those
  that run. Out of blocks, the most junior running sequence is preempted: it keeps its tokens, its blocks stay
  findable, and it waits in its old place. The most senior one always advances, so the whole does.
- A sequence whose next block is being computed by another one waits for it (`headwater.scheduler.leaders`).
- A sequence may be given its blocks' content from outside instead of computing it, and blocks may be read from outside
  (`headwater.scheduler.exchange`). Such a sequence holds its blocks without advancing, so it may be preempted like any
  other, and it has a deadline, after which it is computed here.
- Blocks are free when `abort` returns, unless somebody outside still writes them. A plan in flight is not disturbed:
  its result for that sequence is dropped.

`now` is in epoch seconds. A scheduler that raised `InternalError` must not be used further.
"""

from collections.abc import Collection, Iterator
from heapq import merge
from itertools import repeat

from headwater.errors import DeadlineExceeded, EngineFailed, HeadwaterError, InternalError, Overloaded
from headwater.kv.pool import BlockEvent, PrefixMatch
from headwater.protocol.events import BlocksStored, LoadReport
from headwater.protocol.request import EngineRequest, ErrorInfo, SequenceOutput, TokenLogprobs
from headwater.scheduler.budget import Prefill, PrefillBudget
from headwater.scheduler.entry import Entry, State, new_entry, seniority
from headwater.scheduler.exchange import Exchange
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.meter import Meter
from headwater.scheduler.outside import Export, FirstToken, LoadEnd
from headwater.scheduler.plan import Sequence, Slice, StepPlan, StepResult
from headwater.scheduler.roster import Roster
from headwater.types import BLOCK_ID_BYTES

_RESERVE_PART = 100
"""Admission keeps at least this part of the pool free, one in a hundred, ..."""
_LOOKAHEAD = 256
"""Waiting sequences looked at in one step, when those before them wait for a prefix."""
_MAX_PASSED = 16
"""Waiting sequences that lack only tokens of this step and may be passed by shorter ones."""

_Draws = Iterator[tuple[int, TokenLogprobs | None]]


class Scheduler:
    """One engine's sequences and blocks."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._block_size = limits.block_size
        self._roster = Roster(limits)
        self._meter = Meter()
        self.exchange = Exchange(self._roster, limits, self._commit_blocks)
        self._num_added = 0
        self._next_deadline = float("inf")
        self._now = 0.0
        """When the step was planned."""
        self._plan: StepPlan | None = None
        self._planned: list[Entry] = []
        """The entries of the plan's slices."""
        self._outputs: list[SequenceOutput] = []

    @property
    def num_open(self) -> int:
        return len(self._roster.by_stream)

    @property
    def num_loading(self) -> int:
        return len(self._roster.loading)

    @property
    def num_free_blocks(self) -> int:
        return self._roster.pool.num_free

    def num_cached_blocks(self, block_ids: bytes) -> int:
        """How many blocks of a chain, from its first on, are in the cache now."""
        return len(self._roster.pool.match(block_ids, len(block_ids) // BLOCK_ID_BYTES).blocks)

    # ---- events in

    def add(
        self, request: EngineRequest, now: float, *, load_s: float | None = None, export: Export | None = None
    ) -> Sequence:
        """Take a request. Raises `RequestError` (it can never be served here), `Overloaded`, `DeadlineExceeded`.

        `load_s`: its blocks come from outside, if they come within so long of its admission. `export`: they are to be
        read from outside.
        """
        roster = self._roster
        if request.stream in roster.by_stream:
            raise InternalError(f"stream {request.stream} is open already")
        if len(roster.waiting) >= self._limits.max_waiting:
            raise Overloaded(f"{len(roster.waiting)} sequences wait at this worker, the most it takes (max_waiting)")
        if request.deadline is not None and request.deadline <= now:
            raise _too_late(request.deadline, now)
        token_ids = self._limits.check(request)
        self._num_added += 1
        entry = new_entry(request, token_ids, self._num_added, self._limits)
        entry.load_s, entry.export = load_s, export
        roster.enlist(entry)
        if entry.num_tokens >= entry.max_total_tokens:
            self._outputs.append(entry.output([], "length"))
            roster.end(entry)
        elif request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        return entry

    def abort(self, streams: Collection[int]) -> None:
        """End these sequences; no output of theirs follows. Unknown ones are ignored."""
        self._outputs = [output for output in self._outputs if output.stream not in streams]
        for stream in streams:
            entry = self._roster.by_stream.get(stream)
            if entry is not None:
                entry.export = None
                self._end(entry)

    def prefilled(self, stream: int, first: FirstToken) -> None:
        """All blocks of a loading sequence have arrived, and its first token; unknown streams are ignored."""
        entry = self.exchange.prefilled(stream, first.num_cached_tokens)
        if entry is not None:
            self._outputs.append(self._accept(entry, first.token_id, first.logprob))

    def release(self, stream: int, until: float | None = None) -> None:
        """End an exported sequence if it is open, without an output; its blocks are read no more (after `until`)."""
        entry = self._roster.by_stream.get(stream)
        if entry is not None and entry.export is not None:
            self._outputs = [output for output in self._outputs if output.stream != stream]
            if until is None:
                entry.export = None
            self._end(entry)
        if until is None:
            self._roster.holds.release(("export", stream))
        else:
            self._roster.holds.shorten(("export", stream), until)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, to be given back to `commit`; None when there is nothing to compute."""
        if self._plan is not None:
            raise InternalError("the last plan was not committed")
        self._settle(now)
        decodes = list(self._roster.decoding)
        prefills = self._choose_prefills(self._limits.max_num_batched_tokens - len(decodes))
        if self._roster.waiting:
            self.exchange.tell_waiting(now)
        if not decodes and not prefills:
            return None
        self._planned = decodes + [entry for entry, _ in prefills]
        slices = [Slice(entry, entry.num_computed_tokens, 1, True) for entry in decodes]
        decode_context = sum([piece.start for piece in slices]) + len(slices)
        self._plan = step_plan(slices, len(decodes), decode_context, prefills)
        return self._plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take in what was computed. The outputs include those of sequences that ended outside a step."""
        if plan is not self._plan:
            raise InternalError("the plan committed is not the last one made")
        self._plan = None
        planned, self._planned = self._planned, []
        num_decode = plan.num_decode
        num_samples = num_decode + sum([piece.samples for piece in plan.slices[num_decode:]])
        if len(result.token_ids) != num_samples:
            raise EngineFailed(f"the executor drew {len(result.token_ids)} tokens where {num_samples} were planned")
        for stream, reason in result.failures.items():
            self._fail(stream, EngineFailed(reason))
        outputs = self.take_outputs()
        draws = zip(result.token_ids, result.logprobs or repeat(None), strict=False)
        self._commit_decodes(planned[:num_decode], draws, outputs)
        self._commit_prefills(planned[num_decode:], plan.slices[num_decode:], draws, outputs)
        self._meter.note_step(plan, result.duration_ms)
        return outputs

    # ---- decisions out

    def take_outputs(self) -> list[SequenceOutput]:
        """Outputs of sequences that ended outside a step: past their deadline, or complete on arrival."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_ended(self) -> list[Sequence]:
        """Sequences that are gone since the last call, for whatever reason."""
        return self._roster.take_ended()

    def drain_events(self) -> list[BlockEvent]:
        return self._roster.pool.drain_events()

    def resident_blocks(self) -> list[BlocksStored]:
        """What can be found in the cache now, parents before children."""
        return self._roster.pool.snapshot()

    def load(self) -> LoadReport:
        """State and totals, with the timings of the steps since the last `report`."""
        return self._meter.load(self._roster)

    def report(self) -> LoadReport:
        """`load`, and the timings in it are not told again."""
        load = self.load()
        self._meter.forget_timings()
        return load

    def check(self) -> None:
        """Raise `InternalError` when an invariant is broken. Touches every block, so it is for tests."""
        self._roster.check()

    def check_idle(self) -> None:
        """Raise `InternalError` when blocks are lost. Costs nothing; to be called when no sequence is open."""
        lost = self._limits.num_blocks - self._roster.pool.num_free - self._roster.holds.num_blocks
        if lost and not self.num_open:
            raise InternalError(f"{lost} KV blocks are held by nobody")

    # ---- planning

    def _settle(self, now: float) -> None:
        """What the time ends, and room for those that decode."""
        self._now = now
        if now >= self._next_deadline:
            self._expire(now)
        self._roster.holds.expire(now)
        if self._roster.loading:
            for entry in self.exchange.late(now):
                self._give_way(entry, "late")
        self._grow_decodes()

    def _grow_decodes(self) -> None:
        """Room for one more token in every decoding sequence; juniors are preempted when there is none."""
        short = [entry for entry in self._roster.decoding if len(entry.token_ids) > entry.num_slots]
        for entry in short:
            if entry.state is State.DECODING and self._make_room(entry):
                self._roster.grow(entry)

    def _make_room(self, entry: Entry) -> bool:
        """A free block for this sequence, unless it is itself the one to give way."""
        roster = self._roster
        while not roster.pool.num_free:
            victim = roster.most_junior_running()
            self._give_way(victim, "preempted")
            self._meter.preemptions += 1
            if victim is entry:
                return False
        return True

    def _give_way(self, entry: Entry, reason: LoadEnd) -> None:
        """Back into the line. One that is exported ends: its reader does not wait for that."""
        self.exchange.leave(entry, reason)
        if entry.export is None:
            self._roster.preempt(entry)
        else:
            self._fail(entry.stream, Overloaded("this worker ran out of KV blocks while it prefilled for another one"))

    def _choose_prefills(self, num_tokens: int) -> list[Prefill]:
        """Who prefills how many tokens, those that run and those that start, in order of seniority."""
        budget = PrefillBudget(num_tokens, self._block_size)
        roster = self._roster
        admitting = True
        for entry in merge(roster.prefilling.first(), roster.waiting.first(_LOOKAHEAD), key=seniority):
            if entry.state is State.PREFILLING:
                self._take(budget, entry, entry.num_tokens - entry.num_computed_tokens)
            elif admitting:
                admitting = self._admit(budget, entry)
        return budget.shares()

    def _admit(self, budget: PrefillBudget, entry: Entry) -> bool:
        """Start a waiting sequence if it may start now. False: nobody after it may."""
        if self._roster.num_running >= self._limits.max_num_seqs or budget.num_refused > _MAX_PASSED:
            return False
        match = self._match(entry)
        if match is None:
            return True
        if not self._fits(entry, match):
            return False
        if entry.load_s is not None:
            self._start(entry, match)
            return True
        num_remaining = entry.num_tokens - len(match.blocks) * self._block_size
        if budget.offer(num_remaining, entry.request.step_tokens):
            self._start(entry, match)
            self._take(budget, entry, num_remaining)
        return True

    def _take(self, budget: PrefillBudget, entry: Entry, num_remaining: int) -> None:
        num_tokens = budget.offer(num_remaining, entry.request.step_tokens)
        if num_tokens:
            budget.take(entry, num_tokens, num_remaining)
            entry.planned_in_step = self._meter.steps

    def _match(self, entry: Entry) -> PrefixMatch | None:
        """What of a waiting sequence is in the cache; None while another sequence computes what comes next.

        At least one token is left to compute, since its logits are wanted.
        """
        roster, step = self._roster, self._meter.steps
        if roster.leaders.follows(entry, step):
            return None
        match = roster.pool.match(entry.block_ids, (entry.num_tokens - 1) // self._block_size)
        return None if roster.leaders.find(entry, len(match.blocks), step) else match

    def _fits(self, entry: Entry, match: PrefixMatch) -> bool:
        needed = -(-entry.num_tokens // self._block_size) - len(match.blocks)
        running = self._roster.num_running
        reserve = max(running, self._limits.num_blocks // _RESERVE_PART) if running else 0
        return self._roster.pool.num_free - match.num_evictable - needed >= reserve

    def _start(self, entry: Entry, match: PrefixMatch) -> None:
        self._roster.start(entry, match)
        if entry.num_preemptions == 0:
            cached = min(entry.num_computed_tokens, entry.num_prompt_tokens)
            entry.num_cached_tokens = entry.unreported_cached_tokens = cached
            self._meter.cached_tokens += cached
            self._meter.prompt_tokens += entry.num_prompt_tokens
        self.exchange.started(entry, self._now)

    # ---- committing

    def _commit_decodes(self, entries: list[Entry], draws: _Draws, outputs: list[SequenceOutput]) -> None:
        block_size = self._block_size
        decoding = State.DECODING
        for entry, (token, logprob) in zip(entries, draws, strict=False):
            if entry.state is not decoding:
                continue
            entry.num_computed_tokens = computed = entry.num_computed_tokens + 1
            if not computed % block_size:
                self._commit_blocks(entry, computed // block_size - 1)
            outputs.append(self._accept(entry, token, logprob))

    def _commit_prefills(
        self, entries: list[Entry], pieces: tuple[Slice, ...], draws: _Draws, outputs: list[SequenceOutput]
    ) -> None:
        for entry, piece in zip(entries, pieces, strict=True):
            draw = next(draws) if piece.samples else None
            if entry.state is not State.PREFILLING:
                continue
            self._roster.leaders.stop(entry)
            entry.num_computed_tokens += piece.num_tokens
            self._commit_blocks(entry, piece.start // self._block_size)
            if draw is None:
                self._roster.leaders.lead(entry)
            else:
                self._roster.decode(entry)
                outputs.append(self._accept(entry, *draw))

    def _commit_blocks(self, entry: Entry, first: int) -> None:
        """Blocks from `first` on that are full now can be found from now on."""
        last = entry.num_computed_tokens // self._block_size
        if last <= first:
            return
        if self._limits.prefix_caching:
            entry.extend_block_ids(last, self._block_size)
            self._roster.pool.commit(entry.block_table, first, last, entry.block_ids)
        if self.exchange.watched or entry.export is not None:
            self.exchange.committed(entry, first, last)

    def _accept(self, entry: Entry, token: int, logprob: TokenLogprobs | None) -> SequenceOutput:
        """Append a drawn token and see whether the sequence ends."""
        token_ids = entry.token_ids
        if entry.export is not None:
            self.exchange.announce(entry, entry.export, all_blocks=True)
        if token in entry.stop_ids and len(token_ids) >= entry.stoppable_from:
            self._roster.end(entry)
            return entry.output([], "stop", stop_token_id=token)
        token_ids.append(token)
        self._meter.generated_tokens += 1
        if len(token_ids) < entry.max_total_tokens:
            return entry.output([token], None, logprob)
        self._roster.end(entry)
        return entry.output([token], "length", logprob)

    # ---- ends outside a step

    def _fail(self, stream: int, error: HeadwaterError) -> None:
        entry = self._roster.by_stream.get(stream)
        if entry is not None:
            self._outputs.append(entry.output([], "error", error=ErrorInfo.of(error)))
            self._end(entry)

    def _end(self, entry: Entry) -> None:
        """While something may be under way for it."""
        self.exchange.leave(entry, "aborted")
        self._roster.end(entry)

    def _expire(self, now: float) -> None:
        timed = [(request.deadline, stream) for stream, request in self._requests() if request.deadline is not None]
        for deadline, stream in timed:
            if deadline <= now:
                self._fail(stream, _too_late(deadline, now))
        self._next_deadline = min([deadline for deadline, _ in timed if deadline > now], default=float("inf"))

    def _requests(self) -> list[tuple[int, EngineRequest]]:
        return [(stream, entry.request) for stream, entry in self._roster.by_stream.items()]


def step_plan(slices: list[Slice], num_decode: int, decode_context_tokens: int, prefills: list[Prefill]) -> StepPlan:
    """`slices`: of the decodes, extended here by those of the prefills."""
    prefill_tokens = prefill_context = 0
    for entry, num_tokens in prefills:
        start = entry.num_computed_tokens
        slices.append(Slice(entry, start, num_tokens, start + num_tokens == entry.num_tokens))
        prefill_tokens += num_tokens
        prefill_context += num_tokens * (2 * start + num_tokens + 1) // 2
    return StepPlan(tuple(slices), num_decode, prefill_tokens, prefill_context, decode_context_tokens)


def _too_late(deadline: float, now: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request's deadline passed {now - deadline:.3f} s ago")
