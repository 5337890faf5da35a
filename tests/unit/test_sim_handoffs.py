"""Simulated pools: hand-offs worked out by hand, what must be as without pools, and that nothing is lost or stuck."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.bench.traces import TraceRow
from headwater.errors import ConfigError
from headwater.router.disagg import DisaggSettings, Mode
from headwater.router.policies import BUILTIN, RoundRobin
from headwater.router.policy import Policy
from headwater.router.view import time_class
from headwater.scheduler.plan import StepPlan
from headwater.sim.cluster import PATIENT_QUEUE, SimConfig
from headwater.sim.conditions import Conditions
from headwater.sim.handoffs import KvLink, PoolConfig
from headwater.sim.mixes import Mix
from headwater.sim.pools import PooledCluster, make_cluster
from headwater.sim.records import SimRecord, SimResult
from headwater.sim.report import mode_of, summarise
from headwater.sim.tiers import TierConfig, TierSpec
from headwater.sim.timing import Belief, DynamoPolynomial, StepTimes
from headwater.sim.workload import SimRequest, from_trace

MIX = Mix("small", 60, 4.0, 3, 700, 3, 100, 30, 2.0, document_tokens=300)
TOKEN_BYTES = 1_000_000
BLOCK_MS = KvLink(64 * TOKEN_BYTES * 1000.0, 0.0)
"""A block takes 1 ms."""


class Plain:
    """1 ms per prefill token, 10 ms for a step that decodes."""

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        return float(plan.num_prefill_tokens) + (10.0 if plan.num_decode else 0.0)


def trace(*rows: tuple[float, int, int, tuple[int, ...]]) -> list[SimRequest]:
    """Rows of (second, prompt tokens, output tokens, hash ids)."""
    return list(from_trace([TraceRow(*row) for row in rows], 64))


def pools(num_prefill: int, num_decode: int, mode: Mode = "always", link: KvLink = BLOCK_MS) -> PoolConfig:
    return PoolConfig(num_prefill, num_decode, TOKEN_BYTES, DisaggSettings(mode), link)


def serve(
    requests: list[SimRequest],
    split: PoolConfig | None,
    *,
    policy: Policy | None = None,
    times: StepTimes | None = None,
    workers: int = 0,
    **sizes: object,
) -> SimResult:
    """With every block accounted for in the end."""
    workers = workers or (split.num_prefill + split.num_decode if split else 1)
    config = SimConfig(workers, pools=split, **sizes)  # type: ignore[arg-type]
    cluster = make_cluster(config, [times or Plain()] * workers, policy or RoundRobin())
    result = cluster.run(requests)
    if isinstance(cluster, PooledCluster):
        cluster.check()
    cluster.view.check()
    assert all(worker.booked_sequences == 0 for worker in cluster.view.workers)
    return result


def ttft_ms(result: SimResult) -> list[float]:
    return [round((record.first_token_s - record.arrived_s) * 1e3, 3) for record in result.records]


def moved_blocks(result: SimResult) -> float:
    return result.handoffs.moved_bytes / (64 * TOKEN_BYTES)


def test_blocks_move_while_the_rest_is_computed() -> None:
    """640 tokens in the first step, 360 in the second: the ten blocks of the first one have long come by then."""
    result = serve(trace((2.0, 1000, 5, ())), pools(1, 1), max_num_batched_tokens=640)
    (record,) = result.records
    assert record.first_token_s == pytest.approx(2.0 + 1.0 + 0.006), "five full blocks and a part of one"
    assert record.finished_s == pytest.approx(record.first_token_s + 4 * 0.010)
    assert (record.worker, record.prefiller) == (1, 0)
    assert result.prefill_tokens == [1000, 0]
    assert result.busy_ms == [pytest.approx(1000.0), pytest.approx(40.0)]
    assert moved_blocks(result) == 16
    assert (result.handoffs.done, result.handoffs.fell_back) == (1, 0)


def test_every_word_and_every_read_takes_the_latency() -> None:
    link = replace(BLOCK_MS, latency_s=0.002)
    assert ttft_ms(serve(trace((0.0, 640, 2, ())), pools(1, 1, link=link))) == [2 + 640 + 2 + 10 + 2]


def test_only_missing_blocks_move_and_are_computed() -> None:
    """The decode worker has the prefix of the second prompt, and so has the prefill worker."""
    rows = trace((0.0, 1000, 1, (1, 2)), (5.0, 1000, 1, (1, 3)))
    result = serve(rows, pools(1, 1))
    assert ttft_ms(result) == [1000 + 16, 488 + 8]
    assert moved_blocks(result) == 16 + 8
    assert result.prefill_tokens == [1000 + 488, 0]
    assert [record.cached_tokens for record in result.records] == [0, 512]


def test_what_the_prefill_worker_has_is_moved_and_not_computed() -> None:
    """Round robin: the second prompt is decoded where nothing of it is."""
    result = serve(trace((0.0, 1000, 1, (1, 2)), (5.0, 1000, 1, (1, 3))), pools(1, 2))
    assert [record.worker for record in result.records] == [1, 2]
    assert result.prefill_tokens == [1000 + 488, 0, 0]
    assert moved_blocks(result) == 32
    assert ttft_ms(result)[1] == pytest.approx(488 + 8), "what was there was read while the rest was computed"
    assert result.records[1].cached_tokens == 512


def test_what_the_decode_worker_has_is_not_moved_though_the_prefill_worker_lacks_it() -> None:
    """Two prefill workers take turns; the second one has to compute all, and gives out the end."""
    result = serve(trace((0.0, 1000, 1, (1, 2)), (0.0, 1000, 1, (3, 4)), (5.0, 1000, 1, (1, 2))), pools(2, 1))
    assert sorted(record.prefiller for record in result.records[:2]) == [0, 1]
    assert moved_blocks(result) == 32, "of the third only a part of a block is missing, computed where it decodes"
    assert result.prefill_tokens[2] == 40
    assert result.records[2].prefiller == -1
    assert ttft_ms(result)[2] == 40


def test_links_are_shared() -> None:
    """Two prompts that are computed in one step leave by one link."""
    rows = trace((0.0, 640, 1, ()), (0.0, 640, 1, ()))
    assert ttft_ms(serve(rows, pools(1, 2))) == [640 + 10, 1280 + 10]
    slow = KvLink(BLOCK_MS.bytes_per_s / 100, 0.0)
    assert ttft_ms(serve(rows, pools(1, 2, link=slow))) == [640 + 1000, 640 + 2000]
    assert ttft_ms(serve(rows, pools(2, 2, link=slow))) == [640 + 1000, 640 + 1000]


def test_what_does_not_come_is_computed_where_it_decodes() -> None:
    """Computed in a second and never read: after 2.3 s without a word it is given up."""
    never = KvLink(64 * TOKEN_BYTES / 1000, 0.0)
    known = Conditions(belief=Belief())
    rows = trace((0.0, 1000, 2, ()), (60.0, 1000, 2, ()))
    result = serve(rows, pools(1, 1, link=never), conditions=known)
    first, second = ttft_ms(result)
    assert 3200 < first - 1000 < 3600
    assert second == pytest.approx(first)
    assert (result.handoffs.done, result.handoffs.fell_back, moved_blocks(result)) == (0, 2, 0)
    assert result.prefill_tokens == [2000, 2000]
    assert [(record.prefiller, record.cached_tokens) for record in result.records] == [(-1, 0), (-1, 0)]


def test_the_link_of_a_read_that_is_called_off_is_free_again() -> None:
    """The first one's blocks would take the link until the ninth second; it is given up before the second one comes."""
    slow = KvLink(2 * 64 * TOKEN_BYTES, 0.0)
    rows = trace((0.0, 1000, 2, ()), (5.0, 128, 2, ()))
    result = serve(rows, pools(1, 1, link=slow), conditions=Conditions(belief=Belief()))
    assert (result.handoffs.done, result.handoffs.fell_back, moved_blocks(result)) == (1, 1, 2)
    assert ttft_ms(result)[1] == pytest.approx(128 + 2 * 500)


