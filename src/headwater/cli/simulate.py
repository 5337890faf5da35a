"""`headwater simulate`: a cluster in virtual time, policies side by side."""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from headwater.cli.parser import advanced, number, seconds
from headwater.errors import ConfigError
from headwater.frontend.policies import load_policy
from headwater.perf.aiconfigurator import ENGINES, SYSTEMS, SiliconSteps
from headwater.perf.model import PerfState, StepModel
from headwater.perf.prior import LinearSteps
from headwater.perf.roofline import DEVICES, MODELS, Roofline
from headwater.router.disagg import MODES, DisaggSettings
from headwater.router.policies import BUILTIN
from headwater.runtime.parent import die_with_parent
from headwater.sim.cluster import SimConfig
from headwater.sim.conditions import Conditions
from headwater.sim.handoffs import KvLink, PoolConfig
from headwater.sim.mixes import MIXES, Mix
from headwater.sim.page import Outcome, page
from headwater.sim.report import SimReport, cells, columns
from headwater.sim.run import Load, Routing, SimRun
from headwater.sim.scenarios import SCENARIOS, Scenario
from headwater.sim.tiers import TierConfig, TierSpec
from headwater.sim.timing import Belief, DynamoPolynomial, PredictedTimes, SiliconTimes, StepTimes

