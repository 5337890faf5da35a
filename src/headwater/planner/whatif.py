"""The fast path of simulation: a pool of workers under a plan of roles, in a few microseconds per event.

One engine step is one event, and decode steps between arrivals and ends are taken at once. Decodes go first, prompts
follow in order of arrival in chunks, long ones lending half of a step to shorter ones, as the production scheduler
does it. Placement is by the router's own prices (`headwater.router.price`, then `headwater.router.disagg`), of what a
router would know of these workers, with two additions: a worker that is full costs the wait for room, and one whose
prompts are computed elsewhere is priced as if this one were there already.

A remote prefill: the decode worker reserves room for the whole sequence before the request is sent to the prefill
worker; that one keeps its blocks until the transfer ends. What finds no room waits at the decode worker in order. One
that was a prefill worker before reserves nothing until it has handed over what it was sent then.

Left out: prefix blocks by name (a request says how many of its tokens are cached), preemption (the room reserved is
what the sequence will need), cost of the CPU between steps. Times are in ms from the start.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice
from math import inf, nan

from headwater.planner.plan import RolePlan
from headwater.planner.pool import HIDDEN_PARTS, NOTICE_MS, WorkerModel
from headwater.planner.worker import Item, Worker
from headwater.planner.worker import Job as Job
from headwater.router.disagg import price_elsewhere, price_here
from headwater.router.price import END_TO_END, Occupancy, Placement, totals


@dataclass(slots=True)
class Outcomes:
    """What became of each job; NaN for what had not happened when the run ended."""

    ttft_ms: list[float] = field(default_factory=list[float])
    tpot_ms: list[float] = field(default_factory=list[float])
    e2e_ms: list[float] = field(default_factory=list[float])
    queued_ms: list[float] = field(default_factory=list[float])
    """Before its prefill began."""
    handoff_ms: list[float] = field(default_factory=list[float])
    """Between the end of its prefill and the first token, when that was elsewhere."""
    remote: list[bool] = field(default_factory=list[bool])
    finished: int = 0
    ended_ms: float = 0.0
    stalled_ms: float = 0.0
    """That decodes, each for itself, waited for prefills in their steps."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one worker spent its time on."""

    prefill_ms: float
    decode_ms: float


