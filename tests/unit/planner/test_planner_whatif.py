"""The fast simulation: exact where it can be worked out by hand, and never stuck whatever is asked of it."""

from math import isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.perf.curve import StepCurve
from headwater.perf.model import StepShape
from headwater.planner.plan import RolePlan, aggregated, candidates, loosened
from headwater.planner.pool import HIDDEN_PARTS, NOTICE_MS, WorkerModel
from headwater.planner.whatif import FastCluster, Job
from headwater.types import Role

CURVE = StepCurve(((0.0, 2.0), (512.0, 2.0), (8192.0, 50.0)), 1.0, 0.05, 1e-6, 3.0, 0.02, 1e-3)
SPLIT = RolePlan(("prefill", "decode"))


def model(kv_tokens: int = 100_000, **fields: float) -> WorkerModel:
    return WorkerModel(CURVE, kv_tokens, 1024, 64, **fields)


def step_ms(prefill: int = 0, pairs: float = 0.0, decodes: int = 0, context: float = 0.0) -> float:
    return CURVE.step_ms(StepShape(prefill, pairs, decodes, context))


def test_one_request_takes_its_chunks_and_its_steps() -> None:
    outcomes = FastCluster([model()], aggregated(1), 10).run([Job(0.0, 2000, 11)])
    first, second = 1024, 2000 - 1024
    # The production budget: a prompt that does not finish keeps what nobody borrows.
    prefill = step_ms(first, first * (first + 1) / 2) + step_ms(second, second * (first + (second + 1) / 2))
    assert outcomes.ttft_ms[0] == pytest.approx(prefill)
    decode = sum(step_ms(decodes=1, context=2001 + n) for n in range(10))
    assert outcomes.e2e_ms[0] - outcomes.ttft_ms[0] == pytest.approx(decode)
    assert outcomes.tpot_ms[0] == pytest.approx(decode / 10)


def test_decodes_stand_still_for_the_prefill_of_others() -> None:
    cluster = FastCluster([model()], aggregated(1), 100)
    outcomes = cluster.run([Job(0.0, 100, 101), Job(200.0, 1000, 2)])
    alone = FastCluster([model()], aggregated(1), 100).run([Job(0.0, 100, 101)])
    assert outcomes.e2e_ms[0] - alone.e2e_ms[0] == pytest.approx(outcomes.stalled_ms, rel=0.1)


def test_a_split_moves_the_prompt_and_decodes_elsewhere() -> None:
    worker = model(link_bytes_per_ms=1e6, kv_bytes_per_token=1e4)
    cluster = FastCluster([worker, worker], SPLIT, 10)
    outcomes = cluster.run([Job(0.0, 1000, 11)])
    prefill, link = step_ms(1000, 1000 * 1001 / 2), 1000 * 1e4 / 1e6
    assert outcomes.ttft_ms[0] == pytest.approx(prefill + link / HIDDEN_PARTS + NOTICE_MS)
    assert outcomes.remote == [True]
    prefilling, decoding = cluster.usage()
    assert prefilling.decode_ms == 0.0
    assert decoding.prefill_ms == 0.0


SLOW_LINK = model(link_bytes_per_ms=1e7 / 80, kv_bytes_per_token=1e4)
"""80 ms for a prompt of 1,000 tokens, which is computed in 57."""


def test_a_slow_link_shows_once_it_is_slower_than_computing() -> None:
    outcomes = FastCluster([SLOW_LINK, SLOW_LINK], SPLIT, 10).run([Job(0.0, 1000, 11)])
    assert outcomes.ttft_ms[0] == pytest.approx(80.0 + NOTICE_MS)


def test_transfers_out_of_one_worker_share_its_link() -> None:
    outcomes = FastCluster([SLOW_LINK, SLOW_LINK], SPLIT, 10).run([Job(0.0, 1000, 11)] * 2)
    assert outcomes.ttft_ms[1] == pytest.approx(160.0 + NOTICE_MS)


def test_a_prompt_is_computed_where_it_decodes_when_that_takes_no_longer_than_the_hand_off() -> None:
    worker = model(link_bytes_per_ms=1e4, kv_bytes_per_token=1e4)
    outcomes = FastCluster([worker, worker], SPLIT, 10).run([Job(0.0, 1000, 11)])
    assert outcomes.remote == [False]
    assert outcomes.ttft_ms[0] == pytest.approx(step_ms(1000, 1000 * 1001 / 2))


def test_who_comes_during_a_decode_step_waits_for_its_end() -> None:
    outcomes = FastCluster([model()], aggregated(1), 100).run([Job(0.0, 100, 101), Job(200.0, 1000, 2)])
    assert 0 < outcomes.queued_ms[1] <= step_ms(decodes=1, context=201)


def test_a_worker_that_has_handed_over_everything_may_decode() -> None:
    cluster = FastCluster([model(), model()], SPLIT, 10)
    cluster.submit(Job(0.0, 1000, 11))
    cluster.advance(5000.0)
    cluster.set_plan(RolePlan(("decode", "prefill")))
    outcomes = cluster.run([Job(5000.0, 1000, 11)])
    assert outcomes.remote == [True, True]


