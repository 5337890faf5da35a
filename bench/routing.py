"""Routing policies in the simulator, beside the figures they have to reach.

    python bench/routing.py cells  TRACE[:ROWS] ... [--workers 4 8 64] [--policy ...]
    python bench/routing.py robust TRACE[:ROWS] ...
    python bench/routing.py ablation TRACE[:ROWS] ... [--without even_crowd successors ...]
    python bench/routing.py capacity TRACE[:ROWS]
    python bench/routing.py scaling [--workers 8 64 1000]
    python bench/routing.py mixes
    python bench/routing.py large [--workers 1000]

TRACE is a Mooncake JSONL file; targets are known for those whose name contains `synthetic` or `conversation` (all rows
of the first, 4,000 of the second). Loads are multiples of the constant one, at which arrivals are sped up by
workers / 4. Step times are those of the mocker of NVIDIA Dynamo 1.6; the router learns them. `--json FILE` keeps every
run. Targets come from a study of delay pricing in another simulator: each is what its prototype reached, less 1 to 3 %.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

import msgspec

from headwater.cli.simulate import execute
from headwater.router.delay import Delay
from headwater.router.policies import BUILTIN
from headwater.router.price import END_TO_END, Profile
from headwater.sim.cluster import SimConfig
from headwater.sim.conditions import Conditions
from headwater.sim.mixes import MIXES, Mix
from headwater.sim.page import Outcome, page
from headwater.sim.report import SimReport
from headwater.sim.run import Load, Routing, SimRun
from headwater.sim.timing import Belief, DynamoPolynomial

OURS = "delay"
POLICIES = (OURS, "delay+queue", "delay@0", *[name for name in BUILTIN if name != OURS])
SATURATED = "closed16"


@dataclass(frozen=True)
class Target:
    """What a policy's figure must reach in one cell."""

    kind: str
    workers: int
    mode: str
    field: str
    limit: float
    """At least that for hit rates and throughput, at most for times."""
    policy: str = OURS

    def met(self, value: float) -> bool:
        return value >= self.limit if self.field in ("hit_rate", "output_tok_s") else value <= self.limit


def _targets() -> Iterator[Target]:
    """(kind, workers, mode): (hit rate, mean TTFT, mean E2E, output tok/s), None where nothing is asked."""
    cells = {
        ("synthetic", 8, "x1"): (0.525, 183, 1190, None),
        ("synthetic", 8, "x3"): (None, 240, 2400, None),
        ("synthetic", 8, "x4"): (None, None, 9000, 4600),
        ("synthetic", 8, SATURATED): (0.50, 345, None, 4600),
        ("synthetic", 4, "x1"): (0.38, 233, 1320, None),
        ("synthetic", 4, "x3"): (None, None, 4700, None),
        ("synthetic", 4, SATURATED): (None, 375, None, 1930),
        ("synthetic", 64, "x1"): (0.645, 142, 1115, None),
        ("synthetic", 64, "x3"): (None, None, 1700, None),
        ("synthetic", 64, SATURATED): (0.64, None, 3150, None),
        ("conversation", 8, "x1"): (0.25, 288, 3380, None),
        ("conversation", 8, "x2"): (0.25, 330, 5900, None),
        ("conversation", 8, SATURATED): (0.25, 345, None, 4900),
        ("conversation", 4, "x1"): (0.17, 425, 3740, None),
        ("conversation", 4, SATURATED): (None, None, None, 2400),
        ("conversation", 64, "x1"): (0.32, 226, 3000, None),
        ("conversation", 64, "x2"): (0.325, 245, 4300, None),
    }
    fields = ("hit_rate", "ttft_ms_mean", "e2e_ms_mean", "output_tok_s")
    for cell, limits in cells.items():
        for field, limit in zip(fields, limits, strict=True):
            if limit is not None:
                yield Target(*cell, field, limit)
    yield Target("synthetic", 8, "x3", "itl_ms_mean", 15)
    yield Target("synthetic", 8, "x4", "ttft_ms_mean", 650, "delay+queue")
    yield Target("synthetic", 8, "x4", "e2e_ms_mean", 9000, "delay+queue")
    yield Target("synthetic", 8, SATURATED, "ttft_ms_p99", 2200, "delay+queue")
    yield Target("synthetic", 8, "x1", "ttft_ms_mean", 175, "delay@0")
    yield Target("synthetic", 8, SATURATED, "ttft_ms_mean", 300, "delay@0")


TARGETS = list(_targets())
MULTIPLES = {"synthetic": (1.0, 3.0, 4.0), "conversation": (1.0, 2.0)}


