"""What our frontend costs and withstands: CPU per request and token, memory, many streams, slow readers, long prompts.

Starts a registry folder, mock workers at infinite (or paced) speed, one frontend, and a light load generator, each in
its own process; CPU is the frontend's own, from /proc. All of it shares the cores: compare CPU, not rates.
bench/peers/frontend_cost.py has the costs beside those of NVIDIA Dynamo.

    python bench/frontend_cost.py                    all scenarios, JSON
    python bench/frontend_cost.py costs long         some of them
    python bench/frontend_cost.py --seconds 10 --workers 4 --router-policy round_robin
"""

import argparse
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

from frontend_load import SIMPLE_WORDS, Load, Loading, Result, http_request, run_load
from own_cluster import ClusterOptions, cluster
from processes import cpu_s, free_port, rss_mb, running

SHORT, LONG = 101, 2001
"""Words; the template adds 30 tokens."""
Row = dict[str, Any]


def measure(pid: int, load: Load, worker_pid: int | None = None) -> Row:
    """After a second of the same load as a warm-up."""
    run_load(replace(load, seconds=1.0, seed=load.seed + 1000, requests=min(load.requests, 500)))
    pids = {"cpu_ms_per_request": pid, **({"worker_cpu_ms_per_request": worker_pid} if worker_pid else {})}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    result = run_load(load)
    requests = max(1, result.requests)
    return {
        "requests": result.requests,
        **errors_of(result),
        **{name: (cpu_s(pid) - before[name]) * 1e3 / requests for name, pid in pids.items()},
        "requests_per_s": result.requests / result.wall_s,
        "tokens_per_s": result.requests * load.max_tokens / result.wall_s,
        "reads_per_request": result.reads / requests,
        "ttft_p50_ms": statistics.median(result.ttft_ms or [0.0]),
        "rss_mb": rss_mb(pid),
    }


def errors_of(result: Result) -> Row:
    return {"errors": result.errors, **({"error_sample": result.error_sample} if result.errors else {})}


