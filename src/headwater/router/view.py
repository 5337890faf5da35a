"""What a router knows: the workers, their reports, and what was sent to them and has not ended.

Events come in as method calls (`put`, `remove`, `connected`, `report`, and the life of bookings); nothing is asked of
the outside. Bookings are exact and immediate for this frontend's own requests. What other frontends send shows only
in the workers' reports; the surplus of a report over our own bookings is counted as theirs.

Invariants: totals are the sums of the live bookings, never negative; a booking counts at most once and is void when
its worker was lost, also if the worker comes back.
"""

from dataclasses import dataclass

from headwater.protocol.cluster import Instance
from headwater.protocol.events import LoadReport

_INITIAL_TYPICAL_OUTPUT = 128.0
_TYPICAL_OUTPUT_WEIGHT = 0.05
"""Of the newest length in the running mean."""


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker as the router sees it. Policies read it, only the view changes it."""

    instance: Instance
    connected: bool = False
    load: LoadReport | None = None
    booked_sequences: int = 0
    booked_prefill_tokens: int = 0
    """Prompt tokens sent and not known to be computed."""
    booked_output_tokens: int = 0
    """Expected of the sequences that have not ended."""
    foreign_tokens: int = 0
    """Work of other frontends, guessed from the last report."""
    load_tokens: int = 0
    """All of the above together: tokens that this worker has yet to compute."""
    life: int = 0
    """Bookings of an earlier life are void."""

    @property
    def worker_id(self) -> str:
        return self.instance.worker_id

    @property
    def eligible(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.connected and self.instance.state == "ready" and self.instance.role != "prefill"

    def refresh(self) -> None:
        self.load_tokens = self.booked_prefill_tokens + self.booked_output_tokens + self.foreign_tokens


@dataclass(slots=True, eq=False)
class Booking:
    """One sequence that a worker has been given."""

    worker: WorkerView
    life: int
    prefill_tokens: int
    """Zero once the prompt has been computed."""
    output_tokens: int
    open: bool = True


class ClusterView:
    """All workers, by id and by model."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerView] = {}
        self._eligible: dict[str, list[WorkerView]] = {}
        self._typical_output: dict[str, float] = {}

    @property
    def workers(self) -> list[WorkerView]:
        return list(self._workers.values())

    def worker(self, worker_id: str) -> WorkerView | None:
        return self._workers.get(worker_id)

    def eligible(self, fingerprint: str) -> list[WorkerView]:
        """Workers that new requests for a model may go to, ordered by id. Not to be changed."""
        found = self._eligible.get(fingerprint)
        if found is None:
            workers = (w for w in self._workers.values() if w.eligible and w.instance.card.fingerprint == fingerprint)
            found = self._eligible[fingerprint] = sorted(workers, key=lambda worker: worker.worker_id)
        return found

    # -- workers ------------------------------------------------------------------------------------------------

    def put(self, instance: Instance) -> None:
        """A worker is there, or its record changed."""
        known = self._workers.get(instance.worker_id)
        if known is None:
            self._workers[instance.worker_id] = WorkerView(instance)
        else:
            known.instance = instance
        self._eligible.clear()

    def remove(self, worker_id: str) -> None:
        """A worker is gone for good; what was booked on it is void."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._end_life(worker)

    def set_connected(self, worker_id: str, connected: bool) -> None:
        """A worker can be reached from now on, or no longer; what was booked on a lost one is void."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.connected == connected:
            return
        self._end_life(worker)
        worker.connected = connected

    def report(self, worker_id: str, load: LoadReport) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.load = load
        typical = self._typical_output.get(worker.instance.card.fingerprint, _INITIAL_TYPICAL_OUTPUT)
        foreign_sequences = max(0, load.num_running + load.num_waiting - worker.booked_sequences)
        foreign_prefill = max(0, load.waiting_prefill_tokens - worker.booked_prefill_tokens)
        worker.foreign_tokens = foreign_prefill + int(foreign_sequences * typical) if foreign_sequences else 0
        worker.refresh()

    # -- bookings -----------------------------------------------------------------------------------------------

    def book(self, worker: WorkerView, num_prompt_tokens: int, max_tokens: int) -> Booking:
        """A sequence is sent to a worker. `num_prompt_tokens`: those it has to compute."""
        typical = self._typical_output.get(worker.instance.card.fingerprint, _INITIAL_TYPICAL_OUTPUT)
        booking = Booking(worker, worker.life, num_prompt_tokens, min(max_tokens, int(typical) + 1))
        worker.booked_sequences += 1
        worker.booked_prefill_tokens += num_prompt_tokens
        worker.booked_output_tokens += booking.output_tokens
        worker.refresh()
        return booking

    def prefilled(self, booking: Booking) -> None:
        """The prompt has been computed (the first token came)."""
        worker = booking.worker
        if booking.open and booking.life == worker.life and booking.prefill_tokens:
            worker.booked_prefill_tokens -= booking.prefill_tokens
            worker.refresh()
        booking.prefill_tokens = 0

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
        worker.booked_prefill_tokens -= booking.prefill_tokens
        worker.booked_output_tokens -= booking.output_tokens
        worker.refresh()

    def check(self) -> None:
        """Raises `AssertionError` when an invariant is broken; for tests and idle moments."""
        for worker in self._workers.values():
            assert worker.booked_sequences >= 0, worker
            assert worker.booked_prefill_tokens >= 0, worker
            assert worker.booked_output_tokens >= 0, worker
            assert worker.foreign_tokens >= 0, worker
            if worker.booked_sequences == 0:
                assert worker.booked_prefill_tokens == worker.booked_output_tokens == 0, worker

    def _learn(self, fingerprint: str, num_generated: int) -> None:
        typical = self._typical_output.get(fingerprint)
        if typical is None:
            self._typical_output[fingerprint] = float(num_generated)
        else:
            self._typical_output[fingerprint] = typical + _TYPICAL_OUTPUT_WEIGHT * (num_generated - typical)

    def _end_life(self, worker: WorkerView) -> None:
        worker.life += 1
        worker.connected = False
        worker.load = None
        worker.booked_sequences = worker.booked_prefill_tokens = worker.booked_output_tokens = 0
        worker.foreign_tokens = 0
        worker.refresh()
        self._eligible.clear()
