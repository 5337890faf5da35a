"""`headwater advise`: how to serve a model on some GPUs: aggregated, split into prefill and decode, or adaptive."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from headwater.bench.traces import read_trace
from headwater.cli.advise_measure import measure
from headwater.cli.console import open_console
from headwater.cli.http import Server
from headwater.cli.parser import advanced, seconds
from headwater.cli.target import add_target, server_of
from headwater.errors import ConfigError
from headwater.perf.aiconfigurator import ENGINES, SiliconSteps
from headwater.perf.curve import StepCurve
from headwater.perf.roofline import DEVICES, MODELS, Roofline
from headwater.planner.objective import Objective
from headwater.planner.pool import WorkerModel
from headwater.planner.whatif import Job
from headwater.sim.advice import Figures, Load, Ranking, capacity, front, synthetic, try_adaptive, try_option
from headwater.sim.advice_page import advice_page
from headwater.sim.options import Layout, Option, layouts
from headwater.sim.reasons import reasons, verdict, where

_LOADS = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Parts of the capacity that are tried when no rate is asked for."""
_MEANT_LOAD = 0.7
_AROUND = (0.4, 0.7, 1.0, 1.2)
"""Times the rate that is asked for, to see how much room is left."""
_REQUESTS = 600
_ADAPTIVE_REQUESTS = 1500
_MEASURE_TIMEOUT_S = 10.0
_SHOWN = 8
_MOST = 0.5
_ADAPTIVE_LAYOUTS = 2
_LEAST_ROOM_REQUESTS = 4
"""Requests that a worker must be able to hold to be worth trying."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hardware = parser.add_argument_group("hardware")
    hardware.add_argument("--model", metavar="NAME", default="llama-3.1-70b-fp8", help=f"one of {', '.join(MODELS)}")
    hardware.add_argument("--device", metavar="NAME", default="h200-sxm", help=f"one of {', '.join(DEVICES)}")
    hardware.add_argument("--gpus", type=int, default=8, metavar="N", help="to divide among workers")
    hardware.add_argument("--silicon", choices=ENGINES, help="step times from measurements under an engine")
    hardware.add_argument(
        "--tensor-parallel-size", type=int, action="append", default=[], metavar="N", help="only these"
    )
    advanced(hardware.add_argument("--max-num-batched-tokens", type=int, default=2048, help="of one step"))
    advanced(hardware.add_argument("--max-num-seqs", type=int, default=256, help="of one worker"))
    advanced(
        hardware.add_argument("--link-gb-per-s", type=float, metavar="X", help="for KV; default: the device's link")
    )
    load = parser.add_argument_group("workload")
    load.add_argument("--trace", type=Path, help="Mooncake JSONL or Azure CSV (.gz); cached prefixes are not counted")
    load.add_argument("--isl", type=int, default=3000, metavar="N", help="prompt tokens")
    load.add_argument("--osl", type=int, default=150, metavar="N", help="answer tokens")
    load.add_argument("--rate", type=float, metavar="X", help="requests a second")
    load.add_argument("--concurrency", type=int, action="append", default=[], metavar="N", help="closed loop instead")
    load.add_argument("--ttft", type=seconds, metavar="TIME", help="objective: time to the first token (500ms)")
    load.add_argument("--tpot", type=seconds, metavar="TIME", help="objective: time per output token (25ms)")
    load.add_argument("--compare", action="append", default=[], metavar="WORKERS", help="also this: 1xTP4P+1xTP4D")
    live = parser.add_argument_group("running cluster")
    live.add_argument("--running", action="store_true", help="simulate the workers that run here, as they have proven")
    live.add_argument("--measure", action="store_true", help="put a short load on the cluster that runs, plan by plan")
    live.add_argument("--seconds", type=float, default=30.0, metavar="X", help="of each load")
    add_target(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="everything, for machines")
    output.add_argument("--html", type=Path, metavar="FILE", help="a report with charts, in one file")


@dataclass(frozen=True, slots=True)
class Advice:
    """What was found for one load."""

    load: str
    best: Figures
    rows: list[Figures]
    """The best ones, the best of each kind, and those to compare."""
    words: list[str]
    everything: list[Figures]


def run(args: argparse.Namespace) -> int:
    objective = Objective(
        inf if args.ttft is None else args.ttft * 1000, inf if args.tpot is None else args.tpot * 1000
    )
    if args.measure:
        return _measure(args, objective)
    if args.running:
        layout, models = _running(server_of(args, _MEASURE_TIMEOUT_S))
        options = list(layout.options())
    else:
        models = _models(args)
        options = _options(args, models)
    compared = [_compared(written, models) for written in args.compare]
    loads = list(_loads(args, options, models))
    found = [_advise(load, options, compared, models, objective) for load in loads]
    meant = _meant(found, args)
    if not args.concurrency:
        load = loads[found.index(meant)]
        found[found.index(meant)] = meant = _with_adaptive(meant, load, options, models, objective)
    everything = [one for advice in found for one in advice.everything]
    if args.html:
        _write(args.html, advice_page(_title(args), meant.words, meant.rows, everything))
    if args.json:
        print(msgspec.json.encode(_document(args, found, meant, everything)).decode())
    else:
        _print(args, found, meant, everything)
    return 0


def _measure(args: argparse.Namespace, objective: Objective) -> int:
    if args.trace is not None or args.seconds <= 0:
        raise ConfigError("--measure takes --isl, --osl, --rate or --concurrency, and --seconds above 0; no trace")
    found = list(measure(args, server_of(args, _MEASURE_TIMEOUT_S), objective))
    best = min(found, key=lambda one: (-round(one.attained * 50) if objective.given else 0, one.e2e_ms))
    if args.json:
        print(msgspec.json.encode({"recommended": best, "plans": found}).decode())
        return 0
    title = f"Measured, {args.isl}/{args.osl}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("roles", "sent", "failed", "met", "goodput/s", "TTFT ms", "TPOT ms", "E2E ms"):
        table.add_column(column, justify="left" if column == "roles" else "right", no_wrap=True)
    for one in found:
        times = (f"{one.ttft_ms:,.0f}", f"{one.tpot_ms:.1f}", f"{one.e2e_ms:,.0f}")
        counts = (str(one.num_requests), str(one.failed), f"{one.attained:.0%}", f"{one.goodput_per_s:.2f}")
        table.add_row(one.name, *counts, *times)
    console = open_console()
    console.print(table)
    console.print(f"Best here: {best.name}. Roles follow the traffic again.", highlight=False)
    return 0


# -- from flags to options and loads


def _models(args: argparse.Namespace) -> dict[int, WorkerModel]:
    """By tensor-parallel size, those that hold the model and a few requests."""
    if args.gpus < 1 or args.isl < 1 or args.osl < 1 or args.max_num_batched_tokens < 16 or args.max_num_seqs < 1:
        raise ConfigError("--gpus, --isl, --osl, --max-num-seqs: at least 1; --max-num-batched-tokens: at least 16")
    sizes = args.tensor_parallel_size or [size for size in (1, 2, 4, 8, 16) if size <= args.gpus]
    needed = _LEAST_ROOM_REQUESTS * (args.isl + args.osl)
    models: dict[int, WorkerModel] = {}
    for size in sorted(set(sizes)):
        roofline = Roofline.named(args.device, args.model, size)
        if roofline.kv_capacity_tokens() >= needed:
            models[size] = _model(args, roofline, size)
    if not models:
        raise ConfigError(f"{args.model} does not fit on {args.gpus} x {args.device} with room for {needed:,} tokens")
    return models


def _model(args: argparse.Namespace, roofline: Roofline, size: int) -> WorkerModel:
    steps = SiliconSteps.named(args.device, args.model, size, args.silicon) if args.silicon else roofline
    return WorkerModel(
        curve=StepCurve.fit(steps),
        kv_tokens=roofline.kv_capacity_tokens(),
        chunk_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        link_bytes_per_ms=(args.link_gb_per_s or roofline.device.link_gb_per_s) * 1e6,
        kv_bytes_per_token=roofline.model.kv_bytes_per_token,
        name=f"TP{size}",
        num_gpus=size,
    )


def _running(server: Server) -> tuple[Layout, dict[int, WorkerModel]]:
    """The workers of the cluster that runs here, by the step times it has learned."""
    believed = server.get_json("/debug/plan")["believed"]
    if len(believed) != 1:
        raise ConfigError(
            f"step times of {len(believed)} models are known at {server.url}, one is needed",
            hint="put some load on it first: step times are learned from what workers report",
        )
    workers = next(iter(believed.values()))
    if len({worker["class"] for worker in workers}) > 1:
        raise ConfigError("the workers that run here are of several classes; name the hardware instead")
    fields = dict(workers[0])
    fields["name"] = fields.pop("class")
    curve = fields.pop("curve")
    curve["knots"] = tuple(map(tuple, curve["knots"]))
    return Layout((0,) * len(workers)), {0: WorkerModel(StepCurve(**curve), **fields)}


def _options(args: argparse.Namespace, models: Mapping[int, WorkerModel]) -> list[Option]:
    found = [option for layout in layouts(args.gpus, sorted(models)) for option in layout.options()]
    if not found:
        raise ConfigError(f"{args.gpus} GPUs cannot be divided into workers of {', '.join(map(str, models))} GPUs")
    return found


def _compared(written: str, models: Mapping[int, WorkerModel]) -> Option:
    option = Option.parse(written)
    missing = [size for size in option.layout.sizes if size not in models]
    if missing:
        raise ConfigError(
            f"--compare {written}: the model does not fit on TP{missing[0]}, or that size was not asked for"
        )
    return option


def _loads(args: argparse.Namespace, options: Sequence[Option], models: Mapping[int, WorkerModel]) -> Iterator[Load]:
    load = _requests(args)
    if args.concurrency:
        if args.rate is not None or min(args.concurrency) < 1:
            raise ConfigError("--concurrency: at least 1, and not together with --rate")
        for concurrency in args.concurrency:
            num = max(_REQUESTS, 8 * concurrency)
            yield Load((list(load.jobs) * (num // len(load.jobs) + 1))[:num], concurrency)
    elif args.rate is not None:
        if args.rate <= 0:
            raise ConfigError(f"--rate {args.rate:g}: more than 0")
        for part in _AROUND:
            yield load.at_rate(part * args.rate)
    else:
        most = capacity([(option, option.layout.pool(models)) for option in options], load)
        for part in _LOADS:
            yield load.at_rate(part * most)


def _requests(args: argparse.Namespace) -> Load:
    if args.trace is None:
        return synthetic(args.isl, args.osl, _ADAPTIVE_REQUESTS)
    rows = sorted(read_trace(args.trace), key=lambda row: row.at_s)[:_ADAPTIVE_REQUESTS]
    if len(rows) < 2:
        raise ConfigError(f"{args.trace} has {len(rows)} requests: too few to say anything")
    start_s = rows[0].at_s
    return Load([Job((row.at_s - start_s) * 1000, max(1, row.input_tokens), max(1, row.output_tokens)) for row in rows])


# -- from options to advice


def _advise(
    load: Load,
    options: Sequence[Option],
    compared: Sequence[Option],
    models: Mapping[int, WorkerModel],
    objective: Objective,
) -> Advice:
    short = load if load.concurrency else Load(load.jobs[:_REQUESTS]).at_rate(load.rate)
    ranking = Ranking(objective)
    tried = {option: try_option(option, option.layout.pool(models), short, objective) for option in options}
    extra = [try_option(option, option.layout.pool(models), short, objective) for option in compared]
    ranked = sorted(tried.values(), key=ranking)
    kinds = [best for kind in ("aggregated", "split") if (best := _first(ranked, kind))]
    rows = list(dict.fromkeys([*ranked[:_SHOWN], *kinds, *extra]))
    best = ranked[0]
    words = list(_words(best, [*kinds, *extra], objective))
    return Advice(short.name, best, sorted(rows, key=ranking), words, [*tried.values(), *extra])


def _with_adaptive(
    advice: Advice,
    load: Load,
    options: Sequence[Option],
    models: Mapping[int, WorkerModel],
    objective: Objective,
) -> Advice:
    """And the planner on the layouts that did best."""
    layouts_by_name = {str(option): option.layout for option in options}
    best = dict.fromkeys([layouts_by_name[row.name] for row in advice.rows if row.name in layouts_by_name])
    several = [layout for layout in best if len(layout.sizes) > 1][:_ADAPTIVE_LAYOUTS]
    adaptive = [try_adaptive(str(layout), layout.pool(models), load, objective) for layout in several]
    words = [f"Roles that follow the traffic: {verdict(one, advice.best, objective)}." for one in adaptive]
    rows = sorted([*advice.rows, *adaptive], key=Ranking(objective))
    return replace(advice, rows=rows, words=[*advice.words, *words], everything=[*advice.everything, *adaptive])


def _first(ranked: Sequence[Figures], kind: str) -> Figures | None:
    return next((one for one in ranked if one.kind == kind), None)


def _words(best: Figures, others: Sequence[Figures], objective: Objective) -> Iterator[str]:
    yield f"Use {best.name} ({best.kind}) at {best.load}."
    if objective.given and best.attained < _MOST:
        yield f"Even so only {best.attained:.0%} of requests would meet the objectives: too much load, or too tight."
    yield f"Where the time goes: {where(best)}."
    for other in dict.fromkeys(others):
        if other.name == best.name:
            continue
        yield f"{verdict(best, other, objective)}."
        yield f"{where(other)}."
        for reason in reasons(best, other, objective):
            yield f"Because: {reason}."


def _meant(found: Sequence[Advice], args: argparse.Namespace) -> Advice:
    """The load to speak of: the one asked for; of several, the last that the best option can still serve well."""
    if args.rate is None and not args.concurrency:
        good = [advice for advice in found if advice.best.attained >= 0.9 and advice.best.keeps_up]
        return good[-1] if good else found[_LOADS.index(_MEANT_LOAD)]
    return found[-1] if args.concurrency else found[_AROUND.index(1.0)]


# -- output


def _title(args: argparse.Namespace) -> str:
    what = args.trace.name if args.trace else f"{args.isl}/{args.osl}"
    times = f"times of {args.silicon} operators" if args.silicon else "times by arithmetic"
    if args.running:
        return f"the cluster that runs here, {what}, times as measured"
    return f"{args.model} on {args.gpus} x {args.device}, {what}, {times}"


def _print(args: argparse.Namespace, found: Sequence[Advice], meant: Advice, everything: Sequence[Figures]) -> None:
    console = open_console()
    for advice in found if args.concurrency else [meant]:
        console.print(_table(f"{_title(args)}, {advice.load}", advice.rows))
        console.print("\n".join(advice.words) + "\n", highlight=False)
    console.print(_front_table(everything))
    if len(found) > 1:
        console.print("Best by load: " + "; ".join(f"{one.load} {one.best.name}" for one in found), highlight=False)


def _table(title: str, rows: Sequence[Figures]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("workers", "met", "goodput/s", "TTFT ms", "p99", "TPOT ms", "E2E ms", "tok/s/GPU", "keeps up"):
        table.add_column(column, justify="left" if column == "workers" else "right", no_wrap=True)
    for one in rows:
        figures = (one.ttft_ms, one.ttft_p99_ms)
        table.add_row(
            one.name,
            f"{one.attained:.0%}",
            f"{one.goodput_per_s:.2f}",
            *[f"{value:,.0f}" for value in figures],
            f"{one.tpot_ms:.1f}",
            f"{one.e2e_ms:,.0f}",
            f"{one.output_tokens_per_s_per_gpu:,.0f}",
            "yes" if one.keeps_up else "no",
        )
    return table


def _front_table(everything: Sequence[Figures]) -> Table:
    title = "Pareto front: no option gives more of both"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("tok/s per user", "tok/s per GPU", "workers", "load"):
        table.add_column(column, justify="left" if column in ("workers", "load") else "right", no_wrap=True)
    for one in front(everything):
        cells = (f"{one.tokens_per_s_per_user:.0f}", f"{one.output_tokens_per_s_per_gpu:,.0f}", one.name, one.load)
        table.add_row(*cells)
    return table


def _document(
    args: argparse.Namespace, found: Sequence[Advice], meant: Advice, everything: Sequence[Figures]
) -> dict[str, object]:
    return {
        "title": _title(args),
        "recommended": meant.best,
        "why": meant.words,
        "by_load": [{"load": advice.load, "best": advice.best, "why": advice.words} for advice in found],
        "pareto": front(everything),
        "options": everything,
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report to {path}: {error.strerror}") from error