def middle(rows: list[Row], figure: str) -> Row:
    return sorted(rows, key=lambda row: row[figure])[len(rows) // 2]


def scenario_costs(args: argparse.Namespace) -> Row:
    """Short and long prompts, one token and a hundred, workers without delay."""
    found: Row = {}
    with cluster(options(args)) as (port, pid):
        found["rss_at_start_mb"] = rss_mb(pid)
        cells = {"131->1": (SHORT, 1), "2031->1": (LONG, 1), "131->100": (SHORT, 100)}
        for name, (words, tokens) in cells.items():
            rounds = [
                measure(pid, Load(port, words, tokens, 64, args.seconds, seed=number)) for number in range(args.rounds)
            ]
            found[name] = middle(rounds, "cpu_ms_per_request")
    one, long_one, many = (found[name]["cpu_ms_per_request"] for name in cells)
    found["us_per_prompt_token"] = (long_one - one) * 1e3 / (LONG - SHORT)
    found["us_per_streamed_token_joined"] = (many - one) * 1e3 / 99
    return found


def scenario_paced(args: argparse.Namespace) -> Row:
    """Every token has a write of its own: steps of 5 ms, 64 streams; steps of 40 ms, 1,000 streams."""
    found: Row = {}
    for name, step_ms, streams in (("5 ms, 64 streams", 5.0, 64), ("40 ms, 1000 streams", 40.0, 1000)):
        with cluster(options(args, step_ms)) as (port, pid):
            row = measure(pid, Load(port, SHORT, 100, streams, args.seconds * 2))
            row["us_per_token"] = row["cpu_ms_per_request"] * 10
            found[name] = row
    return found


def scenario_streams(args: argparse.Namespace) -> Row:
    """2,000 concurrent streams."""
    with cluster(options(args, 20.0)) as (port, pid):
        return measure(pid, Load(port, SHORT, 100, 2000, requests=6000))


def scenario_memory(args: argparse.Namespace) -> Row:
    """Resident memory over many requests."""
    with cluster(options(args)) as (port, pid):
        series = [round(rss_mb(pid), 1)]
        errors = 0
        for number in range(10):
            errors += run_load(Load(port, SHORT, 2, 64, requests=args.memory_requests // 10, seed=number)).errors
            series.append(round(rss_mb(pid), 1))
        return {"requests": args.memory_requests, "errors": errors, "rss_mb": series}


def scenario_slow_readers(args: argparse.Namespace) -> Row:
    """Clients that ask for 30,000 tokens (7 MB) each and read nothing, beside one that does read."""
    readers = 64
    with cluster(options(args)) as (port, pid):
        measure(pid, Load(port, SHORT, 100, 1, 1.0))
        before, peak = rss_mb(pid), 0.0
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(readers)]
        for number, connection in enumerate(connections):
            connection.sendall(http_request(" ".join(SIMPLE_WORDS) + f" {number}", 30_000))
        beside = Loading(Load(port, SHORT, 100, 1, 8.0))
        while beside.process.poll() is None:
            peak = max(peak, rss_mb(pid))
            time.sleep(0.02)
        cut = sum(is_cut(connection) for connection in connections)
        well = beside.result()
        return {
            "slow_readers": readers,
            "cut_off": cut,
            "rss_before_mb": before,
            "rss_peak_mb": peak,
            "peak_mb_per_reader": (peak - before) / readers,
            "beside": {"requests": well.requests, **errors_of(well)},
        }


def is_cut(connection: socket.socket) -> bool:
    """Whether the answer ends before its end."""
    connection.settimeout(5)
    data = b""
    try:
        while piece := connection.recv(1 << 20):
            data = piece[-100:]
    except OSError:
        pass
    connection.close()
    return b"[DONE]" not in data


def scenario_long(args: argparse.Namespace) -> Row:
    """Gaps of 32 streams at 5 ms, alone, beside prompts of 30,000 tokens, and beside prompts of 10 MB."""
    found: Row = {}
    with cluster(options(args, 5.0)) as (port, pid):
        big = " ".join(random.Random(5).choices(SIMPLE_WORDS, k=29_900))
        huge = " ".join(random.Random(6).choices(SIMPLE_WORDS, k=1_900_000))[:10_000_000]
        for turn in range(args.rounds):
            for name, prompt in (("alone", None), ("30,000 tokens", big), ("10 MB", huge)):
                child = Loading(Load(port, SHORT, 100, 32, args.seconds * 2, seed=turn, keep_gaps=True))
                answers = beside(port, prompt, args.seconds * 2 - 1) if prompt is not None else []
                result = child.result()
                gaps = sorted(result.gaps_ms)
                row: Row = {f"gap_p{share}_ms": gaps[int(len(gaps) * share / 100)] for share in (50, 99, 99.9)}
                row |= {"gap_max_ms": gaps[-1], **errors_of(result)}
                if answers:
                    row["big_requests"] = len(answers)
                    row["big_status"] = sorted({status for status, _ in answers})
                    row["big_ms_p50"] = statistics.median(ms for _, ms in answers)
                    row["big_ms_max"] = max(ms for _, ms in answers)
                found.setdefault(name, []).append(row)
        found["rss_mb"] = rss_mb(pid)
    return {name: middle(rows, "gap_p99_ms") if isinstance(rows, list) else rows for name, rows in found.items()}


def beside(port: int, prompt: str, seconds: float) -> list[tuple[int, float]]:
    """One big request after the other; (status, milliseconds)."""
    request = http_request(prompt, 1)
    deadline = time.monotonic() + seconds
    answers = []
    time.sleep(0.5)
    while time.monotonic() < deadline:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            began = time.perf_counter()
            connection.sendall(request)
            data = b""
            while not data.endswith(b"0\r\n\r\n") and not (data and b" 200 " not in data[:20]):
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                data += piece
            answers.append((int(data[9:12] or 0), (time.perf_counter() - began) * 1e3))
        time.sleep(0.1)
    return answers


def scenario_boot(args: argparse.Namespace) -> Row:
    """`headwater serve` as a user starts it: seconds from process start to the first streamed token."""
    found: Row = {}
    for workers in (1, args.workers):
        times = []
        for _ in range(args.rounds):
            port = free_port()
            command = [sys.executable, "-m", "headwater", "serve", "--engine", "mocker", "--mocker-speedup", "0"]
            command += ["--served-model-name", "bench", "--workers", str(workers), "--port", str(port)]
            with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder:
                environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
                began = time.perf_counter()
                with running([command], environment, args.log):
                    times.append(first_token_s(port, began))
        found[f"{workers} workers"] = {"s": statistics.median(times), "runs": times}
    return found


def first_token_s(port: int, began: float) -> float:
    """From `began` to the first token anybody could get, asking again until there is one."""
    request = http_request("Hello", 1)
    while time.perf_counter() - began < 120:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(request)
                data = b""
                while piece := connection.recv(1 << 16):
                    data += piece
                    if b" 200 " not in data[:20]:
                        break
                    if b'"content":"' in data.replace(b'"content":""', b""):
                        return time.perf_counter() - began
        except OSError:
            pass
        time.sleep(0.02)
    raise SystemExit("no token came within two minutes; see --log FILE")


def options(args: argparse.Namespace, step_ms: float = 0.0) -> ClusterOptions:
    return ClusterOptions(args.workers, step_ms, args.router_policy, tuple(args.frontend_flag), args.log)


SCENARIOS = {
    "boot": scenario_boot,
    "costs": scenario_costs,
    "paced": scenario_paced,
    "streams": scenario_streams,
    "slow_readers": scenario_slow_readers,
    "long": scenario_long,
    "memory": scenario_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], help="default: all")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--router-policy", default="round_robin")
    parser.add_argument("--memory-requests", type=int, default=200_000)
    parser.add_argument("--frontend-flag", action="append", default=[])
    parser.add_argument("--log", help="file for what the processes log")
    args = parser.parse_args()
    found: Row = {}
    for name in args.scenarios or SCENARIOS:
        found[name] = {"load_average": os.getloadavg()[0], **SCENARIOS[name](args)}
        print(json.dumps({name: found[name]}, indent=1), file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
