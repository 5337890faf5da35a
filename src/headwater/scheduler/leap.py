"""The scheduler of virtual time: many decode steps at once, and no word about tokens that change nothing.

Every sequence draws one and the same ordinary token. Most decode steps of a sequence then differ in nothing but its
length: it neither ends, nor fills a block, nor needs a new one. Such steps are not written down but counted, for all
sequences by one clock; a sequence is brought up to date when something else happens to it. While nothing waits and
nothing prefills, `leap` takes all steps up to the next such event in one go. The state is that of single steps of the
production scheduler, which a test holds against this; plans list no decodes, and outputs that are neither the first
nor the last of a sequence are not made.
"""

from array import array
from collections.abc import Collection
from heapq import heapify, heappop, heappush
from itertools import repeat

from headwater.errors import InternalError
from headwater.protocol.request import SequenceOutput
from headwater.scheduler.entry import Entry, State, seniority
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.outside import FirstToken
from headwater.scheduler.plan import Sequence, StepPlan, StepResult
from headwater.scheduler.scheduler import Scheduler, step_plan
from headwater.types import BLOCK_ID_BYTES


class _Counted:
    """Decoding sequences, most of them behind: how far, and when the next must be looked at."""

    def __init__(self, token_id: int, block_size: int) -> None:
        self.clock = 0
        """Decode steps taken."""
        self.context_tokens = 0
        """Of all sequences, as if they were up to date."""
        self._token_id = token_id
        self._block_size = block_size
        self._due: list[tuple[int, tuple[int, int], Entry]] = []
        """A heap of (clock, rank, sequence); what is no longer so is passed over."""
        self._due_at: dict[int, int] = {}
        """By stream, also of those that were taken."""
        self._written: dict[int, int] = {}
        """Up to which clock a sequence is up to date, by stream."""

    def join(self, entry: Entry) -> None:
        """A sequence begins to decode."""
        self.context_tokens += entry.num_tokens
        self.watch(entry)

    def leave(self, entry: Entry) -> None:
        """A sequence that is up to date has ended."""
        self.context_tokens -= entry.num_tokens
        del self._written[entry.stream], self._due_at[entry.stream]

    def watch(self, entry: Entry) -> None:
        """Count the steps of a sequence that is up to date, from now on."""
        self._written[entry.stream] = self.clock
        self._due_at[entry.stream] = due_at = self.clock + self.uneventful(entry)
        heappush(self._due, (due_at, entry.rank, entry))

    def uneventful(self, entry: Entry) -> int:
        """Steps in which nothing happens to a sequence that is up to date."""
        computed = entry.num_computed_tokens
        return min(
            entry.max_total_tokens - len(entry.token_ids) - 1,
            self._block_size - 1 - computed % self._block_size,
            entry.num_slots - computed,
        )

    def advance(self, num_sequences: int, steps: int) -> None:
        self.clock += steps
        self.context_tokens += num_sequences * steps

    def next_event(self) -> int:
        """Steps until one has to be looked at. There are sequences."""
        due = self._due
        while not self._holds(due[0]):
            heappop(due)
        return due[0][0] - self.clock

    def take_due(self) -> list[Entry]:
        """Those that something happens to in the next step, brought up to date, by seniority."""
        taken: list[Entry] = []
        due = self._due
        while due and due[0][0] <= self.clock:
            item = heappop(due)
            if self._holds(item):
                self.write(item[2])
                taken.append(item[2])
        if len(taken) > 1:
            taken.sort(key=seniority)
        return taken

    def write(self, entry: Entry) -> None:
        """Bring a sequence up to date."""
        steps = self.clock - self._written[entry.stream]
        if steps:
            entry.token_ids.extend(array("I", [self._token_id]) * steps)
            entry.num_computed_tokens += steps
            self._written[entry.stream] = self.clock

    def rebuild(self, entries: Collection[Entry]) -> None:
        """After some have left without a word: these are left, and up to date."""
        self.context_tokens = sum([entry.num_tokens for entry in entries])
        self._written = {entry.stream: self.clock for entry in entries}
        self._due_at = {entry.stream: self.clock + self.uneventful(entry) for entry in entries}
        self._due = [(self._due_at[entry.stream], entry.rank, entry) for entry in entries]
        heapify(self._due)

    def _holds(self, item: tuple[int, tuple[int, int], Entry]) -> bool:
        due_at, _, entry = item
        return entry.state is State.DECODING and self._due_at.get(entry.stream) == due_at


