"""Shapes of traffic and workers that mislead routers, against the default policy, in the simulator."""

from collections import Counter
from functools import partial

import pytest

from headwater.kv.identity import chain_block_ids
from headwater.router.policies import BUILTIN, Delay, LeastLoaded
from headwater.router.policy import Policy
from headwater.sim.cluster import SimCluster, SimConfig
from headwater.sim.conditions import Conditions
from headwater.sim.mixes import Mix
from headwater.sim.records import SimResult
from headwater.sim.report import SimReport, summarise
from headwater.sim.timing import Belief, DynamoPolynomial
from headwater.sim.workload import SimRequest

WORKERS = 8
RAG = Mix("rag", 400, 10.0, 8, 3000, 3, 150, 150, 8.0, document_tokens=1500)
MAIL = Mix("mail", 350, 3.0, 12, 2500, 2, 300, 120, 6.0, document_tokens=4000)
"""Nobody chose weights or figures by this one."""


def serve(requests: list[SimRequest], policy: Policy, conditions: Conditions | None = None, **sizes: int) -> SimResult:
    config = SimConfig(**{"num_workers": WORKERS, "num_blocks": 4096, "conditions": conditions or Conditions()} | sizes)  # type: ignore[arg-type]
    return SimCluster(config, [DynamoPolynomial()] * config.num_workers, policy).run(requests)


def figures(result: SimResult) -> SimReport:
    return summarise(result, trace="", policy="", mode="", ceiling=0.0)


def shares(result: SimResult) -> list[float]:
    """Of each worker, its requests over its fair share."""
    counts = Counter(record.worker for record in result.records)
    return [counts[number] * WORKERS / len(result.records) for number in range(WORKERS)]


def test_unique_prompts_load_all_workers_evenly() -> None:
    requests = Mix("unique", 1200, 30.0, 0, 0, 1, 1000, 100, 1.0).requests(64)
    result = serve(requests, Delay())
    assert max(shares(result)) < 1.3
    assert min(shares(result)) > 0.7
    assert figures(result).e2e_ms_mean < 1.03 * figures(serve(requests, LeastLoaded())).e2e_ms_mean


def test_a_system_prompt_that_all_share_makes_no_hot_spot() -> None:
    requests = Mix("one", 1200, 40.0, 1, 2000, 1, 100, 100, 1.0).requests(64)
    result = serve(requests, Delay())
    assert figures(result).hit_rate > 0.9
    assert max(shares(result)) < 2.0
    assert figures(result).e2e_ms_mean < 1.1 * figures(serve(requests, LeastLoaded())).e2e_ms_mean


def test_short_prompts_hardly_notice_a_very_long_one_among_them() -> None:
    short = Mix("short", 1200, 40.0, 4, 500, 1, 200, 100, 1.0).requests(64)
    long = [long_request(5.0 + 6 * number, 100_000, number) for number in range(4)]
    alone = serve(short, Delay())
    mixed = serve(sorted(short + long, key=lambda request: request.at_s), Delay())
    few = [record for record in mixed.records if record.prompt_tokens == 100_000]
    many = [record for record in mixed.records if record.prompt_tokens < 100_000]
    assert len({record.worker for record in few}) > 1
    for record in few:
        assert record.first_token_s - record.arrived_s < 4.0, "alone it takes 2.1 s"
    mixed.records = many
    assert figures(mixed).e2e_ms_mean < 1.1 * figures(alone).e2e_ms_mean
    assert figures(mixed).ttft_ms_p99 < 2 * figures(alone).ttft_ms_p99


def long_request(at_s: float, tokens: int, seed: int) -> SimRequest:
    text = (seed + 1).to_bytes(4, "little") * tokens
    return SimRequest(at_s, tokens, 20, chain_block_ids(b"", text, 64))


@pytest.mark.parametrize("liars", [1, 2])
def test_workers_that_claim_to_be_idle_and_fast_gain_little(liars: int) -> None:
    requests = RAG.requests(64)
    honest = serve(requests, Delay())
    result = serve(requests, Delay(), Conditions(boasting_workers=liars))
    assert max(shares(result)[:liars]) < 1.3
    assert figures(result).e2e_ms_mean < 1.03 * figures(honest).e2e_ms_mean


def test_a_worker_that_joins_cold_gets_its_share() -> None:
    requests = RAG.requests(64)
    joined_s = requests[len(requests) // 2].at_s
    result = serve(requests, Delay(), Conditions(late_workers=1, join_at_s=joined_s))
    before = [record for record in result.records if record.arrived_s < joined_s]
    after = [record for record in result.records if record.arrived_s > joined_s + 5]
    late = WORKERS - 1
    assert all(record.worker != late for record in before)
    assert sum(record.worker == late for record in after) > 0.5 * len(after) / WORKERS
    assert sum(record.cached_tokens for record in after if record.worker == late) > 0


def test_late_news_cost_little() -> None:
    requests = RAG.requests(64)
    prompt, late = (figures(serve(requests, Delay(), Conditions(event_delay_s=delay_s))) for delay_s in (0.0, 0.05))
    assert late.e2e_ms_mean < 1.04 * prompt.e2e_ms_mean


@pytest.mark.parametrize(("prefill_error", "decode_error"), [(0.3, 0.3), (-0.3, 0.3), (0.3, -0.3)])
def test_errors_that_all_workers_share_cost_little(prefill_error: float, decode_error: float) -> None:
    requests = RAG.requests(64)
    right, wrong = (
        figures(serve(requests, Delay(), Conditions(belief=belief)))
        for belief in (Belief(), Belief(prefill_error, decode_error))
    )
    assert wrong.e2e_ms_mean < 1.05 * right.e2e_ms_mean


def test_workers_that_measure_apart_keep_their_hit_rate() -> None:
    requests = RAG.requests(64)
    even, apart = (figures(serve(requests, Delay(), Conditions(reported_gap=gap))) for gap in (0.0, 0.1))
    assert apart.hit_rate > even.hit_rate - 0.03
    assert apart.e2e_ms_mean < 1.15 * even.e2e_ms_mean


@pytest.mark.parametrize("seed", [0, 1])
def test_a_workload_nobody_tuned_on_is_served_faster_than_by_any_baseline(seed: int) -> None:
    requests = MAIL.requests(64, seed)
    run = partial(serve, requests, num_workers=6, num_blocks=2048)
    e2e = {name: figures(run(policy())).e2e_ms_mean for name, policy in BUILTIN.items()}
    assert min(e2e, key=e2e.__getitem__) == "delay", e2e
