"""The default policy's choice: deterministic, the least price, and a band of equals only where workers disagree."""

from dataclasses import replace
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_router_view import connected_view, instance

from headwater.protocol.events import BlocksStored
from headwater.router.delay import Delay
from headwater.router.price import UNKNOWN
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.view import ClusterView

IDS = b"".join([blake2b(bytes([number]), digest_size=16).digest() for number in range(64)])
loads = st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 12), st.integers(0, 64)), min_size=2, max_size=6)
"""Of each worker: tokens of a waiting prompt, decoding sequences, cached blocks."""


def loaded(of_workers: list[tuple[int, int, int]], spread: float = 0.0) -> ClusterView:
    view = connected_view(*(instance(f"w{number}") for number in range(len(of_workers))))
    for worker, (waiting, decoding, cached) in zip(view.workers, of_workers, strict=True):
        worker.costs = replace(UNKNOWN, spread=spread)
        for _ in range(decoding):
            view.prefilled(view.book(worker, 700, 100))
        if waiting:
            view.book(worker, waiting, 100)
        if cached:
            view.apply(worker.worker_id, [BlocksStored(IDS[: 16 * cached])])
    return view


def asked(tokens: int = 1030) -> RouteRequest:
    return RouteRequest("f1", tokens, 50, block_ids=IDS)


def choice(view: ClusterView, policy: Delay) -> str:
    return Router(view, policy).route(asked(), "m")[0].worker_id


@given(of_workers=loads)
@settings(max_examples=80, deadline=None)
def test_the_same_question_has_the_same_answer(of_workers: list[tuple[int, int, int]]) -> None:
    policy = Delay()
    answers = {choice(loaded(of_workers), policy) for _ in range(3)} | {choice(loaded(of_workers), Delay())}
    assert len(answers) == 1


@given(of_workers=loads, spread=st.sampled_from([0.0, 0.01]))
@settings(max_examples=80, deadline=None)
def test_without_disagreement_the_least_price_wins(of_workers: list[tuple[int, int, int]], spread: float) -> None:
    view = loaded(of_workers, spread)
    router = Router(view, Delay())
    _, decision = router.route(asked(), "m")
    found = {candidate.worker_id: candidate.total for candidate in decision.explain()}
    assert found[decision.winner] == pytest.approx(min(found.values()), rel=1e-9)


@given(of_workers=loads, spread=st.floats(0.05, 0.5))
@settings(max_examples=80, deadline=None)
def test_with_disagreement_the_most_cached_of_the_equals_wins(
    of_workers: list[tuple[int, int, int]], spread: float
) -> None:
    view = loaded(of_workers, spread)
    router = Router(view, Delay())
    request = asked()
    winner, decision = router.route(request, "m")
    found = {candidate.worker_id: candidate for candidate in decision.explain()}
    least = min(found.values(), key=lambda candidate: candidate.total)
    gap = found[decision.winner].total - least.total
    assert gap <= spread * least.total * (1 + 1e-9) + 1e-9, "the band is no wider than the disagreement"
    cached = request.cached_tokens
    assert cached.get(decision.winner, 0) >= cached.get(least.worker_id, 0)
    if gap > 1e-6 and cached.get(decision.winner, 0) == cached.get(least.worker_id, 0):
        assert winner.sent_tokens <= view.workers[int(least.worker_id[1:])].sent_tokens


def test_disagreement_alone_changes_a_choice() -> None:
    """Nearly as cheap, and holding a little of the prefix: among equals that decides."""
    of_workers = [(0, 0, 0), (300, 0, 8)]
    assert choice(loaded(of_workers), Delay()) == "w0"
    assert choice(loaded(of_workers, 0.5), Delay()) == "w1"


def test_equal_prices_go_to_the_one_that_was_sent_least() -> None:
    view = loaded([(0, 0, 0)] * 4)
    for worker, sent in zip(view.workers, (50, 20, 30, 40), strict=True):
        worker.sent_tokens = sent
    request = RouteRequest("f1", 10, 50)
    assert Delay().choose(request, view.eligible("f1")).winner == "w1"


@pytest.mark.parametrize("decode_share", [0.0, 0.5, 1.0])
def test_adding_an_idle_worker_never_makes_the_best_price_worse(decode_share: float) -> None:
    policy = Delay(decode_share)
    few, many = loaded([(4000, 3, 0), (8000, 1, 0)]), loaded([(4000, 3, 0), (8000, 1, 0), (0, 0, 0)])
    best = []
    for view in (few, many):
        request = asked()
        view.look_up(request)
        best.append(min(policy.prices(request, view.eligible("f1"))))
    assert best[1] <= best[0]
