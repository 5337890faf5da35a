"""NVIDIA Dynamo's own offline replay beside our simulator, on the same traces and sizes.

    bench/peers/setup dynamo
    python bench/peers/dynamo_replay.py conversation.jsonl.gz:4000 synthetic.jsonl.gz
    python bench/peers/dynamo_replay.py TRACE[:ROWS] ... [--workers 4 8 64] [--closed 16] [--runs 3] [--json]

A trace is Mooncake JSONL, plain or gzip. Both sides: workers of 16,384 blocks of 64 tokens, 256 sequences, 8,192
batched tokens, the default step times of Dynamo's mocker; arrivals so much faster that the load per worker is that of
4 workers at the trace's own speed, and with --closed a number of requests in flight per worker.

The `dynamo` policy in our simulator is held against Dynamo's KV router, round robin against round robin: how far they
are apart says how fair our simulator is. `delay` is our default policy. Dynamo breaks ties at random; its rows are
medians over --runs. ITL is the mean over all gaps between tokens.
"""

import argparse
import gzip
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

PEERS = Path(os.environ.get("PEERS", Path(__file__).parents[2] / "build/peers"))
FIGURES = ("hit", "ttft_ms", "ttft_p99_ms", "itl_ms", "e2e_ms", "tok_s")
BASE_WORKERS = 4
PAIRS = {"round_robin": "round_robin", "kv_router": "dynamo"}
"""Dynamo's router mode and our policy that imitates it."""
Figures = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """One load on one cluster size."""

    trace: str
    rows: int | None
    workers: int
    closed: int | None

    @property
    def speed(self) -> float:
        return self.workers / BASE_WORKERS

    @property
    def label(self) -> str:
        return f"{self.closed} per worker" if self.closed else "constant"

    @property
    def name(self) -> str:
        return Path(self.trace).name.split(".")[0]


# -- Dynamo, in its own interpreter ---------------------------------------------------------------------------------


def replay(cell: Cell, router: str) -> Figures:
    from dynamo.replay import run_trace_replay

    with tempfile.TemporaryDirectory(prefix="hw-replay-") as folder:
        report = run_trace_replay(
            str(plain_trace(cell, Path(folder))),
            num_workers=cell.workers,
            router_mode=router,
            arrival_speedup_ratio=cell.speed,
            replay_concurrency=cell.closed * cell.workers if cell.closed else None,
        ).summary
    return {
        "hit": report["prefix_cache_reused_ratio"],
        "ttft_ms": report["mean_ttft_ms"],
        "ttft_p99_ms": report["p99_ttft_ms"],
        "itl_ms": report["mean_itl_ms"],
        "e2e_ms": report["mean_e2e_latency_ms"],
        "tok_s": report["output_throughput_tok_s"],
    }


def plain_trace(cell: Cell, folder: Path) -> Path:
    """Dynamo reads plain files whole."""
    path = Path(cell.trace)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = list(lines)[: cell.rows]
    found = folder / "trace.jsonl"
    found.write_text("".join(rows))
    return found


def ask_dynamo(python: str, cell: Cell, router: str) -> Figures:
    command = [python, __file__, "--role", json.dumps({"cell": asdict(cell), "router": router})]
    environment = {**os.environ, "DYN_LOG": "error"}
    output = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


# -- ours -----------------------------------------------------------------------------------------------------------


def simulate(cell: Cell, policy: str) -> Figures:
    from headwater.bench.report import percentile
    from headwater.bench.traces import read_trace
    from headwater.frontend.policies import load_policy
    from headwater.sim.cluster import SimCluster, SimConfig
    from headwater.sim.timing import DynamoPolynomial
    from headwater.sim.workload import from_trace

    config = SimConfig(num_workers=cell.workers, in_flight_per_worker=cell.closed, arrival_speed=cell.speed)
    requests = list(from_trace(read_trace(Path(cell.trace)), config.block_size))[: cell.rows]
    result = SimCluster(config, [DynamoPolynomial()] * cell.workers, load_policy(policy)).run(requests)
    records = result.records
    ttft = sorted((record.first_token_s - record.arrived_s) * 1e3 for record in records)
    decoding_s = sum(record.finished_s - record.first_token_s for record in records)
    return {
        "hit": sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records),
        "ttft_ms": fmean(ttft),
        "ttft_p99_ms": percentile(ttft, 99),
        "itl_ms": decoding_s * 1e3 / sum(record.output_tokens - 1 for record in records),
        "e2e_ms": fmean((record.finished_s - record.arrived_s) * 1e3 for record in records),
        "tok_s": sum(record.output_tokens for record in records) / result.duration_s,
    }


# -- table ----------------------------------------------------------------------------------------------------------


def rows_of(cell: Cell, python: str, runs: int) -> Iterator[dict[str, object]]:
    """Real and simulated, pair by pair; then our own policy, against Dynamo's KV router."""
    real: Figures = {}
    for router, policy in PAIRS.items():
        found = [ask_dynamo(python, cell, router) for _ in range(1 if router == "round_robin" else runs)]
        real = {name: median(figures[name] for figures in found) for name in FIGURES}
        yield {"system": f"Dynamo {router}", "figures": real, "against": None}
        yield {"system": f"ours, {policy}", "figures": simulate(cell, policy), "against": real}
    yield {"system": "ours, delay", "figures": simulate(cell, "delay"), "against": real}


def line(figures: Figures, against: Figures | None) -> str:
    def cell(name: str) -> str:
        value = f"{figures[name]:.1%}" if name == "hit" else f"{figures[name]:,.{1 if name == 'itl_ms' else 0}f}"
        return value + (f" ({figures[name] / against[name] - 1:+.1%})" if against else "")

    return "".join(f"{cell(name):>18}" for name in FIGURES)


def cells_of(args: argparse.Namespace) -> Iterator[Cell]:
    for given in args.traces:
        path, _, rows = given.partition(":")
        for workers in args.workers:
            for closed in (None, *args.closed):
                yield Cell(path, int(rows) if rows else None, workers, closed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE[:ROWS]")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 64])
    parser.add_argument("--closed", type=int, nargs="*", default=[16], metavar="N", help="also N in flight per worker")
    parser.add_argument("--runs", type=int, default=3, help="of Dynamo's KV router per cell")
    parser.add_argument("--dynamo-python", default=str(PEERS / "dynamo/bin/python"))
    parser.add_argument("--json", action="store_true", help="one object per line and row")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        asked = json.loads(args.role)
        print(json.dumps(replay(Cell(**asked["cell"]), asked["router"])))
        return
    if not args.traces:
        parser.error("name a trace")
    for cell in cells_of(args):
        if not args.json:
            print(f"\n{cell.name}, {cell.workers} workers, {cell.label}")
            print(f"{'':24}" + "".join(f"{name:>18}" for name in FIGURES))
        for row in rows_of(cell, args.dynamo_python, args.runs):
            if args.json:
                print(json.dumps({"cell": asdict(cell), **row}), flush=True)
            else:
                print(f"{row['system']:24}" + line(row["figures"], row["against"]), flush=True)


if __name__ == "__main__":
    main()
