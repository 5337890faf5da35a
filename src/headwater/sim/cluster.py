"""The simulated cluster: arrivals, one frontend's router, N workers, and a clock that jumps from event to event."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from headwater.errors import Unavailable
from headwater.protocol.cluster import Instance
from headwater.protocol.events import WorkerEvent
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.router.policy import Policy
from headwater.router.queue import AHEAD_PRIORITY, AdmissionQueue, QueueLimits
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.ticket import Placed, Ticket
from headwater.router.view import ClusterView
from headwater.router.worker import Booking, time_class
from headwater.scheduler.limits import SchedulerLimits
from headwater.sim.conditions import Conditions
from headwater.sim.describe import MODEL, instance
from headwater.sim.handoffs import HandoffTotals, PoolConfig
from headwater.sim.history import LoadHistory
from headwater.sim.records import SimRecord, SimResult
from headwater.sim.tiers import SimStore, TierConfig, loaded_blocks, make_stores
from headwater.sim.timing import StepTimes
from headwater.sim.worker import SimWorker
from headwater.sim.workload import SimRequest

NO_QUEUE = QueueLimits(backlog_chunks=0)
PATIENT_QUEUE = QueueLimits(max_waiting=1 << 30, max_wait_s=1e9)
"""The production queue, but that it refuses nobody."""

_QUEUE_TICK_S = 0.05
_REPORT_INTERVAL_S = 0.05
_PROGRESS_INTERVAL = 256
_MAX_TOKENS_PER_OUTPUT_TOKEN = 8
"""Clients ask for more than they get."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Sizes and conditions of a run."""

    num_workers: int
    block_size: int = 64
    num_blocks: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    in_flight_per_worker: int | None = None
    """Closed loop with so many requests per worker; None: requests arrive at their times."""
    arrival_speed: float = 1.0
    """Times faster than written."""
    queue: QueueLimits = NO_QUEUE
    conditions: Conditions = field(default_factory=Conditions)
    tiers: TierConfig = field(default_factory=TierConfig)
    pools: PoolConfig | None = None
    """Prefill and decode workers (`headwater.sim.pools`); None: every worker does both."""

    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.num_blocks * self.block_size,
            vocab_size=1 << 32,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_waiting=1 << 40,
        )


@dataclass(slots=True)
class _Open:
    """A request under way."""

    record: SimRecord
    booking: Booking | None = None
    """None while it waits in the router's queue."""
    prefill_booking: Booking | None = None
    """At the worker that computes its prompt, where that is another one."""


@dataclass(slots=True, eq=False, kw_only=True)
class SimTicket(Ticket):
    sequence: EngineRequest
    answer_ids: bytes


@dataclass(slots=True)
class News:
    """What the router learns of one worker's step."""

    worker_id: str
    events: list[WorkerEvent]
    outputs: list[SequenceOutput]
    """First and last ones of sequences."""


