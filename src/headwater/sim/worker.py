"""One simulated worker: the production scheduler on a virtual clock.

It takes one step at a time, or a leap of decode steps where these differ in nothing but tokens. A request that comes
during a leap ends it with the step then under way.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from headwater.protocol.events import LoadReport, StoreCounts, WorkerEvent
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.scheduler.leap import LeapingScheduler
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.outside import BlocksCommitted, Export, KvNews, LoadEnded, LoadStarted
from headwater.scheduler.plan import StepPlan, StepResult
from headwater.sim.tiers import SimStore, prefill_times
from headwater.sim.timing import StepTimes
from headwater.types import TOKEN_ID_BYTES

_WORD = 7
"""The token that every simulated sequence generates."""
_LEAST_LEAP = 2
_LOAD_TIMEOUT_S = 600.0


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    duration_ms: float


@dataclass(slots=True)
class _Leap:
    started_s: float
    step_s: float
    steps: int


class SimWorker:
    """Steps follow each other as long as there is work; the cluster owns the time. A leap that is cut short leaves an
    `ends_at` that never comes: what is due at another time than `ends_at` is to be ignored."""

    def __init__(
        self, worker_id: str, limits: SchedulerLimits, times: StepTimes, store: SimStore | None = None
    ) -> None:
        """`store`: what its node keeps beside the engine's own memory."""
        self.worker_id = worker_id
        self.busy_ms = 0.0
        self.prefill_tokens = 0
        self.num_steps = 0
        self.ends_at: float | None = None
        """When what is under way ends; None while idle."""
        self._scheduler = LeapingScheduler(limits, _WORD)
        self._num_blocks = limits.num_blocks
        self._times = times
        self._running: _Step | _Leap | None = None
        self._store = store
        self._exchanges = store is not None
        """Whether blocks come from outside, or go there."""
        self._prefill_ms = prefill_times(times, limits.max_num_batched_tokens)
        self._loads: list[tuple[float, int, int]] = []
        """A heap of loads under way: (done at, stream, blocks of the prompt that are there then)."""
        self._chains: dict[int, bytes] = {}
        """Block ids of requests that may load."""
        self._tier_events: list[WorkerEvent] = []
        if store is not None:
            self._scheduler.exchange.watched = True
            store.news.append(self._tier_events)

    @property
    def load_ends_at(self) -> float | None:
        """When the next load is done; to be told then by `end_loads`."""
        return self._loads[0][0] if self._loads else None

    @property
    def num_open(self) -> int:
        """Sequences running or waiting."""
        return self._scheduler.num_open

    def submit(
        self,
        request: EngineRequest,
        answer_ids: bytes,
        now: float,
        *,
        load_s: float | None = None,
        export: Export | None = None,
    ) -> None:
        """Take a request; `ends_at` may move forward. Raises what the production scheduler raises.

        `load_s`, `export`: blocks come from, or go to, another worker, as the scheduler takes it.
        """
        if isinstance(self._running, _Leap):
            self._cut(self._running, now)
        if load_s is None and self._store is not None and self._pays(self._store, request, now):
            self._chains[request.stream] = request.block_ids
            load_s = _LOAD_TIMEOUT_S
        self._scheduler.add(request, now, load_s=load_s, export=export)
        if answer_ids:
            self._scheduler.foretell(request.stream, answer_ids)

    def begin(self, now: float) -> None:
        """Start what comes next, if there is work."""
        steps = self._scheduler.leap_limit()
        if steps >= _LEAST_LEAP:
            self._begin_leap(steps, now)
        else:
            self._begin_step(now)

    def _pays(self, store: SimStore, request: EngineRequest, now: float) -> bool:
        first = self._scheduler.num_cached_blocks(request.block_ids)
        num_tokens = len(request.prompt) // TOKEN_ID_BYTES
        return store.plan(request.block_ids, first, num_tokens, self._prefill_ms, now) > 0

    def end_loads(self, now: float) -> None:
        """Loads that are done by now; work may have come of it."""
        while self._loads and self._loads[0][0] <= now:
            _, stream, num_blocks = heappop(self._loads)
            self._scheduler.exchange.loaded(stream, num_blocks)
        self._follow(now)

    def _follow(self, now: float) -> bool:
        """Act on what the scheduler tells of blocks from outside and for it; whether a load was over at once."""
        over = False
        if self._exchanges:
            for news in self._scheduler.exchange.take_news():
                over |= self._heed(news, now)
        return over

    def _heed(self, news: KvNews, now: float) -> bool:
        """The same of one piece of news."""
        match news:
            case BlocksCommitted(block_ids=ids) if self._store is not None:
                self._store.note(ids)
            case LoadStarted():
                return self._load(news, now)
            case LoadEnded(stream=stream):
                self._loads = [load for load in self._loads if load[1] != stream]
                heapify(self._loads)
                self._scheduler.exchange.stopped(stream)
            case _:
                pass
        return False

    def _load(self, started: LoadStarted, now: float) -> bool:
        assert self._store is not None
        chain = self._chains[started.stream]
        load = self._store.load(chain, started.first_block, started.num_tokens, self._prefill_ms, now)
        if load.num_blocks == started.first_block:
            self._scheduler.exchange.loaded(started.stream, started.first_block)
            return True
        heappush(self._loads, (load.done_at, started.stream, load.num_blocks))
        return False

    def _begin_step(self, now: float) -> None:
        plan = self._scheduler.schedule(now)
        while self._follow(now) and plan is None:
            plan = self._scheduler.schedule(now)
        if plan is None:
            self.ends_at = None
            return
        duration_ms = self._duration_ms(plan)
        self._running = _Step(plan, duration_ms)
        self.prefill_tokens += plan.num_prefill_tokens
        self.ends_at = now + duration_ms / 1000

    def finish(self, now: float) -> tuple[list[SequenceOutput], list[WorkerEvent]]:
        """End what is under way: first and last outputs of sequences, and what the worker tells."""
        running, self._running = self._running, None
        match running:
            case _Leap():
                self._leap(running, running.steps)
                return [], []
            case _Step():
                self.busy_ms += running.duration_ms
                self.num_steps += 1
                outputs = self._scheduler.commit(running.plan, StepResult([], None, running.duration_ms), now)
                self._forget_ended()
                self._follow(now)
                events: list[WorkerEvent] = [*self._scheduler.drain_events(), *self._tier_events]
                self._tier_events.clear()
                return outputs, events
            case None:
                return [], []

    def _forget_ended(self) -> None:
        for ended in self._scheduler.take_ended():
            self._chains.pop(ended.stream, None)

    def report(self) -> LoadReport:
        report = self._scheduler.report()
        if self._store is None:
            return report
        return replace(report, store=StoreCounts(0, 0, 0, 0, dict(self._store.token_times.ms)))

    def _begin_leap(self, steps: int, now: float) -> None:
        step_s = self._duration_ms(self._scheduler.leap_plan(steps)) / 1000
        self._running = _Leap(now, step_s, steps)
        self.ends_at = now + steps * step_s

    def _cut(self, leap: _Leap, now: float) -> None:
        """Take the steps that have ended, and go on with the one under way as a step of its own."""
        done = min(int((now - leap.started_s) / leap.step_s) if leap.step_s else leap.steps, leap.steps - 1)
        if done:
            self._leap(leap, done)
        self._begin_step(leap.started_s + done * leap.step_s)

    def _leap(self, leap: _Leap, steps: int) -> None:
        self._scheduler.leap(steps, leap.step_s * 1000)
        self.busy_ms += steps * leap.step_s * 1000
        self.num_steps += steps

    def _duration_ms(self, plan: StepPlan) -> float:
        return self._times.duration_ms(plan, 1.0 - self._scheduler.num_free_blocks / self._num_blocks)
