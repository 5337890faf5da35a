"""One engine without a loop: scheduler and executor, stepped by whoever owns the time.

    submit, abort -> begin_step (plan, execute) -> finish_step (commit) -> outputs and events

Synchronous and single-threaded. Between `begin_step` and `finish_step` only `submit` and `abort` may be called. Any
exception of the executor that is not about one request becomes `EngineFailed`; the core is then dead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headwater.clock import Clock
from headwater.engines.base import EngineInfo, ProgressSink
from headwater.errors import EngineFailed, HeadwaterError, RequestError
from headwater.protocol.events import BlocksStored, LoadReport, WorkerEvent
from headwater.protocol.request import EngineRequest, ErrorInfo, SequenceOutput
from headwater.scheduler.plan import Executor, StepPlan, StepResult
from headwater.scheduler.scheduler import Scheduler

_REPORT_INTERVAL_S = 0.02
"""Least time between two load reports of a busy engine."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What an engine package supplies: how plans are executed, and what the engine turned out to be."""

    executor: Executor
    info: EngineInfo
    prepare: Callable[[EngineRequest], None] | None = None
    """Does what takes long about a structured output before it is admitted; called on another thread than the
    executor. Raises `RequestError`."""


BuildEngine = Callable[[ProgressSink], BuiltEngine]
"""Loads and warms. Raises `ModelError` or `ConfigError`."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step has to tell the outside."""

    outputs: list[SequenceOutput]
    events: list[WorkerEvent]


class StepOwner(Protocol):
    """Where a loop delivers, on the event loop that started it."""

    def on_outcome(self, outcome: StepOutcome) -> None: ...

    def on_failed(self, error: HeadwaterError) -> None: ...


class EngineCore:
    """Scheduler and executor of one engine."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Clock) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._pending: tuple[StepPlan, StepResult] | None = None
        self._next_report = clock.now()
        self._turns = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_open > 0

    def submit(self, requests: Sequence[EngineRequest]) -> list[SequenceOutput]:
        """Take requests; the answer holds an output for each that was refused."""
        now = self._clock.epoch()
        return [refusal for request in requests if (refusal := self._submit_one(request, now)) is not None]

    def _submit_one(self, request: EngineRequest, now: float) -> SequenceOutput | None:
        try:
            sequence = self._scheduler.add(request, now)
        except HeadwaterError as error:
            return refusal(request.stream, error)
        try:
            self._executor.admit(sequence)
        except RequestError as error:
            self.abort([request.stream])
            return refusal(request.stream, error)
        except Exception as error:
            raise EngineFailed(f"the executor failed to admit a request: {error!r}") from error
        return None

    def abort(self, streams: Sequence[int]) -> None:
        """Forget these sequences; the next step reports what that freed."""
        self._scheduler.abort(streams)
        self._release_ended()
        self._next_report = self._clock.now()

    def begin_step(self) -> float | None:
        """Plan and execute one step: its duration in ms, or None when there was nothing to run."""
        plan = self._scheduler.schedule(self._clock.epoch())
        if plan is None:
            return None
        try:
            result = self._executor.execute(plan)
        except Exception as error:
            raise EngineFailed(f"an engine step of {len(plan.slices)} sequences failed: {error!r}") from error
        self._pending = (plan, result)
        return result.duration_ms

    def finish_step(self) -> StepOutcome:
        """Commit what `begin_step` executed, if anything."""
        if self._pending is None:
            outputs = self._scheduler.take_outputs()
        else:
            plan, result = self._pending
            self._pending = None
            outputs = self._scheduler.commit(plan, result, self._clock.epoch())
        self._release_ended()
        events: list[WorkerEvent] = [*self._scheduler.drain_events()]
        if not self.has_work:
            self._scheduler.check_idle()
        if self._clock.now() >= self._next_report or not self.has_work:
            events.append(self.report())
        return StepOutcome(outputs, events)

    def step(self) -> StepOutcome:
        """One step with nothing between its halves."""
        self.begin_step()
        return self.finish_step()

    def load(self) -> LoadReport:
        return self._scheduler.load()

    def report(self) -> LoadReport:
        """The load report for the event stream: carries the step timings since the last one."""
        self._next_report = self._clock.now() + _REPORT_INTERVAL_S
        self._turns += 1
        return msgspec.structs.replace(self._scheduler.report(), turns=self._turns)

    def resident_blocks(self) -> list[BlocksStored]:
        return self._scheduler.resident_blocks()

    def check(self) -> None:
        """Raise `InternalError` when an invariant of scheduler or pool is broken. For tests."""
        self._scheduler.check()

    def close(self) -> None:
        self._executor.close()

    def _release_ended(self) -> None:
        for sequence in self._scheduler.take_ended():
            self._executor.release(sequence)


def refusal(stream: int, error: HeadwaterError) -> SequenceOutput:
    """The only output of a sequence that is not served."""
    return SequenceOutput(stream, [], "error", error=ErrorInfo.of(error))
