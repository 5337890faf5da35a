"""Offered load from half to five times what the cluster can do: does goodput hold, are those admitted served in time?

    python bench/overload.py                        with a limit for the first token, as an operator would set it
    python bench/overload.py --limit 0              without: what happens then

`headwater serve` with mocker workers, whose steps take as long as modelled. First the capacity is measured in a closed
loop, then Poisson arrivals at each multiple of it. Good is what was answered in full with its first token within the
objective (--slo); the limit given to the server is the same. Refusals are answers with 503 or 429 and Retry-After.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter

from own_cluster import wait_ready
from processes import free_port, rss_mb, running

from headwater.bench.arrivals import Arrivals, ClosedLoop, Poisson
from headwater.bench.http_client import Target
from headwater.bench.load import LoadRun, RequestRecord, RequestShape
from headwater.bench.report import percentile
from headwater.bench.workload import SyntheticWorkload

INPUT_TOKENS, OUTPUT_TOKENS = 64, 32
FACTORS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0)


def serve(args: argparse.Namespace, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "headwater", "serve", "--port", str(port), "--engine", "mocker"),
        *("--served-model-name", "bench", "--workers", "2", "--max-num-seqs", "16", "--num-kv-blocks", "4096"),
        *("--mocker-decode-base-ms", "40", "--mocker-prefill-ms-per-token", "0.2"),
        *("--router-first-token-limit", f"{args.limit}s", "--drain-timeout", "1s", "--log-level", "warning"),
    ]


async def offer(port: int, arrivals: Arrivals, count: int, seed: int) -> list[RequestRecord]:
    load = LoadRun(Target.parse(f"http://127.0.0.1:{port}"), RequestShape("bench"), timeout_s=120)
    try:
        return await load.run(SyntheticWorkload(count, INPUT_TOKENS, OUTPUT_TOKENS, seed=seed).requests(1.0), arrivals)
    finally:
        load.close()


def row(factor: float, rate: float, records: list[RequestRecord], seconds: float, slo_s: float) -> dict[str, float]:
    done = [record for record in records if record.error is None]
    within = [record for record in done if record.ttft_s is not None and record.ttft_s <= slo_s]
    ttft_ms = sorted(1e3 * record.ttft_s for record in done if record.ttft_s is not None) or [0.0]
    errors = Counter(str(record.error).partition(":")[0] for record in records if record.error is not None)
    refused = errors.pop("HTTP 503", 0) + errors.pop("HTTP 429", 0)
    return {
        "offered": factor,
        "offered_per_s": round(rate, 1),
        "goodput_per_s": round(len(within) / seconds, 2),
        "done": len(done),
        "late": len(done) - len(within),
        "refused": refused,
        "failed": sum(errors.values()),
        "ttft_p50_ms": round(percentile(ttft_ms, 50)),
        "ttft_p99_ms": round(percentile(ttft_ms, 99)),
    }


async def measure(args: argparse.Namespace, port: int, server: int) -> list[dict[str, float]]:
    began = time.monotonic()
    records = await offer(port, ClosedLoop(48), 400, seed=1)
    capacity = sum(record.error is None for record in records) / (time.monotonic() - began)
    print(f"capacity {capacity:.1f} requests/s", file=sys.stderr, flush=True)
    rows = []
    for factor in FACTORS:
        rate = factor * capacity
        began = time.monotonic()
        records = await offer(port, Poisson(rate, seed=2), round(rate * args.seconds), seed=round(10 * factor))
        seconds = time.monotonic() - began
        rows.append(row(factor, rate, records, seconds, args.slo) | {"frontend_mb": round(rss_mb(frontend_of(server)))})
        print(json.dumps(rows[-1]) if args.json else line(rows[-1]), flush=True)
    return rows


def frontend_of(supervisor: int) -> int:
    with open(f"/proc/{supervisor}/task/{supervisor}/children") as file:
        children = [int(word) for word in file.read().split()]
    for pid in children:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"frontend" in file.read():
                return pid
    raise SystemExit("the frontend is gone")


def line(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:g}" for name, value in values.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="per multiple")
    parser.add_argument("--slo", type=float, default=2.0, help="objective for the first token, s")
    parser.add_argument("--limit", type=float, help="--router-first-token-limit, s; default: the objective")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.limit = args.slo if args.limit is None else args.limit
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hw-over-") as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
        with running([serve(args, port)], environment, None) as children:
            wait_ready(port, children)
            rows = asyncio.run(measure(args, port, children[0].pid))
    peak = max(values["goodput_per_s"] for values in rows)
    kept = rows[-1]["goodput_per_s"] / peak
    print(f"goodput at {FACTORS[-1]:g}x is {kept:.2f} of the peak", flush=True)


if __name__ == "__main__":
    main()
