"""One engine without a loop: scheduler and executor, stepped by whoever owns the time.

    submit, abort -> plan_step, execute_step -> finish_step (commit) -> outputs, events, news of KV blocks

Synchronous and single-threaded. Between `plan_step` and `finish_step` only `submit`, `abort`, `flush` and what the KV
port does may be called. Any exception of the executor that is not about one request becomes `EngineFailed`; the core is
then dead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headwater.clock import Clock
from headwater.engines.base import EngineInfo, KvMemory, ProgressSink
from headwater.errors import EngineFailed, HeadwaterError, RequestError
from headwater.protocol.events import BlocksStored, LoadReport, WorkerEvent
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.scheduler.outside import Export, FirstToken, Held, KvNews
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
    kv: KvMemory | None = None
    """Where the blocks lie, when they can be exchanged with the outside."""


BuildEngine = Callable[[ProgressSink], BuiltEngine]
"""Loads and warms. Raises `ModelError` or `ConfigError`."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step has to tell the outside."""

    outputs: list[SequenceOutput]
    events: list[WorkerEvent]
    news: list[KvNews] = field(default_factory=list[KvNews])
    """For the KV port; delivered before the outputs."""

    def __bool__(self) -> bool:
        return bool(self.outputs or self.events or self.news)


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
        self._plan: StepPlan | None = None
        self._pending: tuple[StepPlan, StepResult] | None = None
        self._next_report = clock.now()
        self._turns = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_open > 0

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to compute before blocks come from outside."""
        return self._scheduler.num_loading == self._scheduler.num_open

    @property
    def has_news(self) -> bool:
        """Whether the KV port has something to be told that should not wait for the end of the step."""
        return self._scheduler.exchange.has_news

    def submit(self, requests: Sequence[EngineRequest]) -> list[SequenceOutput]:
        """Take requests; the answer holds an output for each that was refused."""
        return [refused for request in requests if (refused := self._submit_one(request)) is not None]

    def _submit_one(self, request: EngineRequest, *, load_s: float | None = None) -> SequenceOutput | None:
        now = self._clock.epoch()
        order = request.export
        export = None if order is None else Export(order.first_block, now + order.hold_s)
        try:
            sequence = self._scheduler.add(
                request,
                now,
                load_s=load_s,
                export=export,
            )
        except HeadwaterError as error:
            return SequenceOutput.failed(request.stream, error)
        try:
            self._executor.admit(sequence)
        except RequestError as error:
            self.abort([request.stream])
            return SequenceOutput.failed(request.stream, error)
        except Exception as error:
            raise EngineFailed(f"the executor failed to admit a request: {error!r}") from error
        return None

    def abort(self, streams: Sequence[int]) -> None:
        """Forget these sequences; the next step reports what that freed."""
        self._scheduler.abort(streams)
        self._release_ended()
        self._next_report = self._clock.now()

    # ---- blocks exchanged with the outside, see `headwater.scheduler.outside`

    def submit_loading(self, request: EngineRequest, timeout_s: float) -> list[SequenceOutput]:
        """Like `submit`, for a request whose blocks come from elsewhere."""
        refused = self._submit_one(request, load_s=timeout_s)
        if refused is None:
            return []
        self._scheduler.exchange.refused(request.stream)
        return [refused]

    def arrived(self, stream: int, num_blocks: int) -> None:
        self._scheduler.exchange.arrived(stream, num_blocks)

    def loaded(self, stream: int, num_blocks: int, *, cached: bool = True) -> None:
        self._scheduler.exchange.loaded(stream, num_blocks, cached=cached)

    def prefilled(self, stream: int, first: FirstToken) -> None:
        self._scheduler.prefilled(stream, first)

    def stopped(self, stream: int) -> None:
        self._scheduler.exchange.stopped(stream)

    def release(self, stream: int, after_s: float) -> None:
        self._scheduler.release(stream, self._clock.epoch() + after_s if after_s else None)
        self._next_report = self._clock.now()

    def hold(self, block_id: bytes, hold_s: float) -> Held:
        return self._scheduler.exchange.hold(block_id, self._clock.epoch() + hold_s)

    def drop(self, hold: int) -> None:
        self._scheduler.exchange.drop(hold)

    def watch(self) -> None:
        self._scheduler.exchange.watched = True

    def flush(self) -> StepOutcome:
        """What can be told before the step is over."""
        outputs = self._scheduler.take_outputs()
        self._release_ended()
        return StepOutcome(outputs, [*self._scheduler.drain_events()], self._scheduler.exchange.take_news())

    # ---- steps

    def plan_step(self) -> bool:
        """Whether there is something to run."""
        self._plan = self._scheduler.schedule(self._clock.epoch())
        return self._plan is not None

    def execute_step(self) -> float:
        """Execute what was planned: its duration in ms."""
        plan, self._plan = self._plan, None
        assert plan is not None, "nothing was planned"
        try:
            result = self._executor.execute(plan)
        except Exception as error:
            raise EngineFailed(f"an engine step of {len(plan.slices)} sequences failed: {error!r}") from error
        self._pending = (plan, result)
        return result.duration_ms

    def begin_step(self) -> float | None:
        """Plan and execute one step: its duration in ms, or None when there was nothing to run."""
        return self.execute_step() if self.plan_step() else None

    def finish_step(self) -> StepOutcome:
        """Commit what was executed, if anything."""
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
        return StepOutcome(outputs, events, self._scheduler.exchange.take_news())

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
