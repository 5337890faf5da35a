"""`headwater bench serve`: put a load on any OpenAI-compatible server and say how it held."""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headwater.bench.arrivals import Arrivals, ClosedLoop, Poisson, TraceTimes
from headwater.bench.http_client import Connection, ResponseSink, Target
from headwater.bench.load import LoadRun, RequestRecord, RequestShape
from headwater.bench.process_cpu import tree_usage
from headwater.bench.report import Report, Slo, summarise, tables
from headwater.bench.traces import TraceWorkload
from headwater.bench.workload import LoadRequest, SyntheticWorkload, Workload, words
from headwater.errors import ConfigError, HeadwaterError, WorkerLost

_CALIBRATION_WORDS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headwater bench serve`."""
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="base URL (default %(default)s)")
    server.add_argument("--model", help="model name (default: the first of /v1/models)")
    server.add_argument("--api-key", help="sent as a bearer token")
    server.add_argument("--api", choices=("chat", "completions"), default="chat")
    server.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="added to each request")
    load = parser.add_argument_group("load")
    load.add_argument("--num-requests", type=int, default=200)
    load.add_argument("--concurrency", type=int, help="users of the closed loop; with --rate a cap on in-flight")
    load.add_argument("--rate", type=float, metavar="PER_S", help="Poisson arrivals instead of a closed loop")
    load.add_argument("--trace", type=Path, help="replay a Mooncake JSONL or Azure CSV trace (may be .gz)")
    load.add_argument("--speed", type=float, default=1.0, help="trace replay: times faster")
    load.add_argument("--length-scale", type=float, default=1.0, help="trace replay: lengths multiplied by this")
    load.add_argument("--input-tokens", type=int, default=128)
    load.add_argument("--output-tokens", type=int, default=64)
    load.add_argument("--prefix-tokens", type=int, default=0, help="leading tokens shared between prompts")
    load.add_argument("--num-prefixes", type=int, default=1)
    load.add_argument("--stop-at-eos", action="store_true", help="let the model end early (default: ignore_eos)")
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--warmup", type=int, default=4, metavar="REQUESTS", help="sent before the clock starts")
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="per request")
    slo = parser.add_argument_group("goodput: a request is good within all limits given")
    slo.add_argument("--slo-ttft-ms", type=float)
    slo.add_argument("--slo-tpot-ms", type=float)
    slo.add_argument("--slo-e2e-ms", type=float)
    output = parser.add_argument_group("output")
    output.add_argument("--pid", type=int, action="append", default=[], help="also report CPU of this process tree")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    output.add_argument("--output", type=Path, help="also write the JSON here")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when every request was answered, 1 when some failed."""
    report = uvloop.run(_run(args))
    encoded = msgspec.json.format(msgspec.json.encode(report))
    if args.output is not None:
        args.output.write_bytes(encoded + b"\n")
    if args.json:
        sys.stdout.write(encoded.decode() + "\n")
    else:
        console = Console()
        for table in tables(report):
            console.print(table)
    return 0 if report.failed == 0 else 1


async def _run(args: argparse.Namespace) -> Report:
    target = Target.parse(args.url, args.api_key)
    shape = RequestShape(
        model=args.model or await first_model(target),
        api=args.api,
        ignore_eos=not args.stop_at_eos,
        temperature=args.temperature,
        extra_body=args.extra_body,
    )
    load = LoadRun(target, shape, timeout_s=args.timeout)
    try:
        words_per_token = await _calibrate(load, args.seed)
        requests = list(_workload(args).requests(words_per_token))
        await _warm_up(load, args, words_per_token)
        before = {pid: tree_usage(pid) for pid in args.pid}
        started = time.perf_counter()
        records = await _with_progress(load, requests, _arrivals(args))
        duration_s = time.perf_counter() - started
        usage = {pid: (before[pid], tree_usage(pid)) for pid in args.pid}
    finally:
        load.close()
    return summarise(records, duration_s, Slo(args.slo_ttft_ms, args.slo_tpot_ms, args.slo_e2e_ms), usage)


def _workload(args: argparse.Namespace) -> Workload:
    if args.trace is not None:
        return TraceWorkload(args.trace, args.num_requests, args.speed, args.length_scale)
    if args.prefix_tokens >= args.input_tokens:
        raise ConfigError(f"--prefix-tokens {args.prefix_tokens} must be below --input-tokens {args.input_tokens}")
    return SyntheticWorkload(
        args.num_requests, args.input_tokens, args.output_tokens, args.prefix_tokens, args.num_prefixes, args.seed
    )


def _arrivals(args: argparse.Namespace) -> Arrivals:
    if args.trace is not None:
        return TraceTimes(args.concurrency)
    if args.rate is not None:
        return Poisson(args.rate, args.seed, args.concurrency)
    return ClosedLoop(args.concurrency or 16)


async def _calibrate(load: LoadRun, seed: int) -> float:
    """Words per prompt token, from the usage of two prompts of different length (the template cancels out)."""
    lengths = (_CALIBRATION_WORDS, 3 * _CALIBRATION_WORDS)
    tokens: list[int] = []
    for count in lengths:
        record = await load.send_one(LoadRequest(words(_random(seed, f"calibrate/{count}"), count), 1))
        if record.error is not None:
            raise WorkerLost(f"the first request failed: {record.error}")
        tokens.append(record.prompt_tokens)
    grown = tokens[1] - tokens[0]
    return (lengths[1] - lengths[0]) / grown if grown > 0 else 1.0


async def _warm_up(load: LoadRun, args: argparse.Namespace, words_per_token: float) -> None:
    count = max(1, round(args.input_tokens * words_per_token))
    for number in range(args.warmup):
        await load.send_one(LoadRequest(words(_random(args.seed, f"warm/{number}"), count), args.output_tokens))


async def _with_progress(load: LoadRun, requests: Iterable[LoadRequest], arrivals: Arrivals) -> list[RequestRecord]:
    requests = list(requests)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("requests", total=len(requests), failed=0)
        failed = 0

        def on_record(record: RequestRecord) -> None:
            nonlocal failed
            failed += record.error is not None
            progress.update(task, advance=1, failed=failed)

        return await load.run(requests, arrivals, on_record)


async def first_model(target: Target) -> str:
    """Name of the first model the server lists."""
    body = bytearray()

    class Collect(ResponseSink):
        def on_data(self, data: bytes, at_s: float) -> None:
            body.extend(data)

    connection = await Connection.open(target, 10.0)
    try:
        status = await connection.request(target.head("GET", "/v1/models", 0), b"", Collect(), 10.0)
    finally:
        connection.close()
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HeadwaterError(f"/v1/models names no model (HTTP {status}); give --model") from error


def _random(seed: int, purpose: str) -> Random:
    return Random(f"{seed}/{purpose}")
