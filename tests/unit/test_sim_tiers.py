"""Tiers in virtual time: loads worked out by hand, and that a tier that is too slow changes nothing."""

from dataclasses import replace

import pytest

from headwater.bench.traces import TraceRow
from headwater.errors import ConfigError
from headwater.router.policies import Delay, RoundRobin
from headwater.router.policy import Policy
from headwater.scheduler.plan import StepPlan
from headwater.sim.cluster import SimCluster, SimConfig
from headwater.sim.mixes import Mix
from headwater.sim.records import SimResult
from headwater.sim.report import summarise
from headwater.sim.tiers import TierConfig, TierSpec
from headwater.sim.workload import SimRequest, from_trace

MB = 1_000_000
HOST = TierSpec("host", 1000 * MB, 1000.0 * MB)
"""A block takes 1 MB, so 1 ms."""
MIX = Mix("small", 60, 4.0, 3, 700, 3, 100, 30, 2.0, document_tokens=300)


class Plain:
    """1 ms per prefill token, 10 ms for a step that decodes."""

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        return float(plan.num_prefill_tokens) + (10.0 if plan.num_decode else 0.0)


def trace(*rows: tuple[float, int, int, tuple[int, ...]]) -> list[SimRequest]:
    """Rows of (second, prompt tokens, output tokens, hash ids)."""
    return list(from_trace([TraceRow(*row) for row in rows], 64))


def serve(
    requests: list[SimRequest],
    *tiers: TierSpec,
    workers: int = 1,
    per_node: int = 8,
    policy: Policy | None = None,
    num_blocks: int = 16,
) -> SimResult:
    config = SimConfig(num_workers=workers, num_blocks=num_blocks, tiers=TierConfig(tiers, MB, per_node))
    return SimCluster(config, [Plain()] * workers, policy or RoundRobin()).run(requests)


def three() -> list[SimRequest]:
    """The first prompt again, after another one has taken its place in the engine."""
    return trace((0.0, 1000, 1, (1, 2)), (5.0, 1000, 1, (3, 4)), (10.0, 1000, 1, (1, 2)))


def ttft_ms(result: SimResult) -> list[float]:
    return [round((record.first_token_s - record.arrived_s) * 1e3, 3) for record in result.records]


def test_what_the_engine_evicted_comes_from_the_host() -> None:
    assert ttft_ms(serve(three())) == [1000, 1000, 1000]
    result = serve(three(), HOST)
    assert ttft_ms(result) == [1000, 1000, 15 + 40], "15 blocks loaded, 40 tokens computed"
    assert [record.cached_tokens for record in result.records] == [0, 0, 960]
    assert result.loaded_blocks == {"host": 15}
    report = summarise(result, trace="t", policy="p", mode="x1", ceiling=0.0, block_tokens=64)
    assert report.loaded_rate == {"host": pytest.approx(960 / 3000)}


def test_a_tier_that_is_slower_than_computing_is_not_used() -> None:
    """A block is computed in 64 ms."""
    assert ttft_ms(serve(three(), replace(HOST, bytes_per_s=MB / 0.065))) == [1000, 1000, 1000]
    assert ttft_ms(serve(three(), replace(HOST, bytes_per_s=MB / 0.060))) == [1000, 1000, 15 * 60 + 40]
    assert ttft_ms(serve(three(), replace(HOST, latency_s=1.0))) == [1000, 1000, 1000]
    assert ttft_ms(serve(three(), replace(HOST, latency_s=0.1))) == [1000, 1000, 100 + 15 + 40]


def test_workers_of_a_node_share_its_host_tier_and_others_do_not() -> None:
    requests = trace((0.0, 1000, 1, (1, 2)), (5.0, 1000, 1, (1, 2)))
    assert ttft_ms(serve(requests, HOST, workers=2)) == [1000, 55]
    assert ttft_ms(serve(requests, HOST, workers=2, per_node=1)) == [1000, 1000]