_DEFAULT_BLOCKS = 16_384
_TIER_HELP = "KV beside the engines' own, nearest first: host:512GiB@50GB/s, disk:8TiB@6GB/s+1ms, object:..."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    traces = "a recorded log, Mooncake JSONL or Azure CSV (.gz)"
    load.add_argument("--trace", type=Path, action="append", default=[], help=traces)
    load.add_argument("--mix", action="append", default=[], metavar="NAME", help=f"synthetic: {', '.join(MIXES)}")
    load.add_argument("--scenario", choices=sorted(SCENARIOS), help="load, cluster and policies by one name")
    load.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    load.add_argument("--speed", type=number, action="append", default=[], metavar="X", help="arrivals X times faster")
    load.add_argument("--closed", type=int, action="append", default=[], metavar="N", help="closed loop, N per worker")
    load.add_argument("--seed", type=int, default=0, help="of synthetic mixes")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--workers", type=int, action="append", default=[], metavar="N", help="may be repeated")
    cluster.add_argument("--device", metavar="NAME", help=f"step times by arithmetic: {', '.join(DEVICES)}")
    cluster.add_argument("--model", metavar="NAME", default="llama-3.1-70b-fp8", help=f"one of {', '.join(MODELS)}")
    cluster.add_argument("--tensor-parallel-size", type=int, default=1)
    cluster.add_argument("--silicon", choices=ENGINES, help="step times of --device from measurements under an engine")
    cluster.add_argument("--fitted", type=Path, metavar="FILE", help="step times learned by a real cluster (JSON)")
    cluster.add_argument("--num-kv-blocks", type=int, help="per worker; default: 16,384, or what the hardware holds")
    cluster.add_argument("--block-size", type=int, default=64)
    cluster.add_argument("--kv-tier", action="append", default=[], metavar="TIER", help=_TIER_HELP)
    cluster.add_argument("--workers-per-node", type=int, default=8, metavar="N", help="that share host and disk tier")
    cluster.add_argument("--max-num-seqs", type=int, default=256)
    cluster.add_argument("--max-num-batched-tokens", type=int, default=8192)
    _add_pools(parser.add_argument_group("pools"))
    router = parser.add_argument_group("router")
    names = f"{', '.join(BUILTIN)}; NAME@0.5: that share of decode time counts; NAME+queue: behind the queue; `all`"
    router.add_argument("--policy", action="append", default=[], metavar="NAME", help=names)
    _add_conditions(parser.add_argument_group("disturbances"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object per line and run")
    output.add_argument("--html", type=Path, metavar="FILE", help="a report with charts, in one file")
    output.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the runs")


def _add_pools(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefill", type=int, action="append", default=[], metavar="N", help="workers that only prefill, ..."
    )
    group.add_argument(
        "--decode", type=int, action="append", default=[], metavar="M", help="... for so many that decode; in pairs"
    )
    routed = "which prompts go to prefill workers: those for which it pays, all, none, long ones"
    group.add_argument("--disagg", choices=MODES, default="plan", help=routed)
    long = "with threshold: tokens left to compute from which on a prompt goes"
    advanced(group.add_argument("--disagg-threshold", type=int, default=512, metavar="N", help=long))
    link = "speed of KV between workers; 0: in no time"
    group.add_argument("--link-gb-per-s", type=number, default=25.0, metavar="X", help=link)
    late = "of every word and every read between workers (1ms)"
    group.add_argument("--link-latency", type=seconds, default=0.001, metavar="TIME", help=late)
    believed = "what the router believes of that speed, for its prices"
    advanced(group.add_argument("--transfer-gb-per-s", type=number, default=10.0, metavar="X", help=believed))


def _add_conditions(group: argparse._ArgumentGroup) -> None:
    def add(name: str, what: str, kind: Callable[[str], float | int] = number, default: float = 0.0) -> None:
        advanced(group.add_argument(name, type=kind, default=kind(str(default)) if kind is int else default, help=what))

    add("--event-delay", "the router learns of everything so late (50ms)", seconds)
    add("--speed-gap", "half of the workers are slower by this part, half faster (0.1)")
    add("--reported-gap", "they only report such step times")
    advanced(
        group.add_argument("--known-times", action="store_true", help="the router knows the step times, learns nothing")
    )
    add("--prefill-error", "with --known-times: its prefill times are wrong by this part")
    add("--decode-error", "the same for decode times")
    add("--boasting", "so many workers report to be idle and fast", int, 0)
    add("--late", "so many workers join, cold, at --join-at", int, 0)
    add("--join-at", "when (60s)", seconds)


def run(args: argparse.Namespace) -> int:
    scenario = _staged(args) if args.scenario else None
    runs = list(_runs(args))
    if args.html:
        _check_writable(args.html)
    outcomes = list(_executed(runs, args))
    if not args.json:
        console = Console()
        for _, group in groupby([report for report, _ in outcomes], key=_cell):
            console.print(_table(list(group)))
        if scenario is not None:
            lines = scenario.comparison([report for report, _ in outcomes])
            console.print("\n".join([scenario.summary, *lines, scenario.published]), highlight=False)
    if args.html:
        args.html.write_text(page(outcomes), encoding="utf-8")
    return 0


def _check_writable(path: Path) -> None:
    """Before hours of simulation. Raises `ConfigError`."""
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"cannot write the report to {path}: {error.strerror}") from error


def execute(one: SimRun) -> Outcome:
    """One run, in whichever process."""
    return one.execute(load_policy(one.routing.policy, one.routing.settings))


def _executed(runs: Sequence[SimRun], args: argparse.Namespace) -> Iterator[Outcome]:
    """Outcomes in order, printed as they come if JSON is wanted."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("simulating", total=len(runs))
        for outcome in _pooled(runs, args.jobs) if args.jobs > 1 else map(execute, runs):
            progress.advance(task)
            if args.json:
                print(msgspec.json.encode(outcome[0]).decode(), flush=True)
            yield outcome


def _pooled(runs: Sequence[SimRun], jobs: int) -> Iterator[Outcome]:
    # A forked child would inherit the display's thread in mid-stride.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(runs)), context, die_with_parent, (os.getpid(),)) as pool:
        yield from pool.map(execute, runs)


def _table(reports: Sequence[SimReport]) -> Table:
    first = reports[0]
    title = f"{first.trace}, {first.workers} workers, {first.mode}: reuse up to {first.ceiling:.1%} is possible"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns(first):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for report in reports:
        table.add_row(*cells(report))
    return table


def _cell(report: SimReport) -> tuple[str, int, str]:
    return report.trace, report.workers, report.mode


# -- from flags to runs


def _staged(args: argparse.Namespace) -> Scenario:
    """Let a scenario speak for the flags of load, cluster and router."""
    own = (args.trace, args.mix, args.speed, args.closed, args.workers, args.prefill, args.device, args.policy)
    if any(own):
        raise ConfigError(f"--scenario {args.scenario} brings its own load, cluster and policies")
    scenario = SCENARIOS[args.scenario]
    args.speed, args.closed, args.workers = [*scenario.speeds], [*scenario.closed], [scenario.workers]
    args.device, args.model, args.tensor_parallel_size = scenario.device, scenario.model, scenario.tensor_parallel
    args.policy = [scenario.baseline, scenario.policy]
    return scenario


def _runs(args: argparse.Namespace) -> Iterator[SimRun]:
    policies = [*BUILTIN, "delay+queue"] if args.policy == ["all"] else args.policy or ["delay"]
    routings = [Routing.parse(policy) for policy in policies]
    for routing in routings:
        load_policy(routing.policy, routing.settings)
    times, sizes = _times(args), list(_sizes(args))
    for load in _loads(args):
        for workers, pools in sizes:
            for config in _configs(args, workers, pools):
                for routing in routings:
                    yield SimRun(load, config, times, routing)


def _sizes(args: argparse.Namespace) -> Iterator[tuple[int, PoolConfig | None]]:
    """Workers that do both, and pools."""
    if len(args.prefill) != len(args.decode):
        raise ConfigError("--prefill and --decode come in pairs", hint="for example --prefill 2 --decode 6")
    for workers in args.workers or ([] if args.prefill else [8]):
        yield workers, None
    for prefill, decode in zip(args.prefill, args.decode, strict=True):
        if min(prefill, decode) < 1:
            raise ConfigError(f"--prefill {prefill} --decode {decode}: at least 1 of each")
        yield prefill + decode, _pools(args, prefill, decode)


def _pools(args: argparse.Namespace, prefill: int, decode: int) -> PoolConfig:
    if args.link_gb_per_s < 0 or args.transfer_gb_per_s <= 0 or args.disagg_threshold < 0:
        raise ConfigError("--link-gb-per-s and --disagg-threshold: 0 or more; --transfer-gb-per-s: more than 0")
    believed = DisaggSettings(args.disagg, args.disagg_threshold, args.transfer_gb_per_s * 1e6)
    link = KvLink(args.link_gb_per_s * 1e9, args.link_latency)
    return PoolConfig(prefill, decode, round(_kv_bytes_per_token(args)), believed, link)


def _configs(args: argparse.Namespace, workers: int, pools: PoolConfig | None) -> Iterator[SimConfig]:
    _check_counts(args, workers)
    config = SimConfig(
        num_workers=workers,
        block_size=args.block_size,
        num_blocks=args.num_kv_blocks or _kv_blocks(args),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        conditions=_conditions(args),
        tiers=_tiers(args),
        pools=pools,
    )
    for speed in args.speed or ([] if args.closed else [1.0]):
        if speed <= 0:
            raise ConfigError(f"--speed {speed:g}: more than 0")
        yield replace(config, arrival_speed=speed)
    for in_flight in args.closed:
        yield replace(config, in_flight_per_worker=in_flight)


def _check_counts(args: argparse.Namespace, workers: int) -> None:
    given = [("--workers", workers), ("--jobs", args.jobs), ("--block-size", args.block_size), ("--limit", args.limit)]
    nodes = [("--num-kv-blocks", args.num_kv_blocks), ("--workers-per-node", args.workers_per_node)]
    for flag, value in [*given, *nodes, *[("--closed", in_flight) for in_flight in args.closed]]:
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value}: at least 1")
    for flag, value in [("--late", args.late), ("--boasting", args.boasting)]:
        if value < 0:
            raise ConfigError(f"{flag} {value}: 0 or more")
    if args.late >= workers:
        raise ConfigError(f"--late {args.late}: of {workers} workers one must be there from the start")


def _tiers(args: argparse.Namespace) -> TierConfig:
    block_bytes = round(_kv_bytes_per_token(args) * args.block_size)
    return TierConfig(tuple(map(TierSpec.parse, args.kv_tier)), block_bytes, args.workers_per_node)


def _kv_bytes_per_token(args: argparse.Namespace) -> float:
    """Those of --model, over all its devices."""
    if args.model not in MODELS:
        raise ConfigError(f"no figures for the model {args.model!r}", hint=f"one of {', '.join(MODELS)}")
    return MODELS[args.model].kv_bytes_per_token


def _conditions(args: argparse.Namespace) -> Conditions:
    if not 0 <= args.speed_gap < 1 or not 0 <= args.reported_gap < 1:
        raise ConfigError("--speed-gap and --reported-gap: from 0 to less than 1, a part by which steps are longer")
    if min(args.prefill_error, args.decode_error) <= -1:
        raise ConfigError("--prefill-error and --decode-error: more than -1, a part by which times are wrong")
    if (args.prefill_error or args.decode_error) and not args.known_times:
        raise ConfigError("--prefill-error and --decode-error need --known-times: a router that learns corrects itself")
    return Conditions(
        event_delay_s=args.event_delay,
        belief=Belief(args.prefill_error, args.decode_error) if args.known_times else None,
        speed_gap=args.speed_gap,
        reported_gap=args.reported_gap,
        boasting_workers=args.boasting,
        late_workers=args.late,
        join_at_s=args.join_at,
    )


def _loads(args: argparse.Namespace) -> Iterator[Load]:
    if args.scenario:
        yield Load(SCENARIOS[args.scenario].mix, args.block_size, args.limit, args.seed)
        return
    for path in args.trace:
        yield Load(path, args.block_size, args.limit)
    for name in args.mix if args.trace or args.mix else ["rag"]:
        yield Load(_mix(name), args.block_size, args.limit, args.seed)


def _mix(name: str) -> Mix:
    if name not in MIXES:
        raise ConfigError(f"no mix is called {name!r}", hint=f"known: {', '.join(MIXES)}")
    return MIXES[name]


def _times(args: argparse.Namespace) -> StepTimes:
    if args.fitted:
        return PredictedTimes(LinearSteps(_fitted(args.fitted)))
    if args.silicon:
        if not args.device:
            raise ConfigError("--silicon needs --device", hint=f"one of {', '.join(SYSTEMS)}")
        SiliconSteps.named(args.device, args.model, args.tensor_parallel_size, args.silicon)
        return SiliconTimes(args.device, args.model, args.tensor_parallel_size, args.silicon)
    return PredictedTimes(_roofline(args)) if args.device else DynamoPolynomial()


def _fitted(path: Path) -> tuple[float, ...]:
    try:
        state = msgspec.json.decode(path.read_bytes(), type=PerfState)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read step times from {path}: {error}") from error
    if len(state.steps) != 1:
        raise ConfigError(f"{path} has step times of {len(state.steps)} classes of workers, one is needed")
    model = StepModel()
    model.merge(next(iter(state.steps.values())))
    return model.coefficients


def _kv_blocks(args: argparse.Namespace) -> int:
    if not args.device:
        return _DEFAULT_BLOCKS
    blocks: int = _roofline(args).kv_capacity_tokens() // int(args.block_size)
    if blocks < 1:
        raise ConfigError(f"{args.model} does not fit on {args.tensor_parallel_size} x {args.device}")
    return blocks


def _roofline(args: argparse.Namespace) -> Roofline:
    return Roofline.named(args.device, args.model, args.tensor_parallel_size)
