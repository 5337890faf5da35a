"""What Headwater adds to one vLLM: times to the first token and between tokens, CPU per token, throughput.

    python bench/vllm_overhead.py [--way attached in-worker] [--rounds 6] [--requests 24] [--concurrency 4]

Against vLLM's own server asked directly, in the same run: rounds of equal requests alternate between both, so that a
host that is busy with other things is busy for both. `attached`: the very server that is also asked directly, with
Headwater before it. `in-worker`: a second vLLM inside Headwater's worker. vLLM computes on one core (--core). CPU is
that of all processes but vLLM's engine core and worker, which do the same work on both sides. VLLM_MODEL and
VLLM_VOCABULARY name another model: a tiny one shows the cost where steps are as short as on a GPU.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import perf_counter

import uvloop
from token_prompts import TokenShape, requests_of
from vllm_cluster import COMMON, MODEL, api_cpu_s, drawn, headwater, vllm_server

from headwater.bench.arrivals import ClosedLoop
from headwater.bench.http_client import Target
from headwater.bench.load import LoadRun, RequestRecord
from headwater.bench.report import percentile

INPUT, OUTPUT = 64, 48
FLAGS = ["--block-size", "32", "--max-num-seqs", "16"]


@dataclass
class Side:
    """One way to the engine."""

    name: str
    url: str
    pids: list[int]
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    api_ms_per_token: list[float] = field(default_factory=list)
    """CPU of everything but vLLM's engine core and worker."""
    failed: int = 0


async def put_load(url: str, seed: int, count: int, concurrency: int) -> list[RequestRecord]:
    random = Random(seed)
    ids = [drawn(random, INPUT) for _ in range(count)]
    load = LoadRun(Target.parse(url), TokenShape("demo", "completions"), timeout_s=300)
    try:
        return await load.run(requests_of(ids, OUTPUT), ClosedLoop(concurrency))
    finally:
        load.close()


def round_of(side: Side, seed: int, args: argparse.Namespace) -> None:
    before, began = sum(api_cpu_s(pid) for pid in side.pids), perf_counter()
    records = uvloop.run(put_load(side.url, seed, args.requests, args.concurrency))
    took_s, used_s = perf_counter() - began, sum(api_cpu_s(pid) for pid in side.pids) - before
    tokens = OUTPUT * args.requests
    side.failed += sum(record.error is not None for record in records)
    side.ttft_ms += [1e3 * record.ttft_s for record in records if record.ttft_s is not None]
    side.itl_ms += [1e3 * gap for record in records for gap in record.gaps_s]
    side.tokens_per_s.append(tokens / took_s)
    side.api_ms_per_token.append(1e3 * used_s / tokens)


@contextmanager
def attached(direct: Side, args: argparse.Namespace) -> Iterator[Side]:
    flags = ["--attach", direct.url, "--served-model-name", "demo"]
    with headwater(*flags, workers=1, log=args.log) as (url, process):
        yield Side("attached", url, [*direct.pids, process.pid])


@contextmanager
def in_worker(_direct: Side, args: argparse.Namespace) -> Iterator[Side]:
    flags = [MODEL, "--engine", "vllm", *FLAGS, *COMMON]
    with headwater(*flags, workers=1, log=args.log, cores=args.core) as (url, process):
        yield Side("in-worker", url, [process.pid])


WAYS = {"attached": attached, "in-worker": in_worker}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--core", default="0")
    parser.add_argument("--log", help="file for what the processes say")
    args = parser.parse_args()
    print("        way     TTFT ms p50    p99   ITL ms p50    p99   tokens/s  API CPU ms/token  failed")
    with vllm_server(*FLAGS, log=args.log, cores=args.core) as (url, server):
        for way in args.way:
            direct = Side("direct", url, [server.pid])
            with WAYS[way](direct, args) as other:
                sides = [direct, other]
                for side in sides:
                    uvloop.run(put_load(side.url, 1_000_000, 4, 2))
                for number in range(args.rounds):
                    for place, side in enumerate(sides if number % 2 == 0 else sides[::-1]):
                        round_of(side, 2 * number + place, args)
            for side in sides:
                show(side)
            compare(direct, other)


def show(side: Side) -> None:
    ttft, itl = sorted(side.ttft_ms), sorted(side.itl_ms)
    print(
        f"{side.name:>11}  {percentile(ttft, 50):14.1f}{percentile(ttft, 99):7.0f}{percentile(itl, 50):13.2f}"
        f"{percentile(itl, 99):7.1f}{median(side.tokens_per_s):11.1f}{median(side.api_ms_per_token):18.3f}"
        f"{side.failed:8}",
        flush=True,
    )


def compare(direct: Side, other: Side) -> None:
    """Round by round, since rounds of a pair see the same host."""
    pairs = zip(direct.tokens_per_s, other.tokens_per_s, strict=True)
    ratios = sorted(mine / theirs for theirs, mine in pairs)
    added = [
        percentile(sorted(getattr(other, name)), share) - percentile(sorted(getattr(direct, name)), share)
        for name in ("ttft_ms", "itl_ms")
        for share in (50, 99)
    ]
    cpu = median(other.api_ms_per_token) - median(direct.api_ms_per_token)
    print(
        f"  {other.name} adds: TTFT {added[0]:+.1f} ms (p99 {added[1]:+.0f}), ITL {added[2]:+.2f} ms "
        f"(p99 {added[3]:+.1f}), CPU {cpu:+.3f} ms per token; throughput x {median(ratios):.3f} "
        f"(rounds {ratios[0]:.3f} to {ratios[-1]:.3f})\n",
        flush=True,
    )


if __name__ == "__main__":
    main()