def test_cached_tokens_are_not_computed() -> None:
    outcomes = FastCluster([model()], aggregated(1), 10).run([Job(0.0, 1000, 2, cached_tokens=900)])
    assert outcomes.ttft_ms[0] == pytest.approx(step_ms(100, 100 * (900 + 101 / 2)))


def test_a_closed_loop_keeps_its_number_of_requests() -> None:
    cluster = FastCluster([model(), model()], aggregated(2), 20)
    outcomes = cluster.run_closed([Job(0.0, 100, 20)] * 50, 4)
    assert outcomes.finished == 50
    ends = sorted(start + e2e for start, e2e in zip(cluster.started_ms, outcomes.e2e_ms, strict=True))
    assert sorted(cluster.started_ms)[4:] == pytest.approx(ends[:46])


def test_what_finds_no_room_waits_for_it() -> None:
    small = model(kv_tokens=2500)
    outcomes = FastCluster([small, small], SPLIT, 50).run([Job(0.0, 1000, 50), Job(0.0, 1000, 50), Job(0.0, 1000, 50)])
    assert outcomes.finished == 3
    assert outcomes.ttft_ms[2] > outcomes.e2e_ms[0]


ROLE_PLANS = [*candidates(["a", "a", "b"])]
jobs = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 900), st.integers(1, 60)).map(
        lambda one: Job(float(one[0]), one[1], one[2])
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(
    jobs,
    st.lists(st.tuples(st.sampled_from(ROLE_PLANS), st.booleans()), min_size=1, max_size=4),
    st.integers(1000, 3000),
)
def test_nothing_is_ever_stuck_whatever_roles_become(
    asked: list[Job], plans: list[tuple[RolePlan, bool]], kv_tokens: int
) -> None:
    """Rooms just large enough for one request, roles that change under load: everything ends and all room is free."""
    asked.sort(key=lambda job: job.at_ms)
    chosen = [loosened(plan) or plan if loose else plan for plan, loose in plans]
    cluster = FastCluster([model(kv_tokens)] * 3, chosen[0], 30)
    for number, job in enumerate(asked):
        cluster.advance(job.at_ms)
        if number % 7 == 6:
            cluster.set_plan(chosen[number // 7 % len(chosen)])
        cluster.submit(job)
    cluster.advance(1e9)
    assert cluster.num_open == 0
    assert not any(isnan(value) for value in (*cluster.outcomes.ttft_ms, *cluster.outcomes.e2e_ms))
    assert cluster.free_tokens() == [kv_tokens] * 3


def test_roles_that_are_swapped_under_load_wait_for_no_circle() -> None:
    """Each of two workers holds room for prompts that the other one still has to compute."""
    worker = model(kv_tokens=3000)
    first, second = RolePlan(("prefill", "decode")), RolePlan(("decode", "prefill"))
    cluster = FastCluster([worker, worker], first, 50)
    for number in range(40):
        cluster.advance(number * 5.0)
        cluster.set_plan((first, second)[number % 2])
        cluster.submit(Job(number * 5.0, 1200, 100))
    cluster.advance(1e9)
    assert cluster.num_open == 0


def test_what_waits_for_room_elsewhere_keeps_no_new_decode_worker_from_its_prefill_workers() -> None:
    """Nobody has sent these prompts to the former prefill worker, and with its new role nobody will."""
    cluster = FastCluster([model(), model(kv_tokens=3500)], SPLIT, 1000)
    for _ in range(4):
        cluster.submit(Job(0.0, 1000, 1000))
    cluster.advance(2000.0)
    cluster.set_plan(RolePlan(("decode", "prefill")))
    outcomes = cluster.run([Job(2000.0 + 500 * number, 1000, 10) for number in range(5)])
    assert outcomes.finished == 9
    assert outcomes.remote == [True] + [False] * 3 + [True] * 5
    assert max(outcomes.ttft_ms[4:]) < min(outcomes.ttft_ms[1:4])


def test_a_new_decode_worker_sends_prompts_away_once_it_has_handed_over_its_own() -> None:
    cluster = FastCluster([model(), model()], SPLIT, 1000)
    for _ in range(3):
        cluster.submit(Job(0.0, 8000, 2))
    cluster.set_plan(RolePlan(("decode", "prefill")))
    outcomes = cluster.run([Job(1.0, 1000, 2)])
    assert outcomes.remote == [True] * 4
    assert outcomes.ttft_ms[3] > max(outcomes.ttft_ms[:3]) - 1.0


def test_prefill_workers_never_hold_room_for_others() -> None:
    """The structure that rules out circles: whoever prefills for others reserves for none."""
    roles: tuple[Role, ...] = ("prefill", "prefill", "decode")
    cluster = FastCluster([model()] * 3, RolePlan(roles), 30)
    outcomes = cluster.run([Job(number * 3.0, 500, 30) for number in range(100)])
    assert all(outcomes.remote)
    assert [usage.decode_ms for usage in cluster.usage()][:2] == [0.0, 0.0]