@dataclass(frozen=True)
class Job:
    """A run and what to call it."""

    run: SimRun
    mode: str
    label: str
    weights: Profile | None = None
    """Others than those of the policy."""

    def execute(self) -> Outcome:
        report, curves = execute(self.run) if self.weights is None else self.run.execute(Delay(weights=self.weights))
        return msgspec.structs.replace(report, mode=self.mode, policy=self.label), curves


def kind_of(name: str) -> str:
    return next((kind for kind in MULTIPLES if kind in name), "other")


def load_of(given: str) -> Load:
    path, _, rows = given.partition(":")
    return Load(Path(path), 64, int(rows) if rows else None)


def modes_of(load: Load, workers: int) -> Iterator[tuple[str, SimConfig]]:
    for multiple in MULTIPLES.get(kind_of(load.name), (1.0, 2.0)):
        yield f"x{multiple:g}", SimConfig(workers, arrival_speed=multiple * workers / 4)
    yield SATURATED, SimConfig(workers, in_flight_per_worker=16)


# -- sections


def cells(args: argparse.Namespace) -> Iterator[Job]:
    for load in map(load_of, args.traces):
        for workers in args.workers or (4, 8, 64):
            for mode, config in modes_of(load, workers):
                if args.mode and mode not in args.mode:
                    continue
                for policy in args.policy or POLICIES:
                    yield Job(SimRun(load, config, DynamoPolynomial(), Routing.parse(policy)), mode, policy)


def ablation(args: argparse.Namespace) -> Iterator[Job]:
    """What each part of the price is worth: without it."""
    parts = args.without or [field.name for field in fields(Profile) if field.name != "home_ms"]
    for load in map(load_of, args.traces):
        for workers in args.workers or (8,):
            for mode, config in modes_of(load, workers):
                if args.mode and mode not in args.mode:
                    continue
                run = SimRun(load, config, DynamoPolynomial(), Routing(OURS))
                yield Job(run, mode, OURS)
                for part in parts:
                    yield Job(run, mode, f"- {part}", replace(END_TO_END, **{part: 0.0}))


def robust(args: argparse.Namespace) -> Iterator[Job]:
    conditions = {
        "none": Conditions(),
        "times known": Conditions(belief=Belief()),
        "both +30 %": Conditions(belief=Belief(0.3, 0.3)),
        "both -30 %": Conditions(belief=Belief(-0.3, -0.3)),
        "prefill +30 %": Conditions(belief=Belief(0.3, 0.0)),
        "prefill -30 %": Conditions(belief=Belief(-0.3, 0.0)),
        "decode +30 %": Conditions(belief=Belief(0.0, 0.3)),
        "decode -30 %": Conditions(belief=Belief(0.0, -0.3)),
        "prefill +, decode -": Conditions(belief=Belief(0.3, -0.3)),
        "prefill -, decode +": Conditions(belief=Belief(-0.3, 0.3)),
        "50 ms late": Conditions(event_delay_s=0.05),
        "200 ms late": Conditions(event_delay_s=0.2),
        "really +-5 %": Conditions(speed_gap=0.05),
        "really +-10 %": Conditions(speed_gap=0.1),
        "reported +-5 %": Conditions(reported_gap=0.05),
        "reported +-10 %": Conditions(reported_gap=0.1),
        "one boasts": Conditions(boasting_workers=1),
    }
    for load in map(load_of, args.traces):
        for workers in args.workers or (8,):
            for mode, config in modes_of(load, workers):
                if mode == "x4" or (args.mode and mode not in args.mode):
                    continue
                for label, condition in conditions.items():
                    run = SimRun(load, replace(config, conditions=condition), DynamoPolynomial(), Routing(OURS))
                    yield Job(run, mode, label)


def mixes(args: argparse.Namespace) -> Iterator[Job]:
    """Loads that no weight was chosen by."""
    for mix in MIXES.values():
        load = Load(mix, 64, args.rows, args.seed)
        for mode, config in (
            ("x1", SimConfig(8)),
            ("x4", SimConfig(8, arrival_speed=4.0)),
            (SATURATED, SimConfig(8, in_flight_per_worker=16)),
        ):
            for policy in args.policy or POLICIES:
                yield Job(SimRun(load, config, DynamoPolynomial(), Routing.parse(policy)), mode, policy)


def scaling(args: argparse.Namespace) -> Iterator[Job]:
    """As much load per worker, whatever their number; throughput is that of the steady state."""
    for workers in args.workers or (8, 64, 256):
        mix = _even_mix(workers, 40)
        for mode, config in (
            ("open", SimConfig(workers, num_blocks=4096)),
            (SATURATED, SimConfig(workers, num_blocks=4096, in_flight_per_worker=16)),
        ):
            for policy in args.policy or ("round_robin", OURS):
                yield Job(SimRun(Load(mix, 64), config, DynamoPolynomial(), Routing.parse(policy)), mode, policy)


