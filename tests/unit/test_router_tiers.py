"""What a block in a slower tier is worth to the router: what its worker says that loading takes, beside computing."""

from hashlib import blake2b

import pytest
from test_router_view import connected_view, instance

from headwater.kv.index import block_keys
from headwater.kv.pricing import TierRun, TokenTimes
from headwater.protocol.events import BlocksStored, LoadReport, StoreCounts
from headwater.router.delay import Delay
from headwater.router.price import UNKNOWN, prefill_pairs
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.view import ClusterView
from headwater.types import Tier

IDS = b"".join([blake2b(bytes([number]), digest_size=16).digest() for number in range(64)])
KEYS = block_keys(IDS)
COMPUTE_MS = UNKNOWN.prefill_ms(2048, prefill_pairs(2048, 0)) / 2048
"""Per token, in full steps."""


def told(view: ClusterView, worker_id: str, token_ms: dict[Tier, float]) -> None:
    worker = view.worker(worker_id)
    assert worker is not None
    worker.costs = UNKNOWN
    view.report(worker_id, LoadReport(0, 0, 0, 100, 100, store=StoreCounts(0, 0, 0, 0, token_ms)))


def cached(view: ClusterView) -> dict[str, int]:
    return view.residency.cached_tokens(KEYS, 16, 2000)


def test_a_block_comes_from_the_nearest_tier_that_has_it() -> None:
    view = connected_view(instance("a"))
    view.apply("a", [BlocksStored(IDS[: 16 * 60], tier="disk"), BlocksStored(IDS[: 16 * 30], tier="host")])
    told(view, "a", {"host": 0.25 * COMPUTE_MS, "disk": 0.5 * COMPUTE_MS})
    assert cached(view) == {"a": 16 * (30 * 0.75 + 30 * 0.5)}
    view.apply("a", [BlocksStored(IDS[: 16 * 10])])
    assert cached(view) == {"a": 16 * (10 + 20 * 0.75 + 30 * 0.5)}
    view.apply("a", [BlocksStored(IDS[: 16 * 60])])
    assert cached(view) == {"a": 16 * 60}


def test_each_worker_has_tiers_of_its_own_speed() -> None:
    view = connected_view(instance("a"), instance("b"), instance("c"), instance("d"))
    for worker in view.workers:
        view.apply(worker.worker_id, [BlocksStored(IDS[: 16 * 60], tier="disk")])
    told(view, "a", {"disk": 0.1 * COMPUTE_MS})
    told(view, "b", {"disk": 0.8 * COMPUTE_MS})
    told(view, "c", {"disk": 30.0 * COMPUTE_MS})
    assert cached(view) == pytest.approx({"a": 0.9 * 960, "b": 0.2 * 960, "c": 0, "d": 0.6 * 960}, abs=1)
    assert Router(view, Delay()).route(RouteRequest("f1", 1000, 50, block_ids=IDS), "m")[0].worker_id == "a"


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_nonsense_is_worth_no_more_than_what_nobody_has_said(nonsense: float) -> None:
    view = connected_view(instance("a"))
    view.apply("a", [BlocksStored(IDS[: 16 * 60], tier="host")])
    told(view, "a", {"host": nonsense})
    assert 0 <= cached(view)["a"] <= 0.9 * 960


def test_a_worker_that_comes_back_under_its_name_has_said_nothing_yet() -> None:
    view = connected_view(instance("a"))
    told(view, "a", {"host": 0.5 * COMPUTE_MS})
    view.remove("a")
    view.put(instance("a"))
    view.set_connected("a", True)
    view.apply("a", [BlocksStored(IDS[: 16 * 60], tier="host")])
    assert cached(view) == {"a": int(0.9 * 960)}


def test_what_a_token_takes_follows_what_runs_take() -> None:
    times = TokenTimes()
    times.note([TierRun("host", 10, 16.0), TierRun("disk", 5, 80.0), TierRun("object", 0, 5.0)], 16)
    assert times.ms == {"host": 0.1, "disk": 1.0}
    for _ in range(60):
        times.note([TierRun("disk", 5, 8.0)], 16)
    assert times.ms["disk"] == pytest.approx(0.1, abs=0.01)
    times.note([TierRun("disk", 5, float("inf"))], 16)
    assert times.ms["disk"] == pytest.approx(0.1, abs=0.01)
