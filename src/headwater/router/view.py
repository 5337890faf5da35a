"""What a router knows: the workers, their reports, and what was sent to them and has not ended.

Events come in as method calls (`put`, `remove`, `connected`, `report`, and the life of bookings); nothing is asked of
the outside. Bookings are exact and immediate for this frontend's own requests. What other frontends have sent comes
with the workers' reports, by frontend, and counts like our own in prices.

Invariants: totals are the sums of the live bookings, never negative; a booking counts at most once and is void when
its worker was lost, also if the worker comes back.
"""

from collections.abc import Iterable, Sequence

import msgspec

from headwater.kv.index import block_keys
from headwater.perf.model import PerfModel, StepModel
from headwater.perf.named import expected_steps
from headwater.protocol.cluster import Instance
from headwater.protocol.events import EventSnapshot, LoadReport, WorkerEvent
from headwater.router.foreign import foreign_work
from headwater.router.price import UNKNOWN, StepCosts, prefill_pairs
from headwater.router.request import RouteRequest
from headwater.router.residency import Residency
from headwater.router.worker import Booking, WorkerView, time_class
from headwater.types import WorkerId

_INITIAL_TYPICAL_OUTPUT = 128.0
_TYPICAL_OUTPUT_WEIGHT = 0.05
"""Of the newest length in the running mean."""
_TIMINGS_PER_REPORT = 2
_TIMINGS_PER_SNAPSHOT = 256
_WELL_KNOWN_SAMPLES = 1000.0
_WELL_KNOWN_STRIDE = 8