def test_a_line_that_nobody_expected_is_left() -> None:
    """The router believes that the prefill worker is four times as fast as it is, and knows of no line there."""

    class Slow:
        def duration_ms(self, plan: StepPlan, used_share: float) -> float:
            return 4 * Plain().duration_ms(plan, used_share)

    rows = trace(*[(0.001 * n, 1000, 1, ()) for n in range(6)])
    config = SimConfig(2, pools=pools(1, 1), conditions=Conditions(belief=Belief()), max_num_batched_tokens=640)
    cluster = PooledCluster(config, [Slow(), Plain()], RoundRobin())
    cluster.view.set_costs(time_class(cluster.view.workers[0].instance), Belief().model(Plain(), 1_000_000, 640), 640)
    result = cluster.run(rows)
    cluster.check()
    assert_all_served(result, rows)
    assert result.handoffs.done >= 1
    assert result.handoffs.fell_back >= 3
    assert result.duration_s < 16, "24 s of work, were all of it computed there"


INDIFFERENT = [name for name in BUILTIN if name not in ("delay", "sglang_cache_aware")]
"""Policies that do not care what workers are called."""


@pytest.mark.parametrize("name", INDIFFERENT)
def test_where_no_prompt_is_moved_pools_are_their_decode_workers(name: str) -> None:
    requests = MIX.requests(64)
    sizes = {"num_blocks": 300, "times": DynamoPolynomial(), "conditions": Conditions(event_delay_s=0.02)}
    apart = serve(requests, pools(1, 3, "never"), policy=BUILTIN[name](), **sizes)  # type: ignore[arg-type]
    whole = serve(requests, None, workers=3, policy=BUILTIN[name](), **sizes)  # type: ignore[arg-type]
    assert [replace(record, worker=record.worker - 1) for record in apart.records] == whole.records
    assert apart.busy_ms[1:] == whole.busy_ms
    assert apart.num_steps == whole.num_steps
    assert apart.handoffs.moved_bytes == 0


