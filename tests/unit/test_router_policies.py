"""The built-in policies, and what every policy must give."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_router_view import connected_view, instance

from headwater.errors import NoWorkers
from headwater.router.policies import BUILTIN, LeastLoaded, RoundRobin
from headwater.router.policy import Policy, RouteRequest
from headwater.router.router import Router

REQUEST = RouteRequest(fingerprint="f1", num_prompt_tokens=100, max_tokens=10)


@pytest.mark.parametrize("make", BUILTIN.values())
@given(loads=st.lists(st.integers(0, 1000), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_every_policy_chooses_one_of_the_workers_and_can_explain_it_later(make: type[Policy], loads: list[int]) -> None:
    view = connected_view(*(instance(f"w{i}") for i in range(len(loads))))
    for worker, tokens in zip(view.eligible("f1"), loads, strict=True):
        view.book(worker, tokens, 1)
    policy = make()
    decision = policy.choose(RouteRequest("f1", 100, 10), view.eligible("f1"))
    at_once = decision.explain()
    assert decision.winner in {f"w{i}" for i in range(len(loads))}
    assert decision.num_candidates == len(loads)
    assert decision.policy == make.name
    assert [candidate.worker_id for candidate in at_once] == [f"w{i}" for i in range(len(loads))]
    for candidate in at_once:
        assert candidate.total == sum(candidate.parts.values())
    for worker in view.eligible("f1"):
        view.book(worker, 500, 5)
    assert decision.explain() == at_once, "as things stood when it was made"


@pytest.mark.parametrize("make", BUILTIN.values())
def test_idle_workers_share_single_requests(make: type[Policy]) -> None:
    view = connected_view(*(instance(f"w{i}") for i in range(4)))
    policy = make()
    counts: Counter[str] = Counter()
    for _ in range(400):
        decision = policy.choose(RouteRequest("f1", 100, 10), view.eligible("f1"))
        counts[decision.winner] += 1
        worker = view.worker(decision.winner)
        assert worker is not None
        view.release(view.book(worker, 100, 10))
    assert min(counts.values()) >= 60
    assert len(counts) == 4


@pytest.mark.parametrize("make", [RoundRobin, LeastLoaded])
def test_equal_workers_share_equally_and_in_the_same_order_every_time(make: type[Policy]) -> None:
    view = connected_view(*(instance(f"w{i}") for i in range(4)))
    first, second = make(), make()
    order = [first.choose(REQUEST, view.eligible("f1")).winner for _ in range(400)]
    assert Counter(order) == {f"w{i}": 100 for i in range(4)}
    assert order == [second.choose(REQUEST, view.eligible("f1")).winner for _ in range(400)]


def test_round_robin_ignores_load_and_survives_changes_of_size() -> None:
    view = connected_view(instance("a"), instance("b"))
    view.book(view.eligible("f1")[0], 10_000, 1)
    policy = RoundRobin()
    assert [policy.choose(REQUEST, view.eligible("f1")).winner for _ in range(4)] == ["a", "b", "a", "b"]
    view.remove("b")
    assert policy.choose(REQUEST, view.eligible("f1")).winner == "a"


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=12), rounds=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_least_loaded_always_takes_a_minimum(loads: list[int], rounds: int) -> None:
    view = connected_view(*(instance(f"w{i:02}") for i in range(len(loads))))
    workers = view.eligible("f1")
    for worker, tokens in zip(workers, loads, strict=True):
        view.book(worker, tokens, 1)
    policy = LeastLoaded()
    for _ in range(rounds):
        winner = view.worker(policy.choose(REQUEST, workers).winner)
        assert winner is not None
        assert winner.load_tokens == min(worker.load_tokens for worker in workers)


def test_least_loaded_spreads_a_burst_by_its_own_bookings_before_any_report() -> None:
    view = connected_view(*(instance(f"w{i}") for i in range(4)))
    router = Router(view, LeastLoaded())
    for _ in range(40):
        worker, _ = router.route(REQUEST, "m")
        view.book(worker, 100, 10)
    assert {worker.booked_sequences for worker in view.workers} == {10}


def test_least_loaded_gives_a_long_prompt_room() -> None:
    view = connected_view(instance("a"), instance("b"))
    router = Router(view, LeastLoaded())
    worker, _ = router.route(REQUEST, "m")
    view.book(worker, 30_000, 10)
    for _ in range(50):
        other, _ = router.route(REQUEST, "m")
        assert other is not worker
        view.book(other, 100, 10)


def test_without_workers_the_router_says_so() -> None:
    view = connected_view(instance("a", state="draining"))
    with pytest.raises(NoWorkers, match="no worker serves the-model"):
        Router(view, RoundRobin()).route(REQUEST, "the-model")