class SimCluster:
    """One run. Construct, `run`, read the result."""

    def __init__(self, config: SimConfig, times: Sequence[StepTimes], policy: Policy) -> None:
        self._config = config
        self._conditions = config.conditions
        self._view = ClusterView()
        self._queue = AdmissionQueue(Router(self._view, policy), config.queue)
        self._stores = make_stores(config.tiers, config.num_workers, config.block_size)
        self._workers = [
            self._make_worker(number, config.conditions.times(own, number, config.num_workers), store)
            for number, (own, store) in enumerate(zip(times, self._stores, strict=True))
        ]
        self._last_report = [-1.0] * config.num_workers
        self._heap: list[tuple[float, int, int]] = []
        """(time, order, what): the worker whose step ends, `num_workers` for news and one more for a look at the
        queue, from two more on for a load of worker n that is done and after these for an action, -1 for an arrival,
        -2 - n for the joining of worker n."""
        self._actions: list[tuple[float, int, Callable[[float], None]]] = []
        """The same times and orders, of what was asked for by `later`."""
        self._order = 0
        self._news: deque[News] = deque()
        self._arriving: deque[SimRequest] = deque()
        """Taken and not yet arrived."""
        self._records: list[SimRecord] = []
        self._num_refused = 0
        self._ticking = False
        self._open: dict[int, _Open] = {}
        self._history = LoadHistory()
        self._introduce(times[0])

    @property
    def view(self) -> ClusterView:
        return self._view

    def run(self, requests: Iterable[SimRequest], progress: Callable[[int], None] | None = None) -> SimResult:
        """Serve everything. `requests` come in order of arrival and are taken one at a time; `progress` is told
        now and then how many have ended."""
        self._requests: Iterator[SimRequest] = iter(requests)
        self._ended = 0
        self._last_end_s = 0.0
        self._progress = progress
        self._schedule_arrivals()
        now = 0.0
        while self._heap:
            now, _, what = heappop(self._heap)
            if 0 <= what < len(self._workers):
                if now == self._workers[what].ends_at:
                    self._step_ends(what, now)
            elif what == -1:
                self._arrive(now)
            elif what == len(self._workers):
                self._learn(self._news.popleft(), now)
            elif what < 0:
                self._join(-2 - what)
            elif what > 2 * len(self._workers) + 1:
                heappop(self._actions)[2](now)
            elif what > len(self._workers) + 1:
                self._load_ends(what - len(self._workers) - 2, now)
            else:
                self._ticking = False
                self._pump(now)
            if now >= self._history.due_s:
                self._history.note(now, [worker.num_open for worker in self._workers])
        return SimResult(
            records=[record for record in self._records if record.finished_s],
            duration_s=self._last_end_s,
            busy_ms=[worker.busy_ms for worker in self._workers],
            prefill_tokens=[worker.prefill_tokens for worker in self._workers],
            num_steps=sum(worker.num_steps for worker in self._workers),
            num_refused=self._num_refused,
            loaded_blocks=loaded_blocks(self._stores),
            num_prefill_workers=self._config.pools.num_prefill if self._config.pools is not None else 0,
            handoffs=self._handoff_totals(),
            history=self._history,
        )

    def later(self, at_s: float, action: Callable[[float], None]) -> None:
        """Let something happen; it is told the time."""
        self._push(at_s, 2 * len(self._workers) + 2)
        heappush(self._actions, (at_s, self._order, action))

    # -- what pools do in another way

    def _make_worker(self, number: int, times: StepTimes, store: SimStore | None) -> SimWorker:
        return SimWorker(f"w{number:04}", self._config.limits(), times, store)

    def _instance(self, number: int) -> Instance:
        return instance(self._workers[number].worker_id, self._config.limits())

    def _handoff_totals(self) -> HandoffTotals:
        return HandoffTotals()

    # -- beginnings

    def _introduce(self, times: StepTimes) -> None:
        """Let the router know the workers, and what it is to believe of them."""
        config, conditions = self._config, self._conditions
        on_time = config.num_workers - conditions.late_workers
        for number in range(on_time):
            self._join(number)
        for number in range(on_time, config.num_workers):
            self._push(conditions.join_at_s, -2 - number)
        if conditions.belief is not None:
            limits = config.limits()
            model = conditions.belief.model(times, limits.capacity_tokens, limits.max_num_batched_tokens)
            self._view.set_costs(time_class(self._instance(0)), model, limits.max_num_batched_tokens)

    def _join(self, number: int) -> None:
        self._view.put(self._instance(number))
        self._view.set_connected(self._workers[number].worker_id, True)

    def _push(self, at_s: float, what: int) -> None:
        self._order += 1
        heappush(self._heap, (at_s, self._order, what))

    def _schedule_arrivals(self) -> None:
        config = self._config
        in_flight = 1 if config.in_flight_per_worker is None else config.in_flight_per_worker * config.num_workers
        for _ in range(in_flight):
            self._schedule_arrival(0.0)

    def _schedule_arrival(self, now: float) -> None:
        """The next request arrives: now in a closed loop, else when it is written."""
        request = next(self._requests, None)
        if request is None:
            return
        self._arriving.append(request)
        closed = self._config.in_flight_per_worker is not None
        self._push(now if closed else max(now, request.at_s / self._config.arrival_speed), -1)

    # -- a request's way

    def _arrive(self, now: float) -> None:
        request = self._arriving.popleft()
        if self._config.in_flight_per_worker is None:
            self._schedule_arrival(now)
        asked = RouteRequest(
            MODEL,
            request.prompt_tokens,
            request.output_tokens * _MAX_TOKENS_PER_OUTPUT_TOKEN,
            block_ids=request.block_ids,
            block_size=self._config.block_size,
            session_id=request.session_id,
            now=now,
        )
        stream = len(self._records)
        record = SimRecord(now, request.prompt_tokens, request.output_tokens, request.tenant)
        self._records.append(record)
        self._open[stream] = _Open(record)
        sequence = _engine_request(stream, request)
        ticket = SimTicket(asked, MODEL, request.tenant, sequence=sequence, answer_ids=request.answer_ids)
        try:
            placed = self._queue.submit(ticket, now)
        except Unavailable:
            self._refuse(ticket, now)
            return
        if placed is not None:
            self._place(ticket, placed, now)
        else:
            self._pump(now)

    def _place(self, ticket: SimTicket, placed: Placed, now: float) -> None:
        asked, chosen, cached_tokens = ticket.request, placed.worker, placed.decision.cached_tokens
        is_open = self._open[ticket.sequence.stream]
        is_open.booking = self._view.book(
            chosen,
            asked.num_prompt_tokens,
            asked.max_tokens,
            cached_tokens if ticket.sequence.prefill is None else asked.num_prompt_tokens,
            asked.keys,
            asked.expected_output_tokens,
        )
        is_open.record.worker = number = int(chosen.worker_id[1:])
        is_open.record.predicted_cached_tokens = cached_tokens
        self._submit(number, ticket, now)

    def _refuse(self, ticket: SimTicket, now: float) -> None:
        del self._open[ticket.sequence.stream]
        self._num_refused += 1
        self._next_of_loop(now)

    def _pump(self, now: float) -> None:
        """Let those in the queue go ahead, and look again after a while if some are left."""
        for outcome in self._queue.pump(now):
            ticket = outcome.ticket
            assert isinstance(ticket, SimTicket)
            if isinstance(outcome, Placed):
                self._place(ticket, outcome, now)
            else:
                self._refuse(ticket, now)
        if len(self._queue) and not self._ticking:
            self._ticking = True
            self._push(now + _QUEUE_TICK_S, len(self._workers) + 1)

    def _next_of_loop(self, now: float) -> None:
        if self._config.in_flight_per_worker is not None:
            self._schedule_arrival(now)

    def _submit(self, number: int, ticket: SimTicket, now: float) -> None:
        worker = self._workers[number]
        before = worker.ends_at
        ticket.sequence.step_tokens = ticket.step_tokens
        if ticket.ahead:
            ticket.sequence.priority += AHEAD_PRIORITY
        worker.submit(ticket.sequence, ticket.answer_ids, now)
        self._resume(number, before, now)

    def _resume(self, number: int, before: float | None, now: float) -> None:
        """There is something new for a worker that, `before` that, was to end something then."""
        worker = self._workers[number]
        if before is None:
            self._begin(number, now)
        elif worker.ends_at is not None and worker.ends_at != before:
            self._push(worker.ends_at, number)
            self._await_load(number)

    def _begin(self, number: int, now: float) -> None:
        worker = self._workers[number]
        worker.begin(now)
        if worker.ends_at is not None:
            self._push(worker.ends_at, number)
        self._await_load(number)

    def _await_load(self, number: int) -> None:
        ends_at = self._workers[number].load_ends_at
        if ends_at is not None:
            self._push(ends_at, len(self._workers) + 2 + number)

    def _load_ends(self, number: int, now: float) -> None:
        worker = self._workers[number]
        worker.end_loads(now)
        if worker.ends_at is None:
            self._begin(number, now)

    def _step_ends(self, number: int, now: float) -> None:
        worker = self._workers[number]
        outputs, events = worker.finish(now)
        for output in outputs:
            self._note(output, now)
        if now - self._last_report[number] >= _REPORT_INTERVAL_S:
            self._last_report[number] = now
            events.append(self._conditions.reported(worker.report(), number, len(self._workers)))
        if events or outputs:
            self._tell(News(worker.worker_id, events, outputs), now)
        self._begin(number, now)

    def _note(self, output: SequenceOutput, now: float) -> None:
        """What the client sees."""
        record = self._open[output.stream].record
        if output.num_cached_tokens is not None:
            record.first_token_s = now
            record.cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            record.finished_s = now
            self._ended += 1
            self._last_end_s = now
            if self._progress is not None and not self._ended % _PROGRESS_INTERVAL:
                self._progress(self._ended)
            self._next_of_loop(now)

    # -- what the router learns

    def _tell(self, news: News, now: float) -> None:
        if self._conditions.event_delay_s <= 0:
            self._learn(news, now)
            return
        self._news.append(news)
        self._push(now + self._conditions.event_delay_s, len(self._workers))

    def _learn(self, news: News, now: float) -> None:
        view = self._view
        for output in news.outputs:
            is_open = self._open[output.stream]
            assert is_open.booking is not None
            if output.num_cached_tokens is not None:
                elsewhere = is_open.prefill_booking
                if elsewhere is not None:
                    view.release(elsewhere)
                view.prefilled(is_open.booking, now, output.num_cached_tokens if elsewhere is None else None)
            if output.finish_reason is not None:
                view.release(is_open.booking, is_open.record.output_tokens)
                del self._open[output.stream]
        view.apply(news.worker_id, news.events)
        if news.outputs and len(self._queue):
            self._pump(now)


def _engine_request(stream: int, request: SimRequest) -> EngineRequest:
    return EngineRequest(
        stream=stream,
        request_id="",
        model=MODEL,
        prompt=request.prompt(),
        sampling=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
        block_ids=request.block_ids,
    )
