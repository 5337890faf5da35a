"""What a frontend costs: ours beside NVIDIA Dynamo's, in one run, on the same cores, with the same requests.

    bench/peers/setup dynamo demo
    python bench/peers/frontend_cost.py [--rounds 3] [--seconds 4] [--system NAME ...] [--json FILE]

Every system is one frontend process before one process with four mock workers that answer without delay (Dynamo's at
`--speedup-ratio 1000`, since 0 means real time there). Each round starts, measures and ends every system in turn, so
that a busy host harms all alike; figures are medians over the rounds. CPU is that of the frontend's process, from
/proc. Rates share the cores with the workers and the load generator, and with whatever else runs: compare CPU first.

    dynamo rr / kv             `--tokenizer fastokens`, its best setting
    dynamo default rr / kv     its default tokenizer
    headwater rr               round_robin
    headwater delay            the default policy, which knows which worker holds which prefix, as Dynamo's kv does

"Own writes" has the workers pace their steps (Dynamo's ratio 1: about 6 ms; ours 6 ms), so that tokens cannot join;
"reads" says how many pieces a stream of 100 tokens arrived in. CPU per token compares at like reads only.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from frontend_cost import LONG, SHORT, errors_of, first_token_s, measure  # noqa: E402
from frontend_load import Load, run_load  # noqa: E402
from own_cluster import ClusterOptions, started  # noqa: E402
from processes import Process, free_port, rss_mb, running  # noqa: E402

PEERS = Path(os.environ.get("PEERS", ROOT / "build/peers"))
PACED_STEP_MS = 6.0
Row = dict[str, Any]
Started = AbstractContextManager[tuple[int, list[Process]]]


@contextlib.contextmanager
def dynamo(router: str, tokenizer: str, paced: bool, log: str | None) -> Iterator[tuple[int, list[Process]]]:
    """(port, [workers, frontend]) as soon as the processes exist."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hw-dynamo-") as folder:
        environment = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": folder,
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
        python, planes = (
            str(PEERS / "dynamo/bin/python"),
            "--discovery-backend file --request-plane tcp --event-plane zmq",
        )
        workers = f"-m dynamo.mocker --model-path {PEERS / 'demo'} --model-name bench --num-workers 4 --block-size 16"
        workers += f" --speedup-ratio {1 if paced else 1000} --max-model-len 8192 {planes}"
        frontend = f"-m dynamo.frontend --http-host 127.0.0.1 --http-port {port} {planes}"
        frontend += f" --router-mode {router} --tokenizer {tokenizer}"
        commands = [[python, *workers.split()], [python, *frontend.split()]]
        with running(commands, environment, log) as children:
            yield port, children


def headwater(policy: str, paced: bool, log: str | None) -> Started:
    return started(ClusterOptions(4, PACED_STEP_MS if paced else 0.0, policy, log=log))


SYSTEMS: dict[str, Callable[[bool, str | None], Started]] = {
    "dynamo rr": lambda paced, log: dynamo("round-robin", "fastokens", paced, log),
    "dynamo kv": lambda paced, log: dynamo("kv", "fastokens", paced, log),
    "dynamo default rr": lambda paced, log: dynamo("round-robin", "default", paced, log),
    "dynamo default kv": lambda paced, log: dynamo("kv", "default", paced, log),
    "headwater rr": lambda paced, log: headwater("round_robin", paced, log),
    "headwater delay": lambda paced, log: headwater("delay", paced, log),
}
FIGURES = {
    "ms/request": "frontend CPU, 131 prompt tokens, 1 out",
    "worker ms/request": "CPU of the four mock workers, 131 -> 1",
    "us/prompt token": "slope from 131 to 2,031",
    "us/token joined": "slope from 1 to 100 out, workers without delay",
    "worker us/token": "of the four mock workers, slope from 1 to 100 out",
    "reads joined": "of a stream of 100 tokens",
    "us/token own": "paced, the whole request over 100 tokens",
    "reads own": "",
    "requests/s": "131 -> 1",
    "tokens/s": "131 -> 100",
    "TTFT ms": "1 connection, 131 tokens",
    "TTFT long ms": "1 connection, 2,031 tokens",
    "boot s": "process start to first token",
    "RSS MB": "frontend, at the end",
}


def measure_system(start: Callable[[bool, str | None], Started], args: argparse.Namespace, seed: int) -> Row:
    found: Row = {"errors": 0}

    def cell(children: list[Process], load: Load) -> Row:
        row = measure(children[1].pid, load, children[0].pid)
        found["errors"] += row["errors"]
        if row["errors"]:
            print(row["error_sample"], file=sys.stderr)
        return row

    began = time.perf_counter()
    with start(False, args.log) as (port, children):
        found["boot s"] = first_token_s(port, began)
        one = cell(children, Load(port, SHORT, 1, 64, args.seconds, seed=seed))
        long = cell(children, Load(port, LONG, 1, 64, args.seconds, seed=seed))
        many = cell(children, Load(port, SHORT, 100, 64, args.seconds, seed=seed))
        for name, words in (("TTFT ms", SHORT), ("TTFT long ms", LONG)):
            alone = run_load(Load(port, words, 100, 1, requests=40, seed=seed + 50))
            found["errors"] += errors_of(alone)["errors"]
            found[name] = statistics.median(alone.ttft_ms)
        found["RSS MB"] = rss_mb(children[1].pid)
    with start(True, args.log) as (port, children):
        first_token_s(port, time.perf_counter())
        paced = cell(children, Load(port, SHORT, 100, 64, args.seconds * 1.5, seed=seed))
    cost, worker = "cpu_ms_per_request", "worker_cpu_ms_per_request"
    return found | {
        "ms/request": one[cost],
        "worker ms/request": one[worker],
        "us/prompt token": (long[cost] - one[cost]) * 1e3 / (LONG - SHORT),
        "us/token joined": (many[cost] - one[cost]) * 1e3 / 99,
        "worker us/token": (many[worker] - one[worker]) * 1e3 / 99,
        "reads joined": many["reads_per_request"],
        "us/token own": paced[cost] * 1e3 / 100,
        "reads own": paced["reads_per_request"],
        "requests/s": one["requests_per_s"],
        "tokens/s": many["tokens_per_s"],
    }


def medians(rounds: list[Row]) -> Row:
    return {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}


def table(found: dict[str, Row]) -> str:
    names = list(found)
    lines = ["| figure | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for figure, meaning in FIGURES.items():
        cells = [f"{found[name][figure]:,.4g}" for name in names]
        lines.append(f"| {figure}{': ' + meaning if meaning else ''} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="only these; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds there")
    parser.add_argument("--log", help="file for what the processes log")
    args = parser.parse_args()
    rounds: dict[str, list[Row]] = {name: [] for name in args.system or SYSTEMS}
    loads = [os.getloadavg()[0]]
    for number in range(args.rounds):
        for name, rows in rounds.items():
            rows.append(measure_system(SYSTEMS[name], args, seed=number + 1))
            loads.append(os.getloadavg()[0])
            print(f"round {number + 1}, load {loads[-1]:.1f}, {name}: {json.dumps(rows[-1])}", file=sys.stderr)
    found = {name: medians(rows) for name, rows in rounds.items()}
    if args.json:
        args.json.write_text(json.dumps({"load_averages": loads, "rounds": rounds, "medians": found}, indent=1))
    errors = {name: row["errors"] for name, row in found.items() if row["errors"]}
    print(table(found))
    print(f"\nLoad average {min(loads):.1f} to {max(loads):.1f}, {os.cpu_count()} cores. Errors: {errors or 'none'}.")


if __name__ == "__main__":
    main()
