"""`headwater simulate`: a cluster in virtual time, policies side by side."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headwater.bench.traces import read_trace
from headwater.errors import ConfigError
from headwater.frontend.policies import load_policy
from headwater.perf.roofline import DEVICES, MODELS, Roofline
from headwater.router.policies import BUILTIN
from headwater.sim.cluster import SimCluster, SimConfig
from headwater.sim.report import COLUMNS, SimReport, rows, shared_lru_hit_rate, summarise
from headwater.sim.timing import DynamoPolynomial, RooflineTimes, StepTimes
from headwater.sim.workload import MIXES, SimRequest, from_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--trace", type=Path, action="append", default=[], help="Mooncake JSONL or Azure CSV (.gz)")
    load.add_argument("--mix", action="append", default=[], metavar="NAME", help=f"synthetic: {', '.join(MIXES)}")
    load.add_argument("--limit", type=int, help="only the first so many requests")
    load.add_argument("--speed", type=float, action="append", default=[], metavar="X", help="arrivals X times faster")
    load.add_argument("--closed", type=int, action="append", default=[], metavar="N", help="closed loop, N per worker")
    load.add_argument("--seed", type=int, default=0, help="of synthetic mixes")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--workers", type=int, action="append", default=[], metavar="N", help="may be repeated")
    cluster.add_argument("--block-size", type=int, default=64)
    cluster.add_argument("--num-kv-blocks", type=int, help="per worker; default: 16,384, or what the hardware holds")
    cluster.add_argument("--max-num-seqs", type=int, default=256)
    cluster.add_argument("--max-num-batched-tokens", type=int, default=8192)
    cluster.add_argument("--device", metavar="NAME", help=f"step times by arithmetic: {', '.join(DEVICES)}")
    cluster.add_argument("--model", metavar="NAME", default="llama-3.1-70b-fp8", help=f"one of {', '.join(MODELS)}")
    cluster.add_argument("--tensor-parallel-size", type=int, default=1)
    cluster.add_argument("--event-delay-ms", type=float, default=0.0, help="news from workers come so late")
    router = parser.add_argument_group("router")
    router.add_argument("--policy", action="append", default=[], metavar="NAME", help=f"of {', '.join(BUILTIN)}; `all`")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object per line and run")


def run(args: argparse.Namespace) -> int:
    reports: list[SimReport] = []
    runs = list(_runs(args))
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("simulating", total=len(runs))
        for name, requests, config, policy in runs:
            progress.update(task, description=f"{name}, {config.num_workers} workers, {policy}")
            reports.append(_simulate(args, name, requests, config, policy))
            progress.advance(task)
            if args.json:
                print(msgspec.json.encode(reports[-1]).decode(), flush=True)
    if not args.json:
        table = Table(title="Simulated")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("trace", "mode", "policy") else "right")
        for row in rows(reports):
            table.add_row(*row)
        Console().print(table)
    return 0


def _simulate(
    args: argparse.Namespace, name: str, requests: Sequence[SimRequest], config: SimConfig, policy: str
) -> SimReport:
    cluster = SimCluster(config, [_times(args)] * config.num_workers, load_policy(policy))
    started = time.process_time()
    result = cluster.run(requests)
    return summarise(
        result,
        trace=name,
        policy=policy,
        mode=f"closed{config.in_flight_per_worker}" if config.in_flight_per_worker else f"x{config.arrival_speed:g}",
        ceiling=shared_lru_hit_rate(requests, config.num_workers * config.num_blocks, config.block_size),
        cpu_s=time.process_time() - started,
    )


def _runs(args: argparse.Namespace) -> Iterator[tuple[str, Sequence[SimRequest], SimConfig, str]]:
    policies = list(BUILTIN) if args.policy == ["all"] else args.policy or ["delay"]
    for name, requests in _loads(args):
        for workers in args.workers or [8]:
            for config in _configs(args, workers):
                for policy in policies:
                    yield name, requests, config, policy


def _configs(args: argparse.Namespace, workers: int) -> Iterator[SimConfig]:
    config = SimConfig(
        num_workers=workers,
        block_size=args.block_size,
        num_blocks=args.num_kv_blocks or _kv_blocks(args),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        event_delay_s=args.event_delay_ms / 1000,
    )
    for speed in args.speed or ([] if args.closed else [1.0]):
        yield replace(config, arrival_speed=speed)
    for in_flight in args.closed:
        yield replace(config, in_flight_per_worker=in_flight)


def _loads(args: argparse.Namespace) -> Iterator[tuple[str, Sequence[SimRequest]]]:
    for path in args.trace:
        requests = list(from_trace(read_trace(path), args.block_size))
        yield path.name.split(".")[0], requests[: args.limit]
    for name in args.mix if args.trace or args.mix else ["rag"]:
        if name not in MIXES:
            raise ConfigError(f"no mix is called {name!r}", hint=f"known: {', '.join(MIXES)}")
        yield name, MIXES[name].requests(args.block_size, args.seed)[: args.limit]


def _times(args: argparse.Namespace) -> StepTimes:
    return RooflineTimes(_roofline(args)) if args.device else DynamoPolynomial()


def _kv_blocks(args: argparse.Namespace) -> int:
    if not args.device:
        return 16_384
    blocks: int = _roofline(args).kv_capacity_tokens() // int(args.block_size)
    if blocks < 1:
        raise ConfigError(f"{args.model} does not fit on {args.tensor_parallel_size} x {args.device}")
    return blocks


def _roofline(args: argparse.Namespace) -> Roofline:
    return Roofline.named(args.device, args.model, args.tensor_parallel_size)
