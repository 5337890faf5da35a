"""What a router is up against: late news, wrong models, unequal workers, false reports, late joiners."""

from dataclasses import dataclass

import msgspec

from headwater.protocol.events import LoadReport
from headwater.sim.timing import Belief, Slowed, StepTimes


@dataclass(frozen=True, slots=True)
class Conditions:
    """Disturbances of a run; by default there are none and the router learns its time model from what it is told."""

    event_delay_s: float = 0.0
    """How late the router learns of blocks, load, first tokens and ends."""
    belief: Belief | None = None
    """A time model the router has from the start and never changes; None: it learns."""
    speed_gap: float = 0.0
    """The first half of the workers is slower by this part, the other half faster."""
    reported_gap: float = 0.0
    """They only look so in the timings that they report."""
    boasting_workers: int = 0
    """The first so many workers report to be idle, empty and ten times as fast as they are."""
    late_workers: int = 0
    """The last so many workers join, cold, at `join_at_s`."""
    join_at_s: float = 0.0

    def times(self, times: StepTimes, worker: int, num_workers: int) -> StepTimes:
        """What steps really take on a worker."""
        return Slowed(times, 1 + _side(worker, num_workers) * self.speed_gap) if self.speed_gap else times

    def reported(self, report: LoadReport, worker: int, num_workers: int) -> LoadReport:
        """What a worker says of itself."""
        if worker < self.boasting_workers:
            report = msgspec.structs.replace(
                report, num_running=0, num_waiting=0, waiting_prefill_tokens=0, kv_blocks_free=report.kv_blocks_total
            )
            return _with_timings(report, 0.1)
        if self.belief is not None:
            return msgspec.structs.replace(report, timings=[])
        return _with_timings(report, 1 + _side(worker, num_workers) * self.reported_gap)


def _side(worker: int, num_workers: int) -> float:
    return 1.0 if worker < num_workers / 2 else -1.0


def _with_timings(report: LoadReport, factor: float) -> LoadReport:
    if factor == 1.0:
        return report
    timings = [msgspec.structs.replace(timing, duration_ms=timing.duration_ms * factor) for timing in report.timings]
    return msgspec.structs.replace(report, timings=timings)
