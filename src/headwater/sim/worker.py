"""One simulated worker: the production scheduler on a virtual clock."""

from dataclasses import dataclass

from headwater.protocol.events import WorkerEvent
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.plan import StepPlan, StepResult
from headwater.scheduler.scheduler import Scheduler
from headwater.sim.timing import StepTimes

_WORD = 7
"""The token every simulated sequence generates."""


@dataclass(slots=True)
class Running:
    """A step under way."""

    plan: StepPlan
    result: StepResult


class SimWorker:
    """Steps follow each other as long as there is work; the cluster owns the time."""

    def __init__(self, worker_id: str, limits: SchedulerLimits, times: StepTimes) -> None:
        self.worker_id = worker_id
        self.busy_ms = 0.0
        self.prefill_tokens = 0
        self._scheduler = Scheduler(limits)
        self._num_blocks = limits.num_blocks
        self._times = times
        self._running: Running | None = None

    @property
    def idle(self) -> bool:
        return self._running is None

    def submit(self, request: EngineRequest, now: float) -> None:
        """Raises what the production scheduler raises."""
        self._scheduler.add(request, now)

    def begin(self, now: float) -> float | None:
        """Start a step; its duration in seconds, or None without work."""
        plan = self._scheduler.schedule(now)
        if plan is None:
            return None
        duration_ms = self._times.duration_ms(plan, 1.0 - self._scheduler.num_free_blocks / self._num_blocks)
        num_samples = plan.num_decode + sum([piece.samples for piece in plan.slices[plan.num_decode :]])
        self._running = Running(plan, StepResult([_WORD] * num_samples, None, duration_ms))
        self.busy_ms += duration_ms
        self.prefill_tokens += plan.num_prefill_tokens
        return duration_ms / 1000

    def finish(self, now: float) -> tuple[list[SequenceOutput], list[WorkerEvent]]:
        """End the step under way: what it produced, and what the worker tells."""
        assert self._running is not None
        running, self._running = self._running, None
        outputs = self._scheduler.commit(running.plan, running.result, now)
        self._scheduler.take_ended()
        events: list[WorkerEvent] = [*self._scheduler.drain_events()]
        return outputs, events

    def report(self) -> WorkerEvent:
        return self._scheduler.report()