def test_one_at_a_time_and_moved_in_no_time_pools_of_one_are_one_worker() -> None:
    """Of prompts that do not go on from answers, which a prefill worker has not."""
    requests = [replace(request, at_s=50.0 * n, answer_ids=b"") for n, request in enumerate(MIX.requests(64)[:40])]
    link = KvLink(0.0, 0.0)
    apart = serve(requests, pools(1, 1, link=link), times=DynamoPolynomial(), max_num_batched_tokens=512)
    whole = serve(requests, None, times=DynamoPolynomial(), max_num_batched_tokens=512)
    for one, other in zip(apart.records, whole.records, strict=True):
        assert one.first_token_s == pytest.approx(other.first_token_s)
        assert one.finished_s - one.first_token_s == pytest.approx(other.finished_s - other.first_token_s)
        assert one.cached_tokens == other.cached_tokens
    assert apart.handoffs.done > 30


@pytest.mark.parametrize("name", BUILTIN)
def test_equal_runs_give_equal_results(name: str) -> None:
    requests = MIX.requests(64)
    first, second = (
        serve(
            requests,
            pools(2, 2, "plan", KvLink()),
            policy=BUILTIN[name](),
            times=DynamoPolynomial(),
            num_blocks=300,
            queue=PATIENT_QUEUE,
        )
        for _ in range(2)
    )
    assert first == second
    assert_all_served(first, requests)


