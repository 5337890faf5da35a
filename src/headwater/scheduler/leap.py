"""The scheduler of virtual time: many decode steps at once, and no word about tokens that change nothing.

While nothing waits, nothing prefills and no sequence ends, fills a block or may stop, single steps differ only in the
tokens they append. `leap` does so many of them in one go, with the state that single steps would have left. In single
steps too, a token that is neither the first nor the last of its sequence makes no output. (A test holds all of this
against the production scheduler.)
"""

from array import array
from collections.abc import Iterator

from headwater.errors import InternalError
from headwater.protocol.request import SequenceOutput, TokenLogprobs
from headwater.scheduler.entry import Entry, State
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.plan import Sequence, StepPlan
from headwater.scheduler.scheduler import Scheduler
from headwater.types import BLOCK_ID_BYTES


class LeapingScheduler(Scheduler):
    """The production scheduler, able to leap, and to be told what it will generate."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self._foretold: dict[int, bytes] = {}

    def foretell(self, stream: int, block_ids: bytes) -> None:
        """Ids of the first blocks after the full ones of this sequence's prompt, which its tokens cannot tell."""
        self._foretold[stream] = block_ids

    def leap_limit(self) -> int:
        """How many steps can be taken at once; 0 when the next one has to be scheduled."""
        roster = self._roster
        if self._plan is not None or roster.waiting or roster.prefilling or not roster.decoding:
            return 0
        if self._outputs or self._next_deadline != float("inf"):
            return 0
        block_size = self._block_size
        return min(
            [
                min(
                    entry.max_total_tokens - entry.num_tokens - 1,
                    block_size - 1 - entry.num_computed_tokens % block_size,
                    entry.num_slots - entry.num_computed_tokens,
                )
                for entry in roster.decoding
            ]
        )

    def leap_plan(self, steps: int) -> StepPlan:
        """The mean step of a leap, for its duration; it has no slices."""
        entries = list(self._roster.decoding)
        first = sum([entry.num_tokens for entry in entries])
        context = first + (len(entries) * (steps - 1)) // 2
        return StepPlan((), len(entries), 0, 0, context)

    def leap(self, steps: int, token_id: int, step_ms: float) -> None:
        """Take `steps` steps that each draw `token_id`, an ordinary token."""
        if steps > self.leap_limit():
            raise InternalError(f"a leap of {steps} steps where {self.leap_limit()} are possible")
        tokens = array("I", [token_id]) * steps
        entries = list(self._roster.decoding)
        plan = self.leap_plan(steps)
        for entry in entries:
            entry.token_ids.extend(tokens)
            entry.num_computed_tokens += steps
        self._meter.generated_tokens += steps * len(entries)
        self._meter.note_step(plan, step_ms)
        self._meter.steps += steps - 1

    def take_ended(self) -> list[Sequence]:
        ended = super().take_ended()
        for sequence in ended:
            self._foretold.pop(sequence.stream, None)
        return ended

    def _commit_blocks(self, entry: Entry, first: int) -> None:
        foretold = self._foretold.get(entry.stream)
        if foretold:
            end = entry.num_computed_tokens // self._block_size * BLOCK_ID_BYTES
            start = entry.num_prompt_tokens // self._block_size * BLOCK_ID_BYTES
            entry.block_ids += foretold[len(entry.block_ids) - start : max(0, end - start)]
        super()._commit_blocks(entry, first)

    def _commit_decodes(
        self,
        entries: list[Entry],
        draws: Iterator[tuple[int, TokenLogprobs | None]],
        outputs: list[SequenceOutput],
    ) -> None:
        block_size = self._block_size
        decoding = State.DECODING
        for entry, (token, logprob) in zip(entries, draws, strict=False):
            if entry.state is not decoding:
                continue
            entry.num_computed_tokens = computed = entry.num_computed_tokens + 1
            if not computed % block_size:
                self._commit_blocks(entry, computed // block_size - 1)
            if computed + 1 < entry.max_total_tokens and token not in entry.stop_ids:
                entry.token_ids.append(token)
                self._meter.generated_tokens += 1
            else:
                outputs.append(self._accept(entry, token, logprob))