class ClusterView:
    """All workers, by id and by model."""

    def __init__(self, *, max_index_blocks: int = 8_000_000, frontend_id: str = "") -> None:
        self.frontend_id = frontend_id
        """What this frontend is called in workers' reports."""
        self.residency = Residency(max_index_blocks)
        self.tracks_residency = True
        """Whether block events are followed and requests looked up."""
        self.perf = PerfModel()
        self._costs: dict[str, StepCosts] = {}
        self._observations = 0
        self._workers: dict[str, WorkerView] = {}
        self._eligible: dict[str, list[WorkerView]] = {}
        self._typical_output: dict[str, float] = {}

    @property
    def workers(self) -> list[WorkerView]:
        return list(self._workers.values())

    def worker(self, worker_id: str) -> WorkerView | None:
        return self._workers.get(worker_id)

    def eligible(self, fingerprint: str) -> list[WorkerView]:
        """Workers that new requests for a model may go to, ordered by id. Not to be changed.

        Prefill workers only while there are no others: every engine can do both, and a role is no reason to refuse,
        unless the engine works in pairs.
        """
        found = self._eligible.get(fingerprint)
        if found is None:
            usable = [w for w in self._workers.values() if w.usable and w.instance.card.fingerprint == fingerprint]
            workers = [w for w in usable if w.eligible] or [w for w in usable if not w.instance.paired]
            found = self._eligible[fingerprint] = sorted(workers, key=lambda worker: worker.worker_id)
        return found

    def prefillers(self, fingerprint: str) -> list[WorkerView]:
        """Workers that compute prompts of a model for others."""
        return [
            worker
            for worker in self._workers.values()
            if worker.usable and worker.instance.role == "prefill" and worker.instance.card.fingerprint == fingerprint
        ]

    # -- workers ------------------------------------------------------------------------------------------------

    def put(self, instance: Instance) -> None:
        """A worker is there, or its record changed."""
        known = self._workers.get(instance.worker_id)
        if known is None:
            known = self._workers[instance.worker_id] = WorkerView(instance)
            self.residency.add_worker(instance.worker_id)
        else:
            known.instance = instance
        self._expect_times(known)
        self._eligible.clear()

    def remove(self, worker_id: str) -> None:
        """A worker is gone for good; what was booked on it is void."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._end_life(worker)
            self.residency.remove_worker(worker_id)
            self.perf.forget_worker(time_class(worker.instance), worker_id)

    def set_connected(self, worker_id: str, connected: bool) -> None:
        """A worker can be reached from now on, or no longer; what was booked on a lost one is void."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.connected == connected:
            return
        self._end_life(worker)
        worker.connected = connected

    def apply(self, worker_id: str, events: Iterable[WorkerEvent]) -> None:
        """What a worker tells, in order."""
        if worker_id not in self._workers:
            return
        for event in events:
            if isinstance(event, LoadReport):
                self.report(worker_id, event)
            elif self.tracks_residency:
                self.residency.apply(worker_id, event)

    def rebuild(self, snapshot: EventSnapshot) -> None:
        """A worker's whole state, in place of all that was known of it."""
        if snapshot.worker_id in self._workers:
            if self.tracks_residency:
                self.residency.rebuild(snapshot.worker_id, snapshot.stored)
            if snapshot.load is not None:
                self._learn_past(self._workers[snapshot.worker_id], snapshot.load)
                self.report(snapshot.worker_id, msgspec.structs.replace(snapshot.load, timings=[]))

    def look_up(self, request: RouteRequest) -> None:
        """Fill in which workers hold the request's prefix, and how long its answer may be."""
        if not request.expected_output_tokens:
            request.expected_output_tokens = self.typical_output(request.fingerprint)
        if not request.block_ids or not self.tracks_residency:
            return
        self.residency.learned.sweep(request.now)
        request.churn = self.residency.churn
        request.keys = request.keys or block_keys(request.block_ids)
        request.cached_tokens = self.residency.cached_tokens(
            request.keys, request.block_size, request.num_prompt_tokens
        )

    def report(self, worker_id: str, load: LoadReport) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if load.away != worker.away:
            self._eligible.clear()
        worker.load = load
        self._learn_times(worker, load)
        if load.store is not None and load.store.token_ms and worker.costs is not None:
            tokens = worker.chunk_tokens
            compute_ms = worker.costs.prefill_ms(tokens, prefill_pairs(tokens, 0))
            self.residency.note_loads(worker_id, load.store.token_ms, compute_ms / tokens)
        worker.foreign = foreign = foreign_work(load.frontends, self.frontend_id)
        worker.foreign_tokens = 0
        if foreign is not None:
            expected = foreign.num_sequences * self.typical_output(worker.instance.card.fingerprint)
            worker.foreign_tokens = foreign.prefill_tokens + int(expected)
        worker.refresh()

    # -- bookings -----------------------------------------------------------------------------------------------

    def typical_output(self, fingerprint: str) -> float:
        """Running mean of the tokens that sequences of a model generate."""
        return self._typical_output.get(fingerprint, _INITIAL_TYPICAL_OUTPUT)

    def book(
        self,
        worker: WorkerView,
        num_prompt_tokens: int,
        max_tokens: int,
        cached_tokens: int = 0,
        keys: Sequence[int] = (),
        expected_output_tokens: float = 0.0,
    ) -> Booking:
        """A sequence is sent to a worker, which is expected to have `cached_tokens` of its prompt."""
        expected_output_tokens = expected_output_tokens or self.typical_output(worker.instance.card.fingerprint)
        new_tokens = num_prompt_tokens - cached_tokens
        pairs = prefill_pairs(new_tokens, cached_tokens)
        expected = min(max_tokens, int(expected_output_tokens) + 1)
        booking = Booking(
            worker, worker.life, new_tokens, pairs, num_prompt_tokens, new_tokens, expected, keys, cached_tokens
        )
        self.residency.index.predict(WorkerId(worker.worker_id), keys)
        worker.sent_tokens += new_tokens
        worker.booked_sequences += 1
        worker.num_prefilling += 1
        worker.booked_prefill_tokens += new_tokens
        worker.booked_prefill_pairs += pairs
        worker.booked_context_tokens += num_prompt_tokens
        worker.booked_kv_tokens += new_tokens
        worker.booked_output_tokens += booking.output_tokens
        worker.refresh()
        return booking

    def prefilled(self, booking: Booking, now: float = 0.0, cached_tokens: int | None = None) -> None:
        """The prompt has been computed (the first token came), so much of it out of the cache if the worker said."""
        if not booking.prefilling:
            return
        booking.prefilling = False
        worker = booking.worker
        if not booking.open or booking.life != worker.life:
            return
        if self.tracks_residency:
            self.residency.computed(worker.worker_id, booking.keys, worker.instance.kv_blocks, now)
            if cached_tokens is not None:
                self.residency.learned.note_cached(worker.worker_id, booking.cached_tokens, cached_tokens)
        self._end_prefill(booking)
        worker.prefilled_ms += (worker.costs or UNKNOWN).prefill_ms(booking.prefill_tokens, booking.prefill_pairs)
        booking.began_ms = worker.prefilled_ms
        worker.began_ms += booking.began_ms
        worker.refresh()

    def release(self, booking: Booking, num_generated: int | None = None) -> None:
        """The sequence has ended; `num_generated` if it ended by itself, for the guess of the next ones."""
        if not booking.open:
            return
        booking.open = False
        worker = booking.worker
        if num_generated is not None:
            self._learn(worker.instance.card.fingerprint, num_generated)
        if booking.life != worker.life:
            return
        worker.booked_sequences -= 1
        if booking.prefilling:
            self._end_prefill(booking)
        else:
            # Sums of floats do not cancel to the bit.
            worker.began_ms = worker.began_ms - booking.began_ms if worker.num_decoding else 0.0
        worker.booked_context_tokens -= booking.context_tokens
        worker.booked_kv_tokens -= booking.kv_tokens
        worker.booked_output_tokens -= booking.output_tokens
        worker.refresh()

    def check(self) -> None:
        """Raises `AssertionError` when an invariant is broken; for tests and idle moments."""
        for worker in self._workers.values():
            assert worker.booked_sequences >= 0, worker
            assert worker.booked_prefill_tokens >= 0, worker
            assert worker.booked_output_tokens >= 0, worker
            assert worker.foreign_tokens >= 0, worker
            assert 0 <= worker.num_prefilling <= worker.booked_sequences, worker
            if worker.num_prefilling == 0:
                assert worker.booked_prefill_tokens == 0, worker
                assert worker.booked_prefill_pairs == 0, worker
            if worker.booked_sequences == 0:
                assert worker.booked_context_tokens == worker.booked_output_tokens == 0, worker

    def _end_prefill(self, booking: Booking) -> None:
        worker = booking.worker
        self.residency.index.forget(WorkerId(worker.worker_id), booking.keys)
        worker.num_prefilling -= 1
        worker.booked_prefill_tokens -= booking.prefill_tokens
        # Sums of floats do not cancel to the bit.
        worker.booked_prefill_pairs = (
            worker.booked_prefill_pairs - booking.prefill_pairs if worker.num_prefilling else 0.0
        )

    def _expect_times(self, worker: WorkerView) -> None:
        """What its class is known or expected to take."""
        instance, card = worker.instance, worker.instance.card
        hardware = time_class(instance)
        if hardware not in self._costs and (
            expected := expected_steps(
                instance.hardware,
                num_parameters=card.num_parameters,
                kv_layout=card.kv_layout,
                dtype=card.dtype,
                kv_bytes_per_token=card.kv_bytes_per_token,
            )
        ):
            self.set_costs(hardware, self.perf.expect(hardware, expected), instance.max_num_batched_tokens)
        costs = self._costs.get(hardware)
        if worker.costs is not costs:
            worker.costs, worker.occupied = costs, None

    def _learn_past(self, worker: WorkerView, load: LoadReport) -> None:
        """A snapshot comes with many steps: what a frontend that joins a running cluster has missed."""
        if self.perf.steps(time_class(worker.instance)).num_samples < _WELL_KNOWN_SAMPLES:
            self._learn_times(worker, load, most=_TIMINGS_PER_SNAPSHOT)

    def _learn_times(self, worker: WorkerView, load: LoadReport, most: int = _TIMINGS_PER_REPORT) -> None:
        """A few steps of each report are enough, and fewer once the class is well known."""
        if not load.timings:
            return
        hardware = time_class(worker.instance)
        model = self.perf.steps(hardware)
        self._observations += 1
        if model.num_samples > _WELL_KNOWN_SAMPLES and self._observations % _WELL_KNOWN_STRIDE:
            return
        for timing in load.timings[-most:]:
            self.perf.observe_step(hardware, worker.worker_id, timing)
        model = self.perf.steps(hardware)
        self.set_costs(hardware, model, worker.instance.max_num_batched_tokens)
        worker.speed_factor = self.perf.peers(hardware).factor(worker.worker_id)
        worker.refresh()

    def set_costs(self, hardware: str, model: StepModel, chunk_tokens: int) -> None:
        """Let all workers of a class be priced by this model."""
        costs = StepCosts.of(
            model.coefficients, chunk_tokens or UNKNOWN.chunk_tokens, self.perf.peers(hardware).disagreement()
        )
        self._costs[hardware] = costs
        for worker in self._workers.values():
            if time_class(worker.instance) == hardware:
                worker.costs = costs
                worker.occupied = None

    def _learn(self, fingerprint: str, num_generated: int) -> None:
        typical = self._typical_output.get(fingerprint)
        if typical is None:
            self._typical_output[fingerprint] = float(num_generated)
        else:
            self._typical_output[fingerprint] = typical + _TYPICAL_OUTPUT_WEIGHT * (num_generated - typical)

    def _end_life(self, worker: WorkerView) -> None:
        self.residency.index.forget_all(WorkerId(worker.worker_id))
        worker.life += 1
        worker.connected = False
        worker.load = None
        worker.booked_sequences = worker.num_prefilling = worker.booked_prefill_tokens = 0
        worker.booked_context_tokens = worker.booked_kv_tokens = worker.booked_output_tokens = 0
        worker.booked_prefill_pairs = worker.prefilled_ms = worker.began_ms = 0.0
        worker.foreign, worker.foreign_tokens = None, 0
        worker.refresh()
        self._eligible.clear()