class FastCluster:
    """One run: `submit` jobs in order and `advance`, or `run` them all."""

    def __init__(self, pool: Sequence[WorkerModel], plan: RolePlan, expected_output_tokens: float) -> None:
        self.pool = pool
        self._workers = [Worker(number, model) for number, model in enumerate(pool)]
        self._expected_output = expected_output_tokens
        self._heap: list[tuple[float, int, int, Item | None]] = []
        """(time, order, worker, item): the end of a worker's step; -1: of the item's transfer, or time for another."""
        self._order = 0
        self._started: list[float] = []
        self._first: list[float] = []
        self.outcomes = Outcomes()
        self._closed = False
        self._next: Iterator[Job] = iter(())
        """Of a closed loop."""
        self.set_plan(plan)

    def set_plan(self, plan: RolePlan) -> None:
        """From now on. What is under way ends where it is."""
        self.plan = plan
        workers = list(zip(self._workers, plan.roles, strict=True))
        self._prefillers = [worker for worker, role in workers if role == "prefill"]
        self._decoders = [worker for worker, role in workers if role != "prefill"]
        self._decode_only = {worker for worker, role in workers if role == "decode"}

    def set_expected_output(self, tokens: float) -> None:
        self._expected_output = tokens

    def run(self, jobs: Sequence[Job], until_ms: float = inf) -> Outcomes:
        """All jobs, until all have ended or the time is up."""
        for job in jobs:
            if job.at_ms > until_ms:
                break
            self.advance(job.at_ms)
            self.submit(job)
        self.advance(until_ms)
        return self.outcomes

    def run_closed(self, jobs: Sequence[Job], concurrency: int) -> Outcomes:
        """All jobs, `concurrency` at a time, each as soon as an earlier one has ended; their times are not used."""
        self.begin_closed(jobs, concurrency)
        self.advance(inf)
        return self.outcomes

    def begin_closed(self, jobs: Sequence[Job], concurrency: int) -> None:
        """The first ones come now, the others while time advances."""
        self._closed, self._next = True, iter(jobs)
        for job in islice(self._next, concurrency):
            self.submit(replace(job, at_ms=0.0))

    def free_tokens(self) -> list[int]:
        """Room of each worker that nobody holds."""
        return [worker.free for worker in self._workers]

    def usage(self) -> list[Usage]:
        return [Usage(worker.busy_prefill_ms, worker.busy_decode_ms) for worker in self._workers]

    def advance(self, until_ms: float) -> None:
        """Let everything happen that happens until then."""
        heap = self._heap
        while heap and heap[0][0] <= until_ms:
            now, _, number, item = heappop(heap)
            if item is not None:
                self._arrived(item, now)
            elif number < 0:
                self._submit_next(now)
            elif now == self._workers[number].ends:
                self._end_step(self._workers[number], now)

    @property
    def started_ms(self) -> Sequence[float]:
        """When each job came."""
        return self._started

    def generated(self) -> dict[int, int]:
        """Tokens so far of each job that decodes, by number."""
        return {
            item.number: item.output - (end - worker.steps)
            for worker in self._workers
            for end, _, item in worker.decoding
        }

    @property
    def num_open(self) -> int:
        return len(self._started) - self.outcomes.finished

    # -- placement

    def submit(self, job: Job) -> None:
        """A request comes."""
        now = job.at_ms
        item = Item(len(self._started), job)
        self._started.append(now)
        self._first.append(nan)
        outcomes = self.outcomes
        for series in (outcomes.ttft_ms, outcomes.tpot_ms, outcomes.e2e_ms, outcomes.queued_ms, outcomes.handoff_ms):
            series.append(nan)
        prefiller, decoder = self._place(item)
        outcomes.remote.append(prefiller is not decoder)
        item.prefiller, item.decoder = prefiller, decoder
        if prefiller is decoder:
            prefiller.kv_tokens += item.left
            self._enqueue(prefiller, item, now)
            return
        decoder.expected += 1
        decoder.pending.append(item)
        decoder.pending_room += item.room
        self._reserve(decoder, now)

    def _place(self, item: Item) -> tuple[Worker, Worker]:
        """Who prefills and who decodes: as the router does it, the decode worker first."""
        decoder, occupied = self._best_decoder(item)
        if not self._prefillers:
            return decoder, decoder
        prices = [
            price_elsewhere(worker.occupancy(), item.left, item.cached, worker.model.transfer_token_ms * item.prompt)
            for worker in self._prefillers
        ]
        there = min(prices, key=sum)
        here = price_here(occupied, item.left, item.cached)
        may_choose = self.plan.loose or decoder not in self._decode_only
        if here.own_ms <= there.handoff_ms or (may_choose and sum(here) <= sum(there)):
            return decoder, decoder
        return self._prefillers[prices.index(there)], decoder

    def _best_decoder(self, item: Item) -> tuple[Worker, Occupancy]:
        """By the router's price: of a worker that has its prompts computed elsewhere, as if this one were there."""
        workers = self._decoders
        occupied = [worker.occupancy() for worker in workers]
        crowd = sorted([one.num_prefilling + one.num_decoding for one in occupied])[(len(workers) - 1) // 2]
        placement = Placement(item.prompt, 1, self._expected_output, 0.0, crowd)
        remote = self._decode_only if self._prefillers else ()
        cached = [item.prompt if worker in remote else item.cached for worker in workers]
        prices = totals(END_TO_END, occupied, placement, cached)
        whole = [price + self._room_ms(worker, item) for price, worker in zip(prices, workers, strict=True)]
        best = whole.index(min(whole))
        return workers[best], occupied[best]

    def _room_ms(self, worker: Worker, item: Item) -> float:
        """About how long it waits for room: those before it leave at the pace the worker ends sequences at."""
        if not worker.pending and worker.free >= item.room:
            return 0.0
        missing = item.room - worker.free + worker.pending_room
        held = max(1, worker.model.kv_tokens)
        step_ms = worker.step_ms(max(1, worker.num_decoding), worker.context)
        return missing / held * self._expected_output * step_ms

    # -- steps

    def _enqueue(self, worker: Worker, item: Item, now: float) -> None:
        worker.waiting.append(item)
        worker.num_prefilling += 1
        worker.backlog_tokens += item.left
        worker.backlog_pairs += item.pairs
        self._wake(worker, now)

    def _wake(self, worker: Worker, now: float) -> None:
        """There is something new for it: start, or end a leap with the step under way."""
        if worker.ends == inf:
            self._begin_step(worker, now)
        elif worker.leap > 1:
            step_ms = (worker.ends - worker.began) / worker.leap
            done = min(worker.leap, int((now - worker.began) / step_ms) + 1)
            if done < worker.leap:
                worker.leap = done
                self._push(worker, worker.began + done * step_ms)

    def _push(self, worker: Worker, at_ms: float) -> None:
        worker.ends = at_ms
        self._order += 1
        heappush(self._heap, (at_ms, self._order, worker.number, None))

    def _begin_step(self, worker: Worker, now: float) -> None:
        if worker.joining:
            self._join(worker)
        num = worker.num_decoding
        pieces = worker.choose(now) if worker.active or worker.waiting else []
        if pieces:
            self._begin_mixed(worker, pieces, now)
        elif num:
            leap = max(1, worker.decoding[0][0] - worker.steps)
            context = worker.context + num * (leap - 1) / 2
            step_ms = worker.shared[num] + worker.decode_ms + worker.decode_sequence_ms * num
            duration = leap * (step_ms + worker.decode_context_ms * context)
            worker.leap, worker.pieces, worker.began = leap, pieces, now
            self._push(worker, now + duration)
        else:
            worker.ends = inf

    def _begin_mixed(self, worker: Worker, pieces: list[tuple[Item, int]], now: float) -> None:
        tokens, pairs, num = 0, 0.0, worker.num_decoding
        for item, count in pieces:
            tokens += count
            pairs += count * (item.prompt - item.left + (count + 1) / 2)
        duration = worker.shared[tokens + num] + worker.prefill_ms
        duration += worker.prefill_token_ms * tokens + worker.prefill_pair_ms * pairs
        if num:
            beside = worker.decode_ms + worker.decode_sequence_ms * num + worker.decode_context_ms * worker.context
            self.outcomes.stalled_ms += num * (duration - worker.shared[num])
            duration += beside
        worker.leap, worker.pieces, worker.began = 1, pieces, now
        self._push(worker, now + duration)

    def _join(self, worker: Worker) -> None:
        for item in worker.joining:
            self._decode(worker, item)
        worker.joining = []

    def _decode(self, worker: Worker, item: Item) -> None:
        worker.num_decoding += 1
        worker.context += item.prompt + 1
        heappush(worker.decoding, (worker.steps + item.output - 1, item.number, item))

    def _end_step(self, worker: Worker, now: float) -> None:
        num, leap = worker.num_decoding, worker.leap
        if worker.pieces:
            worker.busy_prefill_ms += now - worker.began
        else:
            worker.busy_decode_ms += now - worker.began
        if num:
            worker.steps += leap
            worker.context += num * leap
            decoding = worker.decoding
            while decoding and decoding[0][0] <= worker.steps:
                self._finish(worker, heappop(decoding)[2], now)
        for item, count in worker.pieces:
            item.left -= count
            if item.left <= 0:
                self._prefilled(worker, item, now)
        if worker.pending:
            self._reserve(worker, now)
        self._begin_step(worker, now)

    def _prefilled(self, worker: Worker, item: Item, now: float) -> None:
        tokens = item.prompt - item.cached
        worker.active.remove(item)
        self.outcomes.queued_ms[item.number] = item.started - self._started[item.number]
        worker.num_prefilling -= 1
        worker.backlog_tokens -= tokens
        worker.backlog_pairs = worker.backlog_pairs - item.pairs if worker.num_prefilling else 0.0
        if item.decoder is worker:
            self._first[item.number] = now
            self.outcomes.handoff_ms[item.number] = 0.0
            if item.output > 1:
                self._decode(worker, item)
            else:
                worker.context += item.prompt + item.output
                worker.num_decoding += 1
                self._finish(worker, item, now)
            return
        link = worker.model.transfer_token_ms * item.prompt
        ends = max(now + link / HIDDEN_PARTS, max(worker.link_free, item.started) + link) + NOTICE_MS
        worker.link_free = ends - NOTICE_MS
        self.outcomes.handoff_ms[item.number] = ends - now
        self._order += 1
        heappush(self._heap, (ends, self._order, -1, item))

    def _arrived(self, item: Item, now: float) -> None:
        """The transfer of a prefilled prompt has ended."""
        prefiller, decoder = item.prefiller, item.decoder
        prefiller.free += item.prompt
        prefiller.for_others -= 1
        decoder.expected -= 1
        self._first[item.number] = now
        if prefiller.waiting:
            self._wake(prefiller, now)
        if prefiller.pending:
            self._reserve(prefiller, now)
        if item.output > 1:
            decoder.joining.append(item)
            self._wake(decoder, now)
        else:
            decoder.context += item.prompt + item.output
            decoder.num_decoding += 1
            self._finish(decoder, item, now)
            self._reserve(decoder, now)

    def _finish(self, worker: Worker, item: Item, now: float) -> None:
        number = item.number
        worker.num_decoding -= 1
        worker.context -= item.prompt + item.output
        worker.free += item.room
        if item.prefiller is worker:
            worker.kv_tokens -= item.prompt - item.cached
        first, started, outcomes = self._first[number], self._started[number], self.outcomes
        outcomes.ttft_ms[number] = first - started
        outcomes.tpot_ms[number] = (now - first) / (item.output - 1) if item.output > 1 else 0.0
        outcomes.e2e_ms[number] = now - started
        outcomes.finished += 1
        outcomes.ended_ms = now
        if self._closed:
            # Not at once: the worker is in the middle of the end of a step.
            self._order += 1
            heappush(self._heap, (now, self._order, -1, None))

    def _submit_next(self, now: float) -> None:
        job = next(self._next, None)
        if job is not None:
            self.submit(replace(job, at_ms=now))

    def _reserve(self, worker: Worker, now: float) -> None:
        """Room for those who wait for it, in order; then they are sent to their prefill workers.

        No circle: who still has prompts of others to compute reserves nothing that is computed elsewhere. One that
        decodes waits until it has handed them over, one that prefills now computes for itself what it was given before.
        """
        pending, prefills = worker.pending, worker in self._prefillers
        while pending and worker.free >= pending[0].room and (prefills or not worker.for_others):
            if worker.num_decoding + worker.expected - len(pending) >= worker.most:
                return
            item = pending.popleft()
            worker.pending_room -= item.room
            if worker.for_others or item.prefiller not in self._prefillers:
                worker.expected -= 1
                worker.kv_tokens += item.left
                item.prefiller = worker
                self.outcomes.remote[item.number] = False
            else:
                worker.free -= item.room
                item.prefiller.for_others += 1
            self._enqueue(item.prefiller, item, now)
