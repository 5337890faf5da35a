"""Prefills go where they have held up least, the more so the more crowded workers are; the guard of long answers."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_router_view import connected_view, instance

from headwater.router.delay import Delay
from headwater.router.even import unevenness
from headwater.router.price import UNKNOWN
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.view import ClusterView

PREFILL_MS = UNKNOWN.prefill_ms(1000, 500_500)


@dataclass
class Waiting:
    num_decoding: int
    held_up_ms: float


workers = st.lists(st.builds(Waiting, st.integers(0, 100), st.floats(0, 1e6)), min_size=1, max_size=16)


@given(workers=workers, share=st.floats(0, 1))
def test_weight_is_moved_between_workers_and_never_added(workers: list[Waiting], share: float) -> None:
    found = unevenness(workers, share)
    if found is not None:
        total = sum(worker.num_decoding for worker in workers)
        assert sum(found) == pytest.approx(0.0, abs=1e-6 * max(1, total))
        assert all(worker.num_decoding + more >= -1e-6 for worker, more in zip(workers, found, strict=True))


def test_who_has_waited_more_counts_more() -> None:
    assert unevenness([Waiting(4, 300.0), Waiting(4, 100.0)], 1.0) == pytest.approx([2.0, -2.0])
    assert unevenness([Waiting(4, 300.0), Waiting(4, 100.0)], 0.25) == pytest.approx([0.5, -0.5])
    assert unevenness([Waiting(4, 0.0), Waiting(9, 0.0)], 1.0) is None


def test_sequences_are_held_up_by_prefills_that_end_while_they_decode() -> None:
    view = connected_view(instance("a"))
    (worker,) = view.workers
    first, second = view.book(worker, 1000, 50), view.book(worker, 1000, 50)
    view.prefilled(first)
    assert worker.held_up_ms == 0.0
    view.prefilled(second)
    assert worker.held_up_ms == pytest.approx(PREFILL_MS)
    third = view.book(worker, 1000, 50)
    view.prefilled(third)
    assert worker.held_up_ms == pytest.approx(3 * PREFILL_MS)
    view.release(first, 20)
    assert worker.held_up_ms == pytest.approx(PREFILL_MS)
    view.release(view.book(worker, 1000, 50))
    view.release(second, 20)
    view.release(third, 20)
    assert worker.held_up_ms == 0.0


def test_a_worker_that_is_lost_has_held_up_nobody() -> None:
    view = connected_view(instance("a"))
    (worker,) = view.workers
    bookings = [view.book(worker, 1000, 50) for _ in range(2)]
    for booking in bookings:
        view.prefilled(booking)
    view.set_connected("a", False)
    view.set_connected("a", True)
    assert worker.held_up_ms == 0.0
    view.release(bookings[0], 20)
    view.prefilled(view.book(worker, 1000, 50))
    assert worker.held_up_ms == 0.0


def uneven(decoding: int) -> ClusterView:
    """Two workers with as many sequences of one size: those of `a` came one by one, and waited for each other."""
    view = connected_view(instance("a"), instance("b"))
    for worker_id, many_prefills in (("a", True), ("b", False)):
        worker = view.worker(worker_id)
        assert worker is not None
        worker.costs = UNKNOWN
        for _ in range(decoding):
            booking = view.book(worker, 1000, 100)
            view.prefilled(booking)
            if many_prefills:
                passing = view.book(worker, 1000, 100)
                view.prefilled(passing)
                view.release(passing)
    # As `a` was sent twice as much, it would win no tie: let it win all of them but for what is to be shown.
    view.workers[0].sent_tokens = 0
    return view


@pytest.mark.parametrize(("decoding", "winner"), [(16, "b"), (0, "a")])
def test_prefills_avoid_sequences_that_waited_most(decoding: int, winner: str) -> None:
    request = RouteRequest("f1", 4000, 50)
    worker, decision = Router(uneven(decoding), Delay()).route(request, "m")
    assert worker.worker_id == winner
    parts = {candidate.worker_id: candidate for candidate in decision.explain()}
    if decoding:
        assert parts["a"].parts["stall_ms"] > 1.05 * parts["b"].parts["stall_ms"]
        assert parts["a"].parts["first_token_ms"] == parts["b"].parts["first_token_ms"]


def test_the_first_token_alone_knows_no_such_guard() -> None:
    worker, _ = Router(uneven(16), Delay(0.0)).route(RouteRequest("f1", 4000, 50), "m")
    assert worker.worker_id == "a"
