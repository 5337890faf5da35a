"""Routing policies live, beside the simulator's prediction for the very same requests.

    python bench/routing_live.py [--policy delay round_robin least_loaded] [--workers 4] [--rate 8] [--requests 400]

Real processes (`headwater serve` with mocker workers, whose steps take as long as modelled) under a Poisson load of
prompts that share one of a few long prefixes, sent as token ids. The KV caches of all workers together hold all
prefixes, one alone does not. The simulator gets the same prompts at the same times, the same step times and sizes.
Hit rates are what workers reported, times what a client saw.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

import msgspec
import uvloop
from processes import free_port, running
from prometheus_client.parser import text_string_to_metric_families
from token_prompts import TokenShape, requests_of

from headwater.bench.arrivals import Poisson
from headwater.bench.http_client import Target
from headwater.bench.load import LoadRun, RequestRecord
from headwater.bench.report import percentile
from headwater.bench.workload import LoadRequest
from headwater.config.schema import EngineConfig, RouterConfig
from headwater.engines.mocker.executor import StepTimes
from headwater.frontend.policies import load_policy
from headwater.frontend.routing import queue_limits
from headwater.kv.identity import chain_block_ids, namespace
from headwater.scheduler.plan import StepPlan
from headwater.sim.cluster import SimCluster, SimConfig
from headwater.sim.workload import SimRequest

BLOCK_SIZE = 16
ENGINE = EngineConfig(
    engine="mocker",
    served_model_name=("mock",),
    num_kv_blocks=1200,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    mocker_prefill_ms_per_token=0.15,
    mocker_decode_base_ms=10.0,
    mocker_decode_ms_per_sequence=0.2,
)
PREFIX_TOKENS, TAIL_TOKENS, OUTPUT_TOKENS, NUM_PREFIXES = 1536, 256, 32, 24


@dataclass(frozen=True, slots=True)
class MockerTimes:
    """The mocker's step times, for the simulator."""

    times: StepTimes

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        return self.times.duration_ms(plan)


@dataclass(frozen=True, slots=True)
class Figures:
    hit_rate: float
    ttft_ms: list[float]
    e2e_ms: list[float]

    def row(self) -> tuple[float, ...]:
        ttft = sorted(self.ttft_ms)
        return (
            100 * self.hit_rate,
            fmean(ttft),
            percentile(ttft, 50),
            percentile(ttft, 99),
            fmean(self.e2e_ms),
        )


def prompts(num_requests: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    heads = [[random.randrange(100, 40_000) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    return [
        [*random.choice(heads), *(random.randrange(100, 40_000) for _ in range(TAIL_TOKENS))]
        for _ in range(num_requests)
    ]


# -- simulated


def simulate(ids: Sequence[Sequence[int]], arrivals: Poisson, policy: str, num_workers: int) -> Figures:
    key = namespace("simulated", "simulated")
    times = [at_s for at_s, _ in arrivals.schedule(requests_of(ids, OUTPUT_TOKENS))]
    asked = [
        SimRequest(
            at_s,
            len(prompt),
            OUTPUT_TOKENS,
            chain_block_ids(key, b"".join(token.to_bytes(4, "little") for token in prompt), BLOCK_SIZE),
        )
        for at_s, prompt in zip(times, ids, strict=True)
    ]
    config = SimConfig(
        num_workers,
        block_size=BLOCK_SIZE,
        num_blocks=ENGINE.num_kv_blocks or 0,
        max_num_seqs=ENGINE.max_num_seqs,
        max_num_batched_tokens=ENGINE.max_num_batched_tokens or 0,
        queue=queue_limits(RouterConfig(), {}),
    )
    step_times = [MockerTimes(StepTimes.of(ENGINE))] * num_workers
    records = SimCluster(config, step_times, load_policy(policy)).run(asked).records
    return Figures(
        sum(record.cached_tokens for record in records) / sum(record.prompt_tokens for record in records),
        [1e3 * (record.first_token_s - record.arrived_s) for record in records],
        [1e3 * (record.finished_s - record.arrived_s) for record in records],
    )


# -- live


@contextlib.contextmanager
def serving(policy: str, num_workers: int, log: str | None) -> Iterator[str]:
    """URL of a cluster of real processes, once it is ready."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hw-live-") as folder:
        config = Path(folder) / "graph.yaml"
        engine = {name: value for name, value in msgspec.structs.asdict(ENGINE).items() if value is not None}
        engine["served_model_name"] = list(ENGINE.served_model_name)
        config.write_bytes(msgspec.yaml.encode({"workers": num_workers, "engine": engine}))
        command = [sys.executable, "-m", "headwater", "serve", "--config", str(config), "--port", str(port)]
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
        with running([[*command, "--router-policy", policy]], environment, log) as children:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and children[0].poll() is None:
                with contextlib.suppress(urllib.error.URLError, OSError):
                    if ready_workers(port) == num_workers:
                        yield f"http://127.0.0.1:{port}"
                        return
                time.sleep(0.1)
            raise SystemExit("the cluster did not become ready; see --log FILE")


def ready_workers(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        return int(msgspec.json.decode(answer.read())["workers"]["ready"])


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


async def put_load(url: str, requests: Sequence[LoadRequest], arrivals: Poisson) -> list[RequestRecord]:
    load = LoadRun(Target.parse(url), TokenShape("mock", "completions"), timeout_s=120)
    try:
        return await load.run(requests, arrivals)
    finally:
        load.close()
        await asyncio.sleep(0.5)


def measure(ids: Sequence[Sequence[int]], arrivals: Poisson, policy: str, num_workers: int, log: str | None) -> Figures:
    with serving(policy, num_workers, log) as url:
        records = uvloop.run(put_load(url, requests_of(ids, OUTPUT_TOKENS), arrivals))
        prompt_tokens = metric(url, "headwater_prompt_tokens_total")
        cached_tokens = metric(url, "headwater_prompt_tokens_cached_total")
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return Figures(
        cached_tokens / prompt_tokens,
        [1e3 * record.ttft_s for record in records if record.ttft_s is not None],
        [1e3 * record.e2e_s for record in records if record.e2e_s is not None],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--policy", nargs="+", default=["delay", "least_loaded", "round_robin"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simulate-only", action="store_true")
    parser.add_argument("--log", help="file for what the processes say")
    args = parser.parse_args()
    ids = prompts(args.requests, args.seed)
    arrivals = Poisson(args.rate, args.seed)
    print(f"{'policy':14}{'':10}{'hit %':>8}{'TTFT ms':>9}{'p50':>8}{'p99':>8}{'E2E ms':>9}")
    for policy in args.policy:
        predicted = simulate(ids, arrivals, policy, args.workers).row()
        show(policy, "simulated", predicted)
        if not args.simulate_only:
            live = measure(ids, arrivals, policy, args.workers, args.log).row()
            show(policy, "live", live)
            off = [100 * (mine / theirs - 1) for mine, theirs in zip(live, predicted, strict=True)]
            print(f"{'':14}{'differs %':10}" + "".join(f"{value:+8.1f} " for value in off), flush=True)


def show(policy: str, what: str, row: Sequence[float]) -> None:
    hit, mean, median, tail, e2e = row
    print(f"{policy:14}{what:10}{hit:8.1f}{mean:9.1f}{median:8.1f}{tail:8.1f}{e2e:9.1f}", flush=True)


if __name__ == "__main__":
    main()
