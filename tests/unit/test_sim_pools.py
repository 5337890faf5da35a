"""The fast simulation against the full one, and hand-offs of production schedulers that never wait for ever."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.perf.curve import StepCurve
from headwater.planner.plan import RolePlan, aggregated, candidates
from headwater.planner.pool import WorkerModel
from headwater.planner.whatif import FastCluster, Job
from headwater.sim.planned import planned_cluster, requests_of
from headwater.sim.pools import PooledCluster
from headwater.sim.report import summarise

CURVE = StepCurve(((0.0, 10.0), (256.0, 10.0), (8192.0, 400.0)), 2.0, 0.005, 1e-6, 2.0, 0.02, 1e-5)


def model(kv_tokens: int = 500_000, max_num_seqs: int = 256) -> WorkerModel:
    return WorkerModel(CURVE, kv_tokens, 2048, max_num_seqs, 300e6, 160e3, "w")


def arrivals(prompt: int, output: int, rate: float, seconds: float) -> list[Job]:
    random = Random(f"{prompt}/{output}")
    at_ms, jobs = 0.0, []
    while at_ms < seconds * 1000:
        at_ms += random.expovariate(rate) * 1000
        jobs.append(Job(at_ms, int(prompt * random.uniform(0.75, 1.25)), int(output * random.uniform(0.5, 1.5)) + 1))
    return jobs


@pytest.mark.parametrize(("prompt", "output", "rate"), [(3000, 100, 6.0), (600, 300, 5.0)])
@pytest.mark.parametrize(
    "plan", [aggregated(3), RolePlan(("prefill", "decode", "decode")), RolePlan(("prefill", "prefill", "decode"))]
)
def test_the_fast_simulation_says_what_the_full_one_does(plan: RolePlan, prompt: int, output: int, rate: float) -> None:
    jobs = arrivals(prompt, output, rate, 20)
    expected = fmean([job.output_tokens for job in jobs])
    fast = FastCluster([model()] * 3, plan, expected).run(jobs)
    result = planned_cluster([model()] * 3, plan).run(requests_of(jobs))
    real = summarise(result, trace="t", policy="delay", mode="", ceiling=0.0)
    assert fast.finished == real.requests == len(jobs)
    assert all(record.prefiller >= 0 for record in result.records) == all(fast.remote) == (not plan.aggregated)
    assert fmean(fast.e2e_ms) == pytest.approx(real.e2e_ms_mean, rel=0.06)
    assert fmean(fast.tpot_ms) == pytest.approx(real.tpot_ms_mean, rel=0.06)
    assert fmean(fast.ttft_ms) == pytest.approx(real.ttft_ms_mean, rel=0.08, abs=15.0)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(list(candidates(["w"] * 3))),
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(1, 700), st.integers(1, 40)).map(
            lambda one: Job(float(one[0]), one[1], one[2])
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(50, 120),
)
def test_no_room_to_spare_and_yet_nothing_is_stuck(plan: RolePlan, jobs: list[Job], num_blocks: int) -> None:
    """Production schedulers with room for one or two sequences: everything ends, every block is free again."""
    jobs.sort(key=lambda job: job.at_ms)
    cluster = planned_cluster([model(num_blocks * 16, max_num_seqs=8)] * 3, plan)
    result = cluster.run(requests_of(jobs))
    assert [record.prompt_tokens for record in result.records] == [job.prompt_tokens for job in jobs]
    assert all(record.arrived_s < record.first_token_s <= record.finished_s for record in result.records)
    cluster.view.check()
    if isinstance(cluster, PooledCluster):
        cluster.check()
