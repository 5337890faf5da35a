"""The cluster view: who may get requests, and bookings that never leak."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from headwater.protocol.cluster import Instance, ModelCard
from headwater.protocol.events import BlocksRemoved, BlocksStored, FrontendLoad, LoadReport, StepTiming
from headwater.router.delay import Delay
from headwater.router.request import RouteRequest
from headwater.router.view import ClusterView
from headwater.router.worker import Booking, WorkerView


def card(fingerprint: str = "f1") -> ModelCard:
    return ModelCard(
        name="m",
        served_names=["m"],
        fingerprint=fingerprint,
        architecture="llama",
        dtype="float32",
        kv_layout="l",
        max_model_len=8192,
        block_size=16,
        vocab_size=100,
    )


def instance(worker_id: str, *, role="both", state="ready", fingerprint: str = "f1") -> Instance:
    return Instance(
        worker_id=worker_id,
        role=role,
        state=state,
        card=card(fingerprint),
        request_address="inproc://r",
        event_address="inproc://e",
        engine="mocker",
        version=(1, 0),
    )


def report(running: int = 0, waiting: int = 0, prefill: int = 0) -> LoadReport:
    return LoadReport(
        num_running=running,
        num_waiting=waiting,
        waiting_prefill_tokens=prefill,
        kv_blocks_total=10,
        kv_blocks_free=10,
    )


def told(*frontends: FrontendLoad) -> LoadReport:
    return msgspec.structs.replace(report(), frontends=list(frontends))


def connected_view(*instances: Instance) -> ClusterView:
    view = ClusterView()
    for one in instances:
        view.put(one)
        view.set_connected(one.worker_id, True)
    return view


def ids(workers: list[WorkerView]) -> list[str]:
    return [worker.worker_id for worker in workers]


def test_only_connected_ready_workers_of_the_model_that_decode_are_eligible() -> None:
    view = connected_view(
        instance("c"),
        instance("a"),
        instance("starting", state="starting"),
        instance("draining", state="draining"),
        instance("prefill", role="prefill"),
        instance("decode", role="decode"),
        instance("other", fingerprint="f2"),
    )
    view.put(instance("unconnected"))
    assert ids(view.eligible("f1")) == ["a", "c", "decode"]
    assert ids(view.eligible("f2")) == ["other"]
    assert view.eligible("f3") == []


def test_changes_take_effect_at_once() -> None:
    view = connected_view(instance("a"), instance("b"))
    assert ids(view.eligible("f1")) == ["a", "b"]
    view.put(instance("a", state="draining"))
    assert ids(view.eligible("f1")) == ["b"]
    view.set_connected("b", False)
    assert ids(view.eligible("f1")) == []
    view.put(instance("a"))
    view.set_connected("b", True)
    assert ids(view.eligible("f1")) == ["a", "b"]
    view.remove("a")
    assert ids(view.eligible("f1")) == ["b"]


def test_a_worker_whose_server_is_away_gets_nothing_until_it_reports_otherwise() -> None:
    view = connected_view(instance("a"), instance("p", role="prefill"))
    assert (ids(view.eligible("f1")), ids(view.prefillers("f1"))) == (["a"], ["p"])
    for worker_id in ("a", "p"):
        view.report(worker_id, msgspec.structs.replace(report(), away="the server does not answer"))
    assert (view.eligible("f1"), view.prefillers("f1")) == ([], [])
    for worker_id in ("a", "p"):
        view.report(worker_id, report())
    assert (ids(view.eligible("f1")), ids(view.prefillers("f1"))) == (["a"], ["p"])


def test_a_booking_counts_from_submit_to_end_and_its_prefill_to_the_first_token() -> None:
    view = connected_view(instance("a"))
    worker = view.eligible("f1")[0]
    booking = view.book(worker, 1000, 50)
    assert (worker.booked_prefill_tokens, worker.booked_output_tokens, worker.load_tokens) == (1000, 50, 1050)
    view.prefilled(booking)
    view.prefilled(booking)
    assert worker.load_tokens == 50
    view.release(booking, 7)
    view.release(booking, 7)
    assert (worker.booked_sequences, worker.load_tokens) == (0, 0)


def test_expected_output_follows_what_answers_turn_out_to_be() -> None:
    view = connected_view(instance("a"))
    worker = view.eligible("f1")[0]
    for _ in range(100):
        view.release(view.book(worker, 10, 4096), 20)
    booking = view.book(worker, 10, 4096)
    assert 19 <= booking.output_tokens <= 22
    assert view.book(worker, 10, 5).output_tokens == 5


def test_reports_add_the_work_of_other_frontends_but_not_our_own() -> None:
    view = connected_view(instance("a"))
    view.frontend_id = "us"
    worker = view.eligible("f1")[0]
    view.book(worker, 100, 10)
    ours, theirs = FrontendLoad("us", 1, 0, 100, 5050.0, 100), FrontendLoad("them", 1, 2, 600, 2e5, 1800)
    view.report("a", told(ours))
    assert worker.foreign is None
    assert worker.backlog_tokens == 100
    view.report("a", told(ours, theirs))
    assert worker.backlog_tokens == 700
    assert worker.load_tokens == 110 + 600 + 3 * 128
    occupied = worker.occupy()
    assert (occupied.num_prefilling, occupied.num_decoding) == (2, 2)
    assert occupied.booked_context_tokens == 1900
    view.report("a", told(ours))
    assert worker.load_tokens == 110
    assert worker.occupied is None
    view.report("a", told(theirs))
    view.set_connected("a", False)
    assert (worker.foreign, worker.load_tokens) == (None, 0)


def test_a_worker_that_lies_about_others_cannot_make_nonsense_of_prices() -> None:
    view = connected_view(instance("a"), instance("b"))
    view.report("a", told(FrontendLoad("x", -5, -5, -100, float("nan"), -1)))
    view.report("b", told(FrontendLoad("x", 10**9, 10**9, 10**12, float("inf"), 10**15)))
    first, second = Delay().prices(RouteRequest("f1", 100, 10), view.eligible("f1"))
    assert first == Delay().prices(RouteRequest("f1", 100, 10), connected_view(instance("a")).eligible("f1"))[0]
    assert first < second < float("inf")


def test_bookings_of_a_lost_worker_are_void_also_when_it_comes_back() -> None:
    view = connected_view(instance("a"))
    worker = view.eligible("f1")[0]
    old = view.book(worker, 100, 10)
    view.set_connected("a", False)
    assert worker.load_tokens == 0
    view.set_connected("a", True)
    new = view.book(worker, 30, 3)
    view.prefilled(old)
    view.release(old)
    assert worker.load_tokens == 33
    view.release(new)
    assert worker.load_tokens == 0
    view.check()


def test_one_measured_step_is_enough_to_see_that_caching_saves_time() -> None:
    view = connected_view(instance("a"), instance("b"))
    timing = StepTiming(500, 125_000, 0, 0, 25.0)
    view.report("a", msgspec.structs.replace(report(), timings=[timing]))
    for worker in view.workers:
        costs = worker.costs
        assert costs is not None, "one model for all of a class"
        assert costs.prefill_ms(500, 125_000) == pytest.approx(25.0, rel=0.1)
        assert costs.prefill_ms(20, 10_000) < 15.0
        assert costs.decode_ms(1, 500) < costs.decode_ms(100, 50_000)


class Bookkeeping(RuleBasedStateMachine):
    """Random lives of workers and bookings, against a plain list of what is open."""

    bookings = Bundle("bookings")
    names = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.view = ClusterView()
        self.open: list[tuple[Booking, int]] = []

    def lose(self, worker: WorkerView | None) -> None:
        self.open = [entry for entry in self.open if entry[0].worker is not worker]

    @rule(name=names, state=st.sampled_from(["starting", "ready", "draining"]))
    def put(self, name: str, state: str) -> None:
        self.view.put(instance(name, state=state))

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.lose(self.view.worker(name))
        self.view.remove(name)

    @rule(name=names, connected=st.booleans())
    def connect(self, name: str, connected: bool) -> None:
        worker = self.view.worker(name)
        if worker is not None and worker.connected != connected:
            self.lose(worker)
        self.view.set_connected(name, connected)

    @rule(name=names, running=st.integers(0, 50), prefill=st.integers(0, 10_000))
    def report(self, name: str, running: int, prefill: int) -> None:
        self.view.report(name, report(running=running, prefill=prefill))

    @rule(target=bookings, prompt=st.integers(0, 5000), most=st.integers(1, 5000), pick=st.integers(0, 5))
    def book(self, prompt: int, most: int, pick: int) -> Booking | None:
        workers = self.view.eligible("f1")
        if not workers:
            return None
        booking = self.view.book(workers[pick % len(workers)], prompt, most)
        self.open.append((booking, prompt))
        return booking

    @rule(booking=bookings)
    def prefilled(self, booking: Booking | None) -> None:
        if booking is not None:
            self.view.prefilled(booking)
            self.open = [(b, 0 if b is booking else prompt) for b, prompt in self.open]

    @rule(booking=consumes(bookings), generated=st.none() | st.integers(0, 5000), twice=st.booleans())
    def release(self, booking: Booking | None, generated: int | None, twice: bool) -> None:
        if booking is None:
            return
        for _ in range(1 + twice):
            self.view.release(booking, generated)
        self.open = [entry for entry in self.open if entry[0] is not booking]

    @invariant()
    def totals_are_sums_of_open_bookings(self) -> None:
        self.view.check()
        for worker in self.view.workers:
            mine = [(b, prompt) for b, prompt in self.open if b.worker is worker]
            assert worker.booked_sequences == len(mine)
            assert worker.booked_prefill_tokens == sum(prompt for _, prompt in mine)
            assert worker.booked_output_tokens == sum(b.output_tokens for b, _ in mine)
            total = worker.booked_prefill_tokens + worker.booked_output_tokens + worker.foreign_tokens
            assert worker.load_tokens == total


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_was_sent_to_a_lost_worker_is_not_expected_there() -> None:
    view = connected_view(instance("a"))
    keys = [1, 2, 3]
    view.book(view.eligible("f1")[0], 48, 10, keys=keys)
    assert view.residency.cached_tokens(keys, 16, 49) == {"a": 48}
    view.set_connected("a", False)
    view.set_connected("a", True)
    assert view.residency.cached_tokens(keys, 16, 49) == {}


def test_churn_is_nothing_while_caches_fill_and_one_when_every_block_displaces_another() -> None:
    view = connected_view(instance("a"))
    blocks = [number.to_bytes(16, "little") for number in range(1, 61)]
    assert view.residency.churn == 0.0
    view.apply("a", [BlocksStored(b"".join(blocks[:20]))])
    assert view.residency.churn == 0.0
    view.apply("a", [BlocksRemoved(b"".join(blocks[:10])), BlocksStored(b"".join(blocks[20:40]))])
    assert 0.2 < view.residency.churn < 0.3
    for start in range(40, 30_000):
        old, new = (start - 20).to_bytes(16, "little"), (start + 100).to_bytes(16, "little")
        view.apply("a", [BlocksRemoved(old), BlocksStored(new)])
    assert view.residency.churn > 0.95