def large(args: argparse.Namespace) -> Iterator[Job]:
    """What it costs to simulate a cluster that nobody has under the desk."""
    for workers in args.workers or (1000,):
        config = SimConfig(workers, num_blocks=4096)
        for policy in args.policy or ("round_robin", OURS):
            run = SimRun(Load(_even_mix(workers, 8), 64), config, DynamoPolynomial(), Routing.parse(policy))
            yield Job(run, "open", policy)


def _even_mix(workers: int, rows_per_worker: int) -> Mix:
    rows = rows_per_worker * workers
    return Mix("rag", rows, 1.0 * workers, 2 * workers, 3000, 3, 150, 150, 8.0, document_tokens=1500)


def capacity(args: argparse.Namespace) -> Iterator[Job]:
    for load in map(load_of, args.traces):
        for tenth in range(*((20, 38) if kind_of(load.name) == "synthetic" else (7, 28))):
            config = SimConfig(8, arrival_speed=tenth / 10 * 2)
            for policy in args.policy or (OURS, "delay@0", "dynamo", "llmd", "preble", "sglang_cache_aware"):
                yield Job(SimRun(load, config, DynamoPolynomial(), Routing.parse(policy)), f"x{tenth / 10:g}", policy)


# -- tables


COLUMNS = (
    ("hit", "hit_rate", "{:.1%}"),
    ("TTFT", "ttft_ms_mean", "{:,.0f}"),
    ("p99", "ttft_ms_p99", "{:,.0f}"),
    ("ITL", "itl_ms_mean", "{:,.1f}"),
    ("E2E", "e2e_ms_mean", "{:,.0f}"),
    ("p99", "e2e_ms_p99", "{:,.0f}"),
    ("tok/s", "output_tok_s", "{:,.0f}"),
    ("busiest", "imbalance", "{:.2f}"),
    ("prefill", "prefill_imbalance", "{:.2f}"),
)


def print_cell(reports: Sequence[SimReport]) -> None:
    first = reports[0]
    print(f"\n{first.trace}, {first.workers} workers, {first.mode}, ceiling {first.ceiling:.1%}")
    print(f"  {'':22}" + "".join([f"{title:>9}" for title, *_ in COLUMNS]))
    for report in reports:
        values = [form.format(getattr(report, field)) for _, field, form in COLUMNS]
        print(f"  {report.policy:22}" + "".join([f"{value:>9}" for value in values]))


def print_targets(reports: Sequence[SimReport]) -> None:
    by_policy = {report.policy: report for report in reports}
    first = reports[0]
    for target in TARGETS:
        if (target.kind, target.workers, target.mode) != (kind_of(first.trace), first.workers, first.mode):
            continue
        if target.policy in by_policy:
            value = getattr(by_policy[target.policy], target.field)
            digits = 3 if target.field == "hit_rate" else 0
            verdict(target.met(value), f"{target.policy} {target.field} {value:,.{digits}f}, wanted {target.limit:,g}")
    print_against_baselines(by_policy)


def print_against_baselines(by_policy: dict[str, SimReport]) -> None:
    ours = by_policy.get(OURS)
    others = [report for policy, report in by_policy.items() if policy in BUILTIN and policy != OURS]
    if ours is None or not others:
        return
    best = min(others, key=lambda report: report.e2e_ms_mean)
    gap = ours.e2e_ms_mean / best.e2e_ms_mean - 1
    verdict(
        gap < 0,
        f"E2E {ours.e2e_ms_mean:,.0f} against the best baseline's, {best.policy} {best.e2e_ms_mean:,.0f}: {gap:+.1%}",
    )
    if ours.mode == SATURATED:
        fastest = max(others, key=lambda report: report.output_tok_s)
        gap = ours.output_tok_s / fastest.output_tok_s - 1
        verdict(gap > 0, f"throughput against the best baseline's, {fastest.policy}: {gap:+.1%}")
    dynamo = by_policy.get("dynamo")
    if dynamo is not None and ours.mode == SATURATED:
        gap = ours.e2e_ms_p99 / dynamo.e2e_ms_p99 - 1
        verdict(gap <= 0, f"p99 E2E against the dynamo baseline's: {gap:+.1%}")