def test_the_object_tier_is_everybodys_but_takes_only_what_comes_twice() -> None:
    everywhere = TierSpec("object", 1000 * MB, 1000.0 * MB)
    requests = trace(*((5.0 * number, 1000, 1, (1, 2)) for number in range(4)))
    result = serve(requests, everywhere, workers=4, per_node=1)
    assert ttft_ms(result) == [1000, 1000, 55, 55]


def test_loads_follow_each_other_on_a_link() -> None:
    """Both prompts are asked for at once by the other worker."""
    requests = trace((0.0, 1000, 1, (1, 2)), (0.0, 1000, 1, (3, 4)), (5.0, 1000, 1, (3, 4)), (5.0, 1000, 1, (1, 2)))
    slow = replace(HOST, bytes_per_s=100.0 * MB)
    assert ttft_ms(serve(requests, slow, workers=2))[2:] == [150 + 40, 300 + 40]


def test_a_tier_holds_no_more_than_it_may() -> None:
    small = replace(HOST, num_bytes=20 * MB)
    requests = trace((0.0, 1000, 1, (1, 2)), (5.0, 1000, 1, (3, 4)), (10.0, 1000, 1, (1, 2)), (15.0, 1000, 1, (3, 4)))
    result = serve(requests, small)
    assert result.loaded_blocks["host"] < 2 * 15
    assert ttft_ms(serve(requests, HOST))[2:] == [55, 55]


def test_decoding_goes_on_while_blocks_are_loaded() -> None:
    requests = trace((0.0, 1000, 1, (1, 2)), (5.0, 1000, 1, (3, 4)), (9.9, 64, 40, (5,)), (10.0, 1000, 1, (1, 2)))
    slow = replace(HOST, bytes_per_s=20.0 * MB)
    result = serve(requests, slow, num_blocks=20)
    decoded = result.records[2]
    assert decoded.finished_s - decoded.first_token_s < 39 * 0.010 + 0.060, "held up by 40 tokens of prefill alone"
    assert result.loaded_blocks["host"] > 0


@pytest.mark.parametrize("policy", [RoundRobin, Delay])
def test_a_run_repeats_to_the_bit_and_is_no_worse_than_without(policy: type[Policy]) -> None:
    requests = MIX.requests(64, 1)
    fast = (replace(HOST, num_bytes=200 * MB), TierSpec("disk", 10**10, 300.0 * MB, 0.001))

    def run(*tiers: TierSpec) -> SimResult:
        return serve(requests, *tiers, workers=3, policy=policy(), num_blocks=60)

    first, second, without = run(*fast), run(*fast), run()
    assert first.records == second.records
    assert sum(ttft_ms(first)) < sum(ttft_ms(without))
    hopeless = run(TierSpec("disk", 10**10, 0.001 * MB))
    if policy is RoundRobin:
        assert hopeless.records == without.records


def test_a_router_that_was_told_of_a_hopeless_tier_routes_as_without() -> None:
    """At first it only has a guess, which says that host memory is worth nearly as much as the engine's."""
    requests = [replace(request, at_s=6 * request.at_s) for request in MIX.requests(64, 1)]
    hopeless = TierSpec("host", 10**10, 0.001 * MB)
    without = serve(requests, policy=Delay(), workers=3, num_blocks=60)
    told = serve(requests, hopeless, policy=Delay(), workers=3, num_blocks=60, per_node=1)
    assert sum(ttft_ms(told)) < 1.05 * sum(ttft_ms(without))


@pytest.mark.parametrize("written", ["host", "host:1GiB", "tape:1GiB@1GB/s", "disk:lots@1GB/s", "disk:0B@1GB/s"])
def test_what_is_no_tier_is_refused(written: str) -> None:
    with pytest.raises(ConfigError):
        TierSpec.parse(written)


def test_a_written_tier() -> None:
    assert TierSpec.parse("disk:8TiB@6GB/s+1ms") == TierSpec("disk", 8 << 40, 6e9, 0.001)
