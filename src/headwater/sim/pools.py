"""Pools of prefill and decode workers in virtual time, made of the production parts: router, prices, schedulers.

What `headwater.planner.whatif` says in microseconds per event can be held against this. A remote prefill goes the
production way: the router chooses the decode worker, `headwater.router.disagg` the prefill worker; the decode worker's
scheduler admits the request as a loading one and so takes its blocks; only then the prefill worker gets it, as an
exported one; the transfer takes the time of its link, the last part of it after the end of the prefill; then the decode
worker's scheduler is told of the first token. Steps are taken one by one. Times are in ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf, nan

import msgspec

from headwater.perf.model import StepModel
from headwater.perf.roofline import prior_samples
from headwater.planner.plan import RolePlan
from headwater.planner.pool import HIDDEN_PARTS, NOTICE_MS, WorkerModel
from headwater.planner.whatif import Job, Outcomes
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.router.delay import Delay
from headwater.router.disagg import DisaggSettings, choose_prefill
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.view import Booking, ClusterView, time_class
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.outside import Export, FirstToken, LoadStarted
from headwater.scheduler.plan import StepPlan, StepResult
from headwater.scheduler.scheduler import Scheduler
from headwater.sim.describe import MODEL, instance
from headwater.sim.timing import plan_shape
from headwater.types import TOKEN_ID_BYTES, Role

_BLOCK = 16
_WORD = 7
_PATIENCE_S = 1e9
_BELIEF = 1000.0


@dataclass(slots=True)
class _Open:
    """A request under way."""

    job: Job
    decoder: "_Worker"
    booking: Booking
    prefiller: "_Worker | None" = None
    prefill_booking: Booking | None = None
    first_ms: float = nan
    asked_ms: float = 0.0


class _Worker:
    """The production scheduler and what it computes now."""

    def __init__(self, number: int, model: WorkerModel) -> None:
        self.worker_id = f"w{number:03}"
        self.model = model
        self.limits = SchedulerLimits(
            max(1, model.kv_tokens // _BLOCK),
            _BLOCK,
            model.kv_tokens,
            1 << 32,
            model.max_num_seqs,
            max(model.chunk_tokens, model.max_num_seqs + _BLOCK),
            max_waiting=1 << 40,
            prefix_caching=False,
        )
        self.scheduler = Scheduler(self.limits)
        self.plan: StepPlan | None = None
        self.result = StepResult([], None, 0.0)
        self.link_free_ms = 0.0

    def begin(self, now_ms: float) -> float | None:
        """Start the next step; when it ends, or None."""
        self.plan = plan = self.scheduler.schedule(now_ms / 1000)
        if plan is None:
            return None
        duration_ms = self.model.curve.step_ms(plan_shape(plan))
        num_samples = sum([piece.samples for piece in plan.slices])
        self.result = StepResult([_WORD] * num_samples, None, duration_ms)
        return now_ms + duration_ms

    def finish(self, now_ms: float) -> list[SequenceOutput]:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        outputs = self.scheduler.commit(plan, self.result, now_ms / 1000)
        self.scheduler.take_ended()
        self.scheduler.drain_events()
        return outputs


class PooledCluster:
    """One run of a plan of roles."""

    def __init__(self, pool: Sequence[WorkerModel], plan: RolePlan) -> None:
        self.outcomes = Outcomes()
        self._view = ClusterView()
        self._router = Router(self._view, Delay())
        self._settings = DisaggSettings(link_bytes_per_ms=pool[0].link_bytes_per_ms)
        self._loose = plan.loose
        self._workers = {worker.worker_id: worker for worker in map(_Worker, range(len(pool)), pool)}
        self._heap: list[tuple[float, int, str, int]] = []
        """(time, order, worker whose step ends, or "" for the transfer of a request, its number)."""
        self._order = 0
        self._open: dict[int, _Open] = {}
        for worker, role in zip(self._workers.values(), plan.roles, strict=True):
            self._introduce(worker, role)

    def run(self, jobs: Sequence[Job]) -> Outcomes:
        """All jobs, until all have ended."""
        for job in jobs:
            self._advance(job.at_ms)
            self._submit(job)
        self._advance(inf)
        return self.outcomes

    def check(self) -> None:
        """Raise `InternalError` when blocks are lost."""
        for worker in self._workers.values():
            worker.scheduler.check()
            worker.scheduler.check_idle()

    def _introduce(self, worker: _Worker, role: Role) -> None:
        made = instance(worker.worker_id, worker.limits)
        card = msgspec.structs.replace(made.card, kv_bytes_per_token=int(worker.model.kv_bytes_per_token))
        made = msgspec.structs.replace(made, role=role, hardware=worker.model.name, card=card)
        self._view.put(made)
        self._view.set_connected(worker.worker_id, True)
        known = StepModel()
        known.believe(prior_samples(worker.model.curve, max_batched_tokens=worker.model.chunk_tokens), _BELIEF)
        self._view.set_costs(time_class(made), known, worker.limits.max_num_batched_tokens)

    def _advance(self, until_ms: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until_ms:
            now, _, worker_id, number = heappop(heap)
            if worker_id:
                self._step_ends(self._workers[worker_id], now)
            else:
                self._arrived(number, now)

    def _push(self, at_ms: float, worker_id: str, number: int) -> None:
        self._order += 1
        heappush(self._heap, (at_ms, self._order, worker_id, number))

    # -- a request's way

    def _submit(self, job: Job) -> None:
        number, outcomes = len(self.outcomes.e2e_ms), self.outcomes
        for series in (outcomes.ttft_ms, outcomes.tpot_ms, outcomes.e2e_ms, outcomes.handoff_ms):
            series.append(nan)
        asked = RouteRequest(MODEL, job.prompt_tokens, job.output_tokens * 8, now=job.at_ms / 1000)
        chosen, decision = self._router.route(asked, MODEL)
        choice = choose_prefill(self._settings, asked, chosen, self._view.prefillers(MODEL), self._loose)
        outcomes.remote.append(choice.remote)
        decoder = self._workers[chosen.worker_id]
        cached = job.prompt_tokens if choice.remote else decision.cached_tokens
        expected = asked.expected_output_tokens
        booking = self._view.book(chosen, job.prompt_tokens, job.output_tokens * 8, cached, (), expected)
        self._open[number] = entry = _Open(job, decoder, booking)
        request = _request(number, job, job.output_tokens)
        if not choice.remote:
            decoder.scheduler.add(request, job.at_ms / 1000)
        else:
            entry.prefiller = self._workers[choice.chosen.worker_id]
            there = self._view.worker(choice.chosen.worker_id)
            assert there is not None
            entry.prefill_booking = self._view.book(there, job.prompt_tokens, 1, 0, (), 1.0)
            decoder.scheduler.add(request, job.at_ms / 1000, load_s=_PATIENCE_S)
        self._wake(decoder, job.at_ms)

    def _wake(self, worker: _Worker, now: float) -> None:
        if worker.plan is None:
            ends_ms = worker.begin(now)
            if ends_ms is not None:
                self._push(ends_ms, worker.worker_id, 0)
        for news in worker.scheduler.exchange.take_news():
            if isinstance(news, LoadStarted):
                self._ask(news.stream, now)

    def _ask(self, number: int, now: float) -> None:
        """The decode worker has its blocks: now the prefill worker gets the prompt."""
        entry = self._open[number]
        assert entry.prefiller is not None
        entry.asked_ms = now
        export = Export(0, now / 1000 + _PATIENCE_S)
        entry.prefiller.scheduler.add(_request(number, entry.job, 1), now / 1000, export=export)
        self._wake(entry.prefiller, now)

    def _step_ends(self, worker: _Worker, now: float) -> None:
        for output in worker.finish(now):
            self._note(worker, output, now)
        self._wake(worker, now)

    def _note(self, worker: _Worker, output: SequenceOutput, now: float) -> None:
        number = output.stream
        entry = self._open[number]
        if worker is entry.prefiller:
            self._move(number, entry, now)
            return
        if output.num_cached_tokens is not None and entry.prefiller is None:
            self._first(number, entry, now)
        if output.finish_reason is not None:
            self._end(number, entry, now)

    def _move(self, number: int, entry: _Open, now: float) -> None:
        assert entry.prefiller is not None
        prefiller = entry.prefiller
        link = prefiller.model.transfer_token_ms * entry.job.prompt_tokens
        ends = max(now + link / HIDDEN_PARTS, max(prefiller.link_free_ms, entry.asked_ms) + link) + NOTICE_MS
        prefiller.link_free_ms = ends - NOTICE_MS
        self.outcomes.handoff_ms[number] = ends - now
        self._push(ends, "", number)

    def _arrived(self, number: int, now: float) -> None:
        entry = self._open[number]
        assert entry.prefiller is not None
        entry.prefiller.scheduler.release(number)
        entry.decoder.scheduler.prefilled(number, FirstToken(_WORD))
        self._first(number, entry, now)
        self._wake(entry.prefiller, now)
        for output in entry.decoder.scheduler.take_outputs():
            self._note(entry.decoder, output, now)
        self._wake(entry.decoder, now)

    def _first(self, number: int, entry: _Open, now: float) -> None:
        entry.first_ms = now
        self.outcomes.ttft_ms[number] = now - entry.job.at_ms
        self._view.prefilled(entry.booking, now / 1000)
        if entry.prefill_booking is not None:
            self._view.release(entry.prefill_booking)

    def _end(self, number: int, entry: _Open, now: float) -> None:
        outcomes, output = self.outcomes, entry.job.output_tokens
        outcomes.e2e_ms[number] = now - entry.job.at_ms
        outcomes.tpot_ms[number] = (now - entry.first_ms) / (output - 1) if output > 1 else 0.0
        outcomes.finished += 1
        outcomes.ended_ms = now
        self._view.release(entry.booking, output)
        del self._open[number]


def _request(number: int, job: Job, max_tokens: int) -> EngineRequest:
    return EngineRequest(
        stream=number,
        request_id="",
        model=MODEL,
        prompt=bytes(TOKEN_ID_BYTES * job.prompt_tokens),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
