"""Workers that tell nothing of their blocks: guesses from what was sent there, bounded, and dropped for the truth."""

from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_router_view import connected_view, instance

from headwater.kv.index import PrefixIndex, block_keys
from headwater.protocol.events import BlocksRemoved, BlocksStored, EventSnapshot
from headwater.router.approximate import LearnedBlocks
from headwater.router.delay import Delay
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.view import ClusterView
from headwater.types import WorkerId


def prompt(first: int, blocks: int = 64) -> bytes:
    return b"".join([blake2b(b"%d/%d" % (first, number), digest_size=16).digest() for number in range(blocks)])


def send(router: Router, ids: bytes, now: float, cached: int | None = None) -> str:
    """One request, computed at once."""
    asked = RouteRequest("f1", len(ids) + 5, 10, block_ids=ids, now=now)
    worker, decision = router.route(asked, "m")
    booking = router.view.book(worker, asked.num_prompt_tokens, 10, decision.cached_tokens, asked.keys)
    router.view.prefilled(booking, now, cached)
    router.view.release(booking, 10)
    return worker.worker_id


def cached(view: ClusterView, ids: bytes, now: float) -> dict[str, int]:
    asked = RouteRequest("f1", len(ids) + 5, 10, block_ids=ids, now=now)
    view.look_up(asked)
    return dict(asked.cached_tokens)


def test_a_silent_worker_is_believed_to_hold_what_was_sent_there_for_a_while() -> None:
    view = connected_view(*(instance(f"w{number}") for number in range(4)))
    router = Router(view, Delay())
    ids = prompt(1)
    first = send(router, ids, 0.0)
    assert view.residency.knowledge(first) == "approximate"
    assert cached(view, ids, 1.0) == {first: 1024}
    assert send(router, ids, 2.0) == first
    assert cached(view, ids, 121.0) == {first: 1024}, "using it keeps it"
    assert cached(view, ids, 125.0) == {}
    assert view.residency.knowledge(first) == "none"
    view.residency.index.check()


def test_it_is_said_once_and_only_after_some_prompts_and_time() -> None:
    view = connected_view(instance("w0"))
    router = Router(view, Delay())
    learned = view.residency.learned
    for _ in range(5):
        send(router, prompt(1), 0.0)
    assert learned.newly_silent == []
    assert not learned.is_silent("w0")
    send(router, prompt(1), 3.0)
    send(router, prompt(1), 4.0)
    assert learned.newly_silent == ["w0"]
    assert learned.is_silent("w0")
    send(router, b"", 5.0)
    assert learned.newly_silent == ["w0"]


def test_the_first_event_ends_all_guessing_about_that_worker_alone() -> None:
    view = connected_view(instance("w0"), instance("w1"))
    router = Router(view, Delay())
    held = {send(router, prompt(number), float(number)) for number in range(8)}
    assert held == {"w0", "w1"}
    told = prompt(99)
    view.apply("w0", [BlocksStored(told)])
    assert view.residency.knowledge("w0") == "events"
    assert view.residency.knowledge("w1") == "approximate"
    assert cached(view, told, 9.0) == {"w0": 1024}
    for number in range(8):
        assert "w0" not in cached(view, prompt(number), 9.0)
    assert any(cached(view, prompt(number), 9.0) for number in range(8))
    where = send(router, prompt(99), 10.0)
    assert where == "w0"
    view.apply("w0", [BlocksRemoved(told)])
    assert cached(view, told, 11.0) == {}, "what it was sent since is not guessed"
    view.residency.index.check()


def test_a_snapshot_replaces_guesses_too() -> None:
    view = connected_view(instance("w0"))
    router = Router(view, Delay())
    send(router, prompt(1), 0.0)
    view.rebuild(EventSnapshot("w0", 1, 0, []))
    assert cached(view, prompt(1), 0.1) == {}
    assert view.residency.learned.num_blocks("w0") == 0
    send(router, prompt(1), 0.2)
    assert cached(view, prompt(1), 0.3) == {"w0": 1024}
    view.remove("w0")
    view.residency.index.check()
    assert view.residency.index.stats().num_blocks["device"] == 0


def test_a_worker_that_never_finds_what_it_was_sent_is_believed_to_cache_nothing() -> None:
    view = connected_view(instance("w0"))
    router = Router(view, Delay())
    for number in range(6):
        send(router, prompt(1), float(number), cached=0)
    assert not view.residency.learned.caches("w0")
    assert cached(view, prompt(1), 7.0) == {}
    send(router, prompt(1), 8.0, cached=0)
    assert cached(view, prompt(1), 8.0) == {}
    send(router, prompt(1), 9.0, cached=512)
    send(router, prompt(1), 10.0, cached=512)
    assert cached(view, prompt(1), 10.0) == {"w0": 1024}, "it does after all"


@pytest.mark.parametrize("uses_residency", [True, False])
def test_policies_that_do_not_ask_cost_no_memory(uses_residency: bool) -> None:
    view = connected_view(instance("w0"))
    router = Router(view, Delay())
    view.tracks_residency = uses_residency
    send(router, prompt(1), 0.0)
    assert (view.residency.learned.num_blocks("w0") > 0) == uses_residency


@given(
    prompts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.floats(0, 40)), max_size=40),
    capacity=st.integers(1, 30),
)
@settings(max_examples=150, deadline=None)
def test_guesses_keep_to_capacity_and_time_and_lose_ends_before_beginnings(
    prompts: list[tuple[int, int, float]], capacity: int
) -> None:
    index = PrefixIndex()
    worker = WorkerId("w")
    index.add_worker(worker)
    learned = LearnedBlocks(index, ttl_s=60.0)
    now = 0.0
    last: dict[int, tuple[float, int]] = {}
    for family, blocks, passed in prompts:
        now += passed
        learned.sweep(now)
        learned.learn("w", block_keys(prompt(family, blocks)), capacity, now)
        last[family] = (now, blocks)
        assert learned.num_blocks("w") <= capacity
        assert index.stats().num_blocks["device"] == learned.num_blocks("w")
        index.check()
        for other in range(6):
            keys = block_keys(prompt(other, 12))
            resident = [index.match(keys[: length + 1]).get(worker, 0) == length + 1 for length in range(12)]
            assert resident == sorted(resident, reverse=True), "prefix-closed"
    now += 62.0
    learned.sweep(now)
    assert learned.num_blocks("w") == 0