def print_losses(reports: Sequence[SimReport]) -> None:
    """What each disturbance costs. Errors of a known model are held against that model."""
    by_label = {report.policy: report for report in reports}
    for label, report in by_label.items():
        known = "30 %" in label or "prefill" in label
        base = by_label["times known" if known else "none"]
        slower, less = report.e2e_ms_mean / base.e2e_ms_mean - 1, 1 - report.output_tok_s / base.output_tok_s
        said = f"{label}: E2E {slower:+.1%}, throughput {-less:+.1%}"
        if known:
            verdict(slower <= 0.035, f"{said}, E2E may lose 3.5 %")
        elif label == "50 ms late":
            verdict(slower <= 0.01, f"{said}, E2E may lose 1 %")
        elif "10 %" in label and report.mode == SATURATED:
            verdict(less <= 0.05, f"{said}, throughput may lose 5 %")
        elif "10 %" in label and report.mode == "x1":
            verdict(slower <= 0.15, f"{said}, E2E may lose 15 %")


def print_scaling(reports: Sequence[SimReport]) -> None:
    """In the open loop throughput is what is offered: only waiting times say anything."""
    for key, group in groupby(sorted(reports, key=lambda r: (r.mode, r.policy)), key=lambda r: (r.mode, r.policy)):
        first, *others = sorted(group, key=lambda report: report.workers)
        for other in others:
            linear = other.steady_tok_s / first.steady_tok_s * first.workers / other.workers
            later = other.ttft_ms_p99 / first.ttft_ms_p99 - 1
            said = f"{key[1]}, {key[0]}: {first.workers} -> {other.workers} workers: p99 TTFT {later:+.1%}"
            if other.mode == SATURATED:
                verdict(linear >= 0.95 and later <= 0, f"{said}, {linear:.1%} of linear throughput")
            else:
                verdict(later <= 0, said)


def print_cost(reports: Sequence[SimReport]) -> None:
    for report in reports:
        cpu_s = report.requests / report.sim_requests_per_min * 60
        print(f"  {report.policy}: {report.requests:,} requests to {report.workers:,} workers in {cpu_s:.1f} s of CPU")


def print_capacity(reports: Sequence[SimReport]) -> None:
    """The largest load within the limits, and all smaller ones too."""
    ttft_ms, itl_ms = (300, 20) if kind_of(reports[0].trace) == "synthetic" else (350, 20)
    print(f"\n{reports[0].trace}: mean TTFT <= {ttft_ms} ms and ITL <= {itl_ms} ms up to")
    for policy in dict.fromkeys(report.policy for report in reports):
        most = "none of these"
        for report in (report for report in reports if report.policy == policy):
            if report.ttft_ms_mean > ttft_ms or report.itl_ms_mean > itl_ms:
                break
            most = f"{report.mode} ({report.output_tok_s:,.0f} tok/s)"
        print(f"  {policy:22}{most}")


def verdict(met: bool, said: str) -> None:
    print(f"  {'met   ' if met else 'MISSED'} {said}")


SECTIONS = {
    "cells": cells,
    "ablation": ablation,
    "robust": robust,
    "mixes": mixes,
    "scaling": scaling,
    "large": large,
    "capacity": capacity,
}
PRINTED = {"cells": print_targets, "mixes": print_targets, "robust": print_losses, "large": print_cost}


def executed(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
    if processes == 1:
        yield from map(Job.execute, jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(Job.execute, jobs)


def cell_of(outcome: Outcome) -> tuple[str, int, str]:
    report, _ = outcome
    return report.trace, report.workers, report.mode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--workers", type=int, nargs="*")
    parser.add_argument("--policy", nargs="*")
    parser.add_argument("--without", nargs="*", help="parts of the price, for ablation")
    parser.add_argument("--mode", nargs="*", help="only these loads of traces: x1, x2, x3, x4, closed16")
    parser.add_argument("--rows", type=int, default=3000, help="of each mix")
    parser.add_argument("--seed", type=int, default=0, help="of mixes")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="one object per run, appended")
    parser.add_argument("--html", type=Path, help="all runs, with charts")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    jobs = list(SECTIONS[args.section](args))
    for _, group in groupby(executed(jobs, args.jobs), key=cell_of):
        found = list(group)
        outcomes += found
        reports = [report for report, _ in found]
        if args.section != "capacity":
            print_cell(reports)
        if args.section in PRINTED:
            PRINTED[args.section](reports)
        sys.stdout.flush()
        if args.json:
            with args.json.open("ab") as file:
                file.writelines(msgspec.json.encode(report) + b"\n" for report in reports)
    if args.section == "scaling":
        print_scaling([report for report, _ in outcomes])
    if args.section == "capacity":
        for _, group in groupby([report for report, _ in outcomes], key=lambda report: report.trace):
            print_capacity(list(group))
    if args.html:
        args.html.write_text(page(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
