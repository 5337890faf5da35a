"""Two real vLLM workers behind our router: hit rate and time to the first token, by routing policy.

    python bench/vllm_routing.py [--policy delay round_robin least_loaded] [--requests 80] [--rate 1.0]

vLLM for CPU (`bench/peers/setup vllm demo`), one core per worker, the demo model in float32. Prompts of 288 tokens
begin with one of nine prefixes, drawn at random; the KV caches of both workers together hold all of them, one alone
does not. Hit rates are what the workers reported, times what a client saw. All policies get the same load.
"""

import argparse
from statistics import fmean

import uvloop
from token_prompts import TokenShape, requests_of
from vllm_cluster import COMMON, MODEL, headwater, metric, prompts

from headwater.bench.arrivals import Poisson
from headwater.bench.http_client import Target
from headwater.bench.load import LoadRun, RequestRecord
from headwater.bench.report import percentile

PREFIX, TAIL, OUTPUT, PREFIXES = 256, 32, 8, 9
BLOCK, BLOCKS = 32, 64
"""64 blocks of a worker: some six prefixes and what runs."""


async def put_load(url: str, count: int, rate: float) -> list[RequestRecord]:
    load = LoadRun(Target.parse(url), TokenShape("demo", "completions"), timeout_s=120)
    try:
        return await load.run(requests_of(prompts(count, PREFIX, TAIL, PREFIXES, 1), OUTPUT), Poisson(rate, 1))
    finally:
        load.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=["delay", "round_robin"])
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--log", help="file for what the processes say")
    args = parser.parse_args()
    print(f"{'policy':<14}{'hit %':>8}{'TTFT ms':>9}{'p50':>8}{'p90':>8}{'p99':>8}{'E2E ms':>9}{'failed':>8}")
    for policy in args.policy:
        flags = [MODEL, "--engine", "vllm", "--workers", "2", "--router-policy", policy, "--block-size", str(BLOCK)]
        flags += ["--num-kv-blocks", str(BLOCKS), "--max-num-seqs", "8", "--threads", "1", *COMMON]
        with headwater(*flags, workers=2, log=args.log) as (url, _):
            records = uvloop.run(put_load(url, args.requests, args.rate))
            hits = metric(url, "headwater_prompt_tokens_cached_total") / metric(url, "headwater_prompt_tokens_total")
        show(policy, hits, records)


def show(policy: str, hits: float, records: list[RequestRecord]) -> None:
    ttft = sorted(1e3 * record.ttft_s for record in records if record.ttft_s is not None)
    e2e = [1e3 * record.e2e_s for record in records if record.e2e_s is not None]
    failed = sum(record.error is not None for record in records)
    times = "".join(f"{value:8.0f}" for value in (percentile(ttft, share) for share in (50, 90, 99)))
    print(f"{policy:<14}{100 * hits:8.1f}{fmean(ttft):9.0f}{times}{fmean(e2e):9.0f}{failed:8}", flush=True)


if __name__ == "__main__":
    main()