class LeapingScheduler(Scheduler):
    """See the module docstring. `token_id`: what every sequence draws; it stops none."""

    def __init__(self, limits: SchedulerLimits, token_id: int) -> None:
        super().__init__(limits)
        self._token_id = token_id
        self._counted = _Counted(token_id, limits.block_size)
        self._eventful: list[Entry] = []
        """Decodes of the plan that end or fill a block."""
        self._foretold: dict[int, bytes] = {}
        self._joining: list[Entry] = []
        """Began to decode while a step was under way, in which they are not."""

    def foretell(self, stream: int, block_ids: bytes) -> None:
        """Ids of the first blocks after the full ones of this sequence's prompt, which its tokens cannot tell."""
        self._foretold[stream] = block_ids

    def leap_limit(self) -> int:
        """How many steps can be taken at once; 0 when the next one has to be scheduled."""
        num_decode = len(self._roster.decoding)
        if self._plan is not None or not num_decode or num_decode < self.num_open:
            return 0
        if self._outputs or self._next_deadline != float("inf"):
            return 0
        return self._counted.next_event()

    def leap_plan(self, steps: int) -> StepPlan:
        """The mean step of a leap, for its duration."""
        num_decode = len(self._roster.decoding)
        return StepPlan((), num_decode, 0, 0, self._counted.context_tokens + (num_decode * (steps - 1)) // 2)

    def leap(self, steps: int, step_ms: float) -> None:
        if steps > self.leap_limit():
            raise InternalError(f"a leap of {steps} steps where {self.leap_limit()} are possible")
        plan = self.leap_plan(steps)
        self._counted.advance(plan.num_decode, steps)
        self._meter.generated_tokens += steps * plan.num_decode
        self._meter.note_step(plan, step_ms)
        self._meter.steps += steps - 1

    def schedule(self, now: float) -> StepPlan | None:
        """Like that of the production scheduler, but the plan's slices are the prefills alone."""
        if self._plan is not None:
            raise InternalError("the last plan was not committed")
        self._settle(now)
        roster = self._roster
        num_decode = len(roster.decoding)
        prefills = []
        if num_decode < self.num_open:
            prefills = self._choose_prefills(self._limits.max_num_batched_tokens - num_decode)
        if not num_decode and not prefills:
            return None
        self._planned = [entry for entry, _ in prefills]
        self._plan = step_plan([], num_decode, self._counted.context_tokens, prefills)
        return self._plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Whatever tokens `result` has: all draw the same one."""
        if plan is not self._plan:
            raise InternalError("the plan committed is not the last one made")
        self._plan = None
        planned, self._planned = self._planned, []
        outputs = self.take_outputs()
        self._counted.advance(plan.num_decode, 1)
        self._meter.generated_tokens += plan.num_decode - len(self._eventful)
        self._commit_eventful(outputs)
        if planned:
            self._commit_prefills(planned, plan.slices, repeat((self._token_id, None)), outputs)
        for entry in planned:
            if entry.state is State.DECODING:
                self._counted.join(entry)
        if self._joining:
            self._join()
        self._meter.note_step(plan, result.duration_ms)
        return outputs

    def prefilled(self, stream: int, first: FirstToken) -> None:
        entry = self._roster.by_stream.get(stream)
        loads = entry is not None and entry.state is State.LOADING
        super().prefilled(stream, first)
        if entry is not None and loads:
            self._joining.append(entry)
            if self._plan is None:
                self._join()

    def abort(self, streams: Collection[int]) -> None:
        self._write_all()
        super().abort(streams)
        self._counted.rebuild(self._decoding())

    def take_ended(self) -> list[Sequence]:
        ended = super().take_ended()
        if self._foretold:
            for sequence in ended:
                self._foretold.pop(sequence.stream, None)
        return ended

    def check(self) -> None:
        self._write_all()
        super().check()

    def _expire(self, now: float) -> None:
        self._write_all()
        super()._expire(now)
        self._counted.rebuild([*self._roster.decoding])

    def _grow_decodes(self) -> None:
        counted, preemptions = self._counted, self._meter.preemptions
        due = counted.take_due()
        for entry in due:
            if entry.state is State.DECODING and len(entry.token_ids) > entry.num_slots and self._make_room(entry):
                self._roster.grow(entry)
        if preemptions != self._meter.preemptions:
            counted.rebuild([*self._roster.decoding])
            due = counted.take_due()
        for entry in due:
            if counted.uneventful(entry):
                counted.watch(entry)
            else:
                self._eventful.append(entry)

    def _make_room(self, entry: Entry) -> bool:
        if not self._roster.pool.num_free:
            self._write_all()
        return super()._make_room(entry)

    def _write_all(self) -> None:
        for entry in self._decoding():
            self._counted.write(entry)

    def _decoding(self) -> list[Entry]:
        """Those that are counted."""
        return [entry for entry in self._roster.decoding if entry not in self._joining]

    def _join(self) -> None:
        for entry in self._joining:
            if entry.state is State.DECODING:
                self._counted.join(entry)
        self._joining = []

    def _commit_eventful(self, outputs: list[SequenceOutput]) -> None:
        for entry in self._eventful:
            if entry.state is not State.DECODING:
                continue
            entry.num_computed_tokens = computed = entry.num_computed_tokens + 1
            if not computed % self._block_size:
                self._commit_blocks(entry, computed // self._block_size - 1)
            if computed + 1 < entry.max_total_tokens:
                entry.token_ids.append(self._token_id)
                self._meter.generated_tokens += 1
                self._counted.watch(entry)
            else:
                outputs.append(self._accept(entry, self._token_id, None))
                self._counted.leave(entry)
        self._eventful = []

    def _commit_blocks(self, entry: Entry, first: int) -> None:
        foretold = self._foretold.get(entry.stream) if self._foretold else None
        if foretold:
            end = entry.num_computed_tokens // self._block_size * BLOCK_ID_BYTES
            start = entry.num_prompt_tokens // self._block_size * BLOCK_ID_BYTES
            entry.block_ids += foretold[len(entry.block_ids) - start : max(0, end - start)]
        super()._commit_blocks(entry, first)
