"""Fairness between tenants in simulated time, on the production router, queue and scheduler: exact, and no noise."""

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from headwater.router.delay import Delay
from headwater.router.queue import QueueLimits
from headwater.sim.cluster import SimCluster, SimConfig
from headwater.sim.records import SimRecord
from headwater.sim.timing import DynamoPolynomial
from headwater.sim.workload import SimRequest

NUM_WORKERS = 4
BLOCK = 64
POLITE_RATE = 6.0
"""Requests per second: a tenth of what the workers can do."""


def arrivals(tenant: str, rate: float, seconds: float, seed: int) -> Iterator[SimRequest]:
    random, at = Random(seed), 0.0
    while (at := at + random.expovariate(rate)) < seconds:
        prompt_tokens = random.randrange(500, 4000)
        ids = random.randbytes(16 * (prompt_tokens // BLOCK))
        yield SimRequest(at, prompt_tokens, random.randrange(10, 60), ids, tenant=tenant)


def served(*streams: Iterator[SimRequest], step_tokens: int = 2048, **weights: float) -> list[SimRecord]:
    config = SimConfig(
        NUM_WORKERS,
        block_size=BLOCK,
        num_blocks=16_384,
        max_num_batched_tokens=step_tokens,
        queue=QueueLimits(tenant_weights=weights),
    )
    requests = sorted((request for stream in streams for request in stream), key=lambda request: request.at_s)
    return SimCluster(config, [DynamoPolynomial()] * NUM_WORKERS, Delay()).run(requests).records


def p99_ttft_ms(records: list[SimRecord], tenant: str) -> float:
    """After the first seconds, in which step times are still being learned."""
    kept = [record for record in records if record.tenant == tenant and record.arrived_s > 3.0]
    ttft = sorted(1e3 * (record.first_token_s - record.arrived_s) for record in kept)
    return ttft[int(0.99 * len(ttft)) - 1]


@pytest.mark.parametrize(("seed", "step_tokens"), [(1, 2048), (11, 2048), (1, 8192)])
def test_a_flood_of_one_tenant_raises_the_others_p99_by_a_fifth_at_most(seed: int, step_tokens: int) -> None:
    """The neighbour sends 7 times as much as we, with the workers at 80 %; then a hundred times as much."""

    def run(rate: float) -> list[SimRecord]:
        ours = arrivals("polite", POLITE_RATE, 30, seed)
        return served(ours, arrivals("noisy", rate * POLITE_RATE, 30, seed + 1), step_tokens=step_tokens)

    usual, flooded = run(7), run(100)
    assert sum(record.tenant == "noisy" for record in flooded) > 1000
    assert p99_ttft_ms(flooded, "polite") <= 1.2 * p99_ttft_ms(usual, "polite")
    assert p99_ttft_ms(flooded, "noisy") > 10 * p99_ttft_ms(flooded, "polite"), "whoever floods waits for himself"


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0, "c": 4.0}])
def test_worker_time_is_shared_by_weight(weights: dict[str, float]) -> None:
    """All send far more than can be served; what counts is what was done while all of them waited."""
    seconds = 20.0
    streams = [arrivals(tenant, 60.0, seconds, number) for number, tenant in enumerate(weights)]
    records = served(*streams, **weights)
    done: Counter[str] = Counter()
    for record in records:
        if 5.0 < record.first_token_s < seconds:
            done[record.tenant] += record.prompt_tokens
    for tenant, weight in weights.items():
        assert done[tenant] / done.total() == pytest.approx(weight / sum(weights.values()), rel=0.05), tenant
