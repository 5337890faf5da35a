"""What a scheduler counts, for its load reports."""

from collections import deque

from headwater.protocol.events import LoadReport, StepTiming
from headwater.scheduler.plan import StepPlan
from headwater.scheduler.roster import Roster

_MAX_TIMINGS = 64


class Meter:
    """Totals since start, and the timings of the last steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.preemptions = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._timings: deque[StepTiming] = deque(maxlen=_MAX_TIMINGS)

    def note_step(self, plan: StepPlan, duration_ms: float) -> None:
        self.steps += 1
        self._timings.append(
            StepTiming(
                plan.num_prefill_tokens,
                plan.prefill_context_tokens,
                plan.num_decode,
                plan.decode_context_tokens,
                duration_ms,
            )
        )

    def forget_timings(self) -> None:
        self._timings.clear()

    def load(self, roster: Roster) -> LoadReport:
        """State and totals, with the timings that were not forgotten."""
        prefilling = sum([entry.num_tokens - entry.num_computed_tokens for entry in roster.prefilling])
        return LoadReport(
            num_running=roster.num_running,
            num_loading=len(roster.loading),
            num_waiting=len(roster.waiting),
            waiting_prefill_tokens=roster.waiting.num_tokens + prefilling,
            kv_blocks_total=roster.pool.num_blocks,
            kv_blocks_free=roster.pool.num_free,
            steps=self.steps,
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            timings=list(self._timings),
            kv_blocks_held=roster.holds.num_blocks,
        )
