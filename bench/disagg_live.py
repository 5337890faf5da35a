"""Adaptive roles live, beside prefill always remote and never remote: real processes, real transfers, mocker workers.

    python bench/disagg_live.py [--isl 64 2048 8192] [--osl 16 128] [--load 0.5 0.9] [--seconds 15 | --minutes 20]
    python bench/disagg_live.py --native --isl 128 512 --osl 16 64 --load 0.3 0.6 --minutes 8

With --native two workers of the native engine serve the demo model, and load 1.0 is two requests a second.

Three clusters of four workers run side by side, one under load at a time: `adaptive` (--role adaptive), `remote` (two
prefill and two decode workers, every prompt moved) and `local` (all workers do both). Steps take as long as modelled,
about a 70B model on two GPUs per worker, at real-time pace. In each cell the same requests, as token ids, are sent to
each cluster for `--settle` seconds that are not judged and `--seconds` that are, `--repeats` times in turns, each time
with another cluster first; medians are compared. Load 1.0 is what the best split could complete in simulation, at most
`--most` requests a second. Cells follow each other without a restart, so that the adaptive cluster has to find out by
itself: `--adapt` seconds of a cell's traffic, not judged, are for that. `--minutes` says how long all may take, and
`--seconds` follows.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean, median

import msgspec
import uvloop
from processes import free_port, running
from routing_live import ready_workers
from token_prompts import TokenShape

from headwater.bench.arrivals import TraceTimes
from headwater.bench.http_client import Target
from headwater.bench.load import LoadRun, RequestRecord
from headwater.bench.report import tpot_s
from headwater.bench.workload import LoadRequest
from headwater.config.schema import DisaggConfig, EngineConfig
from headwater.perf.curve import StepCurve
from headwater.planner.objective import Objective
from headwater.planner.plan import candidates
from headwater.planner.pool import WorkerModel
from headwater.planner.whatif import FastCluster, Job

WORKERS = 4
ENGINE = EngineConfig(
    engine="mocker",
    served_model_name=("mock",),
    num_kv_blocks=65_536,
    max_model_len=16_384,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    mocker_prefill_ms_per_token=0.07,
    mocker_decode_base_ms=13.0,
    mocker_decode_ms_per_sequence=0.06,
    mocker_decode_ms_per_kv_token=2e-5,
)
OBJECTIVE = Objective(ttft_ms=2000.0, tpot_ms=30.0)
NATIVE = EngineConfig(engine="native", served_model_name=("mock",), max_model_len=2048, num_kv_blocks=1024)
NATIVE_RATE = 2.0
NATIVE_OBJECTIVE = Objective(ttft_ms=3000.0, tpot_ms=80.0)
START_S = 60.0
DRAIN_S = 1.0
"""After the last request of a turn, about, ..."""
TOKEN_S = 0.025
"""... and per token of its answer."""
LEAST_S = 3.0


def modes(num_workers: int) -> dict[str, dict[str, object]]:
    half = num_workers // 2
    return {
        "adaptive": {"workers": num_workers, "role": "adaptive", "disagg": "plan"},
        "remote": {"prefill": half, "decode": num_workers - half, "disagg": "always"},
        "local": {"workers": num_workers, "disagg": "never"},
    }


@dataclass(frozen=True)
class Cell:
    isl: int
    osl: int
    load: float


@dataclass(frozen=True)
class Figures:
    goodput: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    failed: int


def pool() -> list[WorkerModel]:
    curve = StepCurve(
        ((0.0, 0.0), (1.0, 0.0)),
        prefill_token_ms=ENGINE.mocker_prefill_ms_per_token,
        decode_ms=ENGINE.mocker_decode_base_ms,
        decode_sequence_ms=ENGINE.mocker_decode_ms_per_sequence,
        decode_context_token_ms=ENGINE.mocker_decode_ms_per_kv_token,
    )
    model = WorkerModel(
        curve, 16 * (ENGINE.num_kv_blocks or 0), ENGINE.max_num_batched_tokens or 0, ENGINE.max_num_seqs
    )
    return [model] * WORKERS


def objective_of(args: argparse.Namespace) -> Objective:
    return NATIVE_OBJECTIVE if args.native else OBJECTIVE


def capacity(cell: Cell) -> float:
    jobs = [Job(0.0, cell.isl, cell.osl)] * 400
    workers = pool()
    plans = candidates([""] * WORKERS)
    return max(len(jobs) / FastCluster(workers, plan, cell.osl).run(jobs).ended_ms * 1000 for plan in plans)


@contextlib.contextmanager
def serving(mode: str, args: argparse.Namespace) -> Iterator[str]:
    """URL of a cluster of real processes, once it is ready."""
    port, num_workers = free_port(), 2 if args.native else WORKERS
    settings = dict(modes(num_workers)[mode])
    engine = NATIVE if args.native else ENGINE
    wanted = objective_of(args)
    planned = DisaggConfig(plan_ttft=wanted.ttft_ms / 1000, plan_tpot=wanted.tpot_ms / 1000, plan_interval=1.0)
    disaggregation = msgspec.structs.asdict(planned) | {
        name: settings.pop(name) for name in ("role", "disagg") if name in settings
    }
    graph = settings | {
        "engine": {name: value for name, value in msgspec.structs.asdict(engine).items() if value is not None},
        "disaggregation": {name: value for name, value in disaggregation.items() if value not in (None, ())},
    }
    with tempfile.TemporaryDirectory(prefix="hw-live-") as folder:
        config = Path(folder) / "graph.yaml"
        config.write_bytes(msgspec.yaml.encode(graph))
        command = [sys.executable, "-m", "headwater", "serve", "--config", str(config), "--port", str(port)]
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
        with running([command], environment, args.log) as children:
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline and children[0].poll() is None:
                with contextlib.suppress(urllib.error.URLError, OSError):
                    if ready_workers(port) >= (
                        num_workers if "workers" in settings else num_workers - num_workers // 2
                    ):
                        time.sleep(1.0)
                        yield f"http://127.0.0.1:{port}"
                        return
                time.sleep(0.1)
            raise SystemExit(f"the cluster {mode} did not become ready; see --log FILE")


def requests_of(cell: Cell, rate: float, seconds: float, seed: int) -> list[LoadRequest]:
    random = Random(f"{cell}/{seed}")
    at_s, requests = 0.0, []
    while True:
        at_s += random.expovariate(rate)
        if at_s > seconds:
            return requests
        ids = [random.randrange(100, 40_000) for _ in range(cell.isl)]
        requests.append(LoadRequest(msgspec.json.encode(ids).decode(), cell.osl, at_s))


async def put_load(url: str, requests: Sequence[LoadRequest]) -> list[RequestRecord]:
    load = LoadRun(Target.parse(url), TokenShape("mock", "completions"), timeout_s=120)
    try:
        return await load.run(requests, TraceTimes())
    finally:
        load.close()


def figures(records: Sequence[RequestRecord], args: argparse.Namespace) -> Figures:
    judged = [record for record in records if record.started_s >= args.settle]
    good = [record for record in judged if record.error is None and record.ttft_s is not None]
    if not good:
        raise SystemExit(f"none of {len(judged)} requests was answered; {args.seconds:g} s are too short, or see --log")
    met = [one for one in good if objective_of(args).met(1e3 * (one.ttft_s or 0.0), 1e3 * (tpot_s(one) or 0.0))]
    return Figures(
        len(met) / args.seconds,
        1e3 * fmean(one.ttft_s or 0.0 for one in good),
        1e3 * fmean(tpot_s(one) or 0.0 for one in good),
        1e3 * fmean(one.e2e_s or 0.0 for one in good),
        len(judged) - len(good),
    )


def roles(url: str) -> str:
    with urllib.request.urlopen(f"{url}/debug/plan", timeout=10) as answer:
        models = msgspec.json.decode(answer.read())["models"]
    found = [role for plan in models.values() for role in plan["roles"].values()]
    return "".join(sorted(role[0] for role in found)) + ("*" if any(plan["loose"] for plan in models.values()) else "")


def measure(cell: Cell, urls: dict[str, str], args: argparse.Namespace) -> dict[str, Figures]:
    rate = min(args.most, cell.load * (NATIVE_RATE if args.native else capacity(cell)))
    seen: dict[str, list[Figures]] = {mode: [] for mode in urls}
    if args.adapt:
        uvloop.run(put_load(urls["adaptive"], requests_of(cell, rate, args.adapt, -1)))
    for repeat in range(args.repeats):
        requests = requests_of(cell, rate, args.settle + args.seconds, repeat)
        order = list(urls)
        for mode in order[repeat % len(order) :] + order[: repeat % len(order)]:
            records = uvloop.run(put_load(urls[mode], requests))
            seen[mode].append(figures(records, args))
    found = {mode: middle(some) for mode, some in seen.items()}
    cells = "  ".join(
        f"{mode} {one.goodput:5.2f}/s {one.ttft_ms:5.0f} {one.tpot_ms:5.1f} {one.e2e_ms:6.0f}"
        + (f" FAILED {one.failed}" if one.failed else "")
        for mode, one in found.items()
    )
    print(f"{cell.isl:5}/{cell.osl:<4}{cell.load:4.2f} {rate:5.1f}/s  {cells}  {roles(urls['adaptive'])}", flush=True)
    return found


def middle(some: Sequence[Figures]) -> Figures:
    """Medians; failures all together."""
    goodput, ttft_ms, tpot_ms, e2e_ms = (
        median(values)
        for values in zip(*((one.goodput, one.ttft_ms, one.tpot_ms, one.e2e_ms) for one in some), strict=True)
    )
    return Figures(goodput, ttft_ms, tpot_ms, e2e_ms, sum(one.failed for one in some))


def goodput_ratio(one: dict[str, Figures], others: Sequence[str]) -> float:
    best = max(one[mode].goodput for mode in others)
    return one["adaptive"].goodput / best if best else inf if one["adaptive"].goodput else 1.0


def e2e_ratio(one: dict[str, Figures], others: Sequence[str]) -> float:
    return min(one[mode].e2e_ms for mode in others) / one["adaptive"].e2e_ms


RATIOS = {"goodput": goodput_ratio, "E2E": e2e_ratio}
"""Of adaptive over the best of others: more than 1 is better."""


def compare(cells: Sequence[Cell], results: Sequence[dict[str, Figures]]) -> None:
    """Adaptive against the others, by goodput and by end-to-end time."""
    print(
        "\n| ISL/OSL, load | goodput to remote | to local | to the better | E2E to remote | to local | to the better |"
    )
    print("|---|---|---|---|---|---|---|")
    others = (["remote"], ["local"], ["remote", "local"])
    for cell, one in zip(cells, results, strict=True):
        figures = " | ".join(f"{ratio(one, some):.3f}" for ratio in RATIOS.values() for some in others)
        print(f"| {cell.isl}/{cell.osl}, {cell.load:g} | {figures} |")
    print()
    for name, ratio in RATIOS.items():
        ratios = sorted(ratio(one, others[-1]) for one in results)
        print(
            f"{name}: adaptive over the better one: least {ratios[0]:.3f}, median {median(ratios):.3f}, "
            f">= 0.97 in {sum(r >= 0.97 for r in ratios)} of {len(ratios)}, > 1.01 in {sum(r > 1.01 for r in ratios)}"
        )


def seconds_for(args: argparse.Namespace, cells: Sequence[Cell]) -> float:
    """To be judged at a time, so that all ends about in time."""
    turns = args.repeats * len(modes(WORKERS))
    drains = sum(DRAIN_S + TOKEN_S * cell.osl for cell in cells)
    fixed_s = START_S + (turns + 1) * drains + len(cells) * (args.adapt + turns * args.settle)
    seconds = (60 * args.minutes - fixed_s) / (len(cells) * turns)
    if seconds < LEAST_S:
        least = (fixed_s + LEAST_S * len(cells) * turns) / 60
        raise SystemExit(f"{len(cells)} cells need {least:.0f} minutes, or fewer --repeats, --isl, --osl, --load")
    return float(seconds)


def end(_number: int, _frame: object) -> None:
    raise SystemExit(1)


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isl", type=int, nargs="+", default=[64, 512, 2048, 8192])
    parser.add_argument("--osl", type=int, nargs="+", default=[16, 128, 512])
    parser.add_argument("--load", type=float, nargs="+", default=[0.25, 0.5, 0.9])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--settle", type=float, default=3.0)
    parser.add_argument("--adapt", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="for all cells together; sets --seconds")
    parser.add_argument("--most", type=float, default=40.0, help="requests a second, for the sake of small machines")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--log")
    args = parser.parse_args()
    cells = [Cell(isl, osl, load) for isl in args.isl for osl in args.osl for load in args.load]
    if args.minutes is not None:
        args.seconds = seconds_for(args, cells)
        print(f"{len(cells)} cells in {args.minutes:g} minutes: {args.repeats} x {args.seconds:.1f} s each", flush=True)
    print(
        "cell, rate, then per mode: goodput, TTFT ms, TPOT ms, E2E ms; at last the roles that adaptive has", flush=True
    )
    with contextlib.ExitStack() as stack:
        urls = {mode: stack.enter_context(serving(mode, args)) for mode in modes(WORKERS)}
        compare(cells, [measure(cell, urls, args) for cell in cells])


if __name__ == "__main__":
    main()
