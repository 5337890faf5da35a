"""The simulated cluster: arrivals, one frontend's router, N workers, and a clock that jumps from event to event."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from headwater.protocol.cluster import Instance, ModelCard
from headwater.protocol.events import WorkerEvent
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.router.policy import Policy
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.view import Booking, ClusterView
from headwater.scheduler.limits import SchedulerLimits
from headwater.sim.timing import StepTimes
from headwater.sim.worker import SimWorker
from headwater.sim.workload import SimRequest
from headwater.types import TOKEN_ID_BYTES

_MODEL = "simulated"
_REPORT_INTERVAL_S = 0.05


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
    event_delay_s: float = 0.0
    """How late the router learns of blocks and load."""


@dataclass(slots=True)
class SimRecord:
    """What happened to one request."""

    request: SimRequest
    arrived_s: float
    worker: int
    predicted_cached_tokens: int
    cached_tokens: int = 0
    first_token_s: float = 0.0
    finished_s: float = 0.0


@dataclass(slots=True)
class SimResult:
    records: list[SimRecord]
    duration_s: float
    busy_ms: list[float]
    prefill_tokens: list[int]
    num_steps: int = 0
    load_over_time: list[tuple[float, list[int]]] = field(default_factory=list[tuple[float, list[int]]])
    """(time, running sequences per worker), sampled."""


class SimCluster:
    """One run. Construct, `run`, read the result."""

    def __init__(self, config: SimConfig, times: Sequence[StepTimes], policy: Policy) -> None:
        limits = SchedulerLimits(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_model_len=config.num_blocks * config.block_size,
            vocab_size=1 << 32,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=1 << 40,
        )
        self._config = config
        self._view = ClusterView()
        self._router = Router(self._view, policy)
        self._workers = [SimWorker(f"w{number:04}", limits, times[number]) for number in range(config.num_workers)]
        self._last_report = [-1.0] * config.num_workers
        for worker in self._workers:
            self._view.put(_instance(worker.worker_id, config))
            self._view.set_connected(worker.worker_id, True)
        self._heap: list[tuple[float, int, int]] = []
        """(time, order, worker whose step ends, or -1 - request for an arrival, or `num_workers` for news)."""
        self._order = 0
        self._news: deque[tuple[str, list[WorkerEvent]]] = deque()
        self._waiting: deque[int] = deque()
        self._records: dict[int, SimRecord] = {}
        self._bookings: dict[int, Booking] = {}

    @property
    def view(self) -> ClusterView:
        return self._view

    def run(self, requests: Sequence[SimRequest]) -> SimResult:
        """Serve everything."""
        self._requests = requests
        self._schedule_arrivals()
        now = 0.0
        while self._heap:
            now, _, what = heappop(self._heap)
            if what < 0:
                self._arrive(-1 - what, now)
            elif what < len(self._workers):
                if now == self._workers[what].ends_at:
                    self._step_ends(what, now)
            else:
                self._view.apply(*self._news.popleft())
        return SimResult(
            records=[self._records[number] for number in sorted(self._records)],
            duration_s=now,
            busy_ms=[worker.busy_ms for worker in self._workers],
            prefill_tokens=[worker.prefill_tokens for worker in self._workers],
            num_steps=sum(worker.num_steps for worker in self._workers),
        )

    def _push(self, at_s: float, what: int) -> None:
        self._order += 1
        heappush(self._heap, (at_s, self._order, what))

    def _schedule_arrivals(self) -> None:
        config = self._config
        if config.in_flight_per_worker is None:
            for number, request in enumerate(self._requests):
                self._push(request.at_s / config.arrival_speed, -1 - number)
            return
        self._waiting.extend(range(len(self._requests)))
        for _ in range(min(len(self._requests), config.in_flight_per_worker * config.num_workers)):
            self._push(0.0, -1 - self._waiting.popleft())

    def _arrive(self, number: int, now: float) -> None:
        request = self._requests[number]
        asked = RouteRequest(
            _MODEL,
            request.prompt_tokens,
            request.output_tokens * 8,
            block_ids=request.block_ids,
            block_size=self._config.block_size,
            session_id=request.session_id,
            now=now,
        )
        chosen, decision = self._router.route(asked, _MODEL)
        booking = self._view.book(chosen, request.prompt_tokens, asked.max_tokens, decision.cached_tokens, asked.keys)
        worker = int(chosen.worker_id[1:])
        self._bookings[number] = booking
        self._records[number] = SimRecord(request, now, worker, decision.cached_tokens)
        before = self._workers[worker].ends_at
        self._workers[worker].submit(_engine_request(number, request), now)
        if before is None:
            self._begin(worker, now)
        elif (ends_at := self._workers[worker].ends_at) is not None and ends_at != before:
            self._push(ends_at, worker)

    def _begin(self, number: int, now: float) -> None:
        worker = self._workers[number]
        worker.begin(now)
        if worker.ends_at is not None:
            self._push(worker.ends_at, number)

    def _step_ends(self, number: int, now: float) -> None:
        worker = self._workers[number]
        outputs, events = worker.finish(now)
        for output in outputs:
            if output.num_cached_tokens is not None or output.finish_reason is not None:
                self._progress(output, now)
        if now - self._last_report[number] >= _REPORT_INTERVAL_S:
            self._last_report[number] = now
            events.append(worker.report())
        if events:
            self._tell(worker.worker_id, events, now)
        self._begin(number, now)

    def _progress(self, output: SequenceOutput, now: float) -> None:
        number = output.stream
        record, booking = self._records[number], self._bookings[number]
        if output.num_cached_tokens is not None:
            record.first_token_s = now
            record.cached_tokens = output.num_cached_tokens
            self._view.prefilled(booking)
        if output.finish_reason is not None:
            record.finished_s = now
            self._view.release(booking, record.request.output_tokens)
            del self._bookings[number]
            if self._waiting:
                self._push(now, -1 - self._waiting.popleft())

    def _tell(self, worker_id: str, events: list[WorkerEvent], now: float) -> None:
        if self._config.event_delay_s <= 0:
            self._view.apply(worker_id, events)
            return
        self._news.append((worker_id, events))
        self._push(now + self._config.event_delay_s, len(self._workers))


def _engine_request(number: int, request: SimRequest) -> EngineRequest:
    return EngineRequest(
        stream=number,
        request_id="",
        model=_MODEL,
        prompt=bytes(TOKEN_ID_BYTES * request.prompt_tokens),
        sampling=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
        block_ids=request.block_ids,
    )


def _instance(worker_id: str, config: SimConfig) -> Instance:
    card = ModelCard(
        name=_MODEL,
        served_names=[_MODEL],
        fingerprint=_MODEL,
        architecture="simulated",
        dtype="",
        kv_layout="",
        max_model_len=config.num_blocks * config.block_size,
        block_size=config.block_size,
        vocab_size=1 << 31,
    )
    return Instance(
        worker_id=worker_id,
        role="both",
        state="ready",
        card=card,
        request_address="",
        event_address="",
        engine="simulated",
        version=(1, 0),
        kv_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        hardware="simulated",
    )