def assert_all_served(result: SimResult, requests: list[SimRequest]) -> None:
    def asked(records: list[SimRecord]) -> list[tuple[int, int]]:
        return sorted((record.prompt_tokens, record.output_tokens) for record in records)

    assert asked(result.records) == sorted((request.prompt_tokens, request.output_tokens) for request in requests)
    assert all(record.arrived_s < record.first_token_s <= record.finished_s for record in result.records)
    assert sum(record.prefiller >= 0 for record in result.records) <= result.handoffs.done


coming = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 700), st.integers(1, 90), st.lists(st.integers(0, 3), max_size=3)),
    min_size=1,
    max_size=30,
)


def chained(ids: list[int]) -> tuple[int, ...]:
    """Names of prefixes, as traces have them."""
    return tuple(sum((one + 1) * 5**place for place, one in enumerate(ids[: end + 1])) for end in range(len(ids)))


@settings(max_examples=60, deadline=None)
@given(
    coming,
    st.integers(12, 40),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3)]),
    st.sampled_from(["always", "plan", "threshold"]),
    st.sampled_from([KvLink(), BLOCK_MS, KvLink(64e7, 0.02), KvLink(0.0, 0.0)]),
    st.sampled_from(["delay", "round_robin", "least_loaded"]),
    st.sampled_from([None, 3]),
    st.booleans(),
)
def test_under_pressure_of_memory_nothing_is_lost_or_stuck(
    rows: list[tuple[float, int, int, list[int]]],
    num_blocks: int,
    split: tuple[int, int],
    mode: Mode,
    link: KvLink,
    policy: str,
    in_flight: int | None,
    tiered: bool,
) -> None:
    """Room for two or three sequences: preempted while they load, while they are read, while they decode."""
    requests = trace(*[(at_s, prompt, output, chained(ids)) for at_s, prompt, output, ids in sorted(rows)])
    tiers = TierConfig((TierSpec("host", 10**10, 1e9),), 10**6) if tiered else TierConfig()
    result = serve(
        requests,
        pools(*split, mode, link),
        policy=BUILTIN[policy](),
        num_blocks=num_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=128,
        in_flight_per_worker=in_flight,
        tiers=tiers,
    )
    assert_all_served(result, requests)


def test_a_report_of_pools() -> None:
    requests = MIX.requests(64)
    config = SimConfig(4, pools=pools(1, 3))
    result = serve(requests, config.pools, times=DynamoPolynomial())
    report = summarise(result, trace="t", policy="p", mode=mode_of(config), ceiling=0.5)
    assert (report.mode, report.pools, report.workers) == ("1P+3D x1", "1P+3D", 4)
    assert mode_of(replace(config, in_flight_per_worker=5)) == "1P+3D closed5"
    assert report.remote_rate == sum(record.prefiller == 0 for record in result.records) / len(requests) > 0.8
    assert report.moved_bytes == result.handoffs.moved_bytes > 0
    assert report.prefill_imbalance == 1.0
    busy = report.pool_utilisation
    assert (busy["prefill"] + 3 * busy["decode"]) / 4 == pytest.approx(report.utilisation)
    alone = summarise(serve(requests, None), trace="t", policy="p", mode="x1", ceiling=0.5)
    assert (alone.pools, alone.remote_rate, alone.moved_bytes, alone.pool_utilisation) == ("", 0.0, 0, {})


def test_pools_are_all_workers() -> None:
    with pytest.raises(ConfigError, match="4 workers in pools of 1P\\+2D"):
        make_cluster(SimConfig(4, pools=pools(1, 2)), [Plain()] * 4, RoundRobin())


def test_prefill_workers_serve_alone_until_a_decode_worker_joins() -> None:
    conditions = Conditions(late_workers=1, join_at_s=3.0)
    result = serve(trace((0.0, 100, 1, ()), (5.0, 100, 1, ())), pools(1, 1), conditions=conditions)
    assert [(record.worker, record.prefiller) for record in result.records] == [(0, -1), (1, 0)]
