"""What the frontend costs: CPU of its process per request, per prompt token and per streamed token.

Starts a registry folder, mocker workers at infinite (or paced) speed, one frontend, and a light load generator, each
in its own process; every number is the frontend's own CPU time from /proc. Run it on an otherwise idle machine and
compare CPU, not rates: all of it shares the cores.

    python bench/frontend_cost.py                   all scenarios, a table and JSON
    python bench/frontend_cost.py short long        some of them
    python bench/frontend_cost.py --seconds 10 --workers 4 --router-policy round_robin
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SIMPLE_WORDS = "time year people way day man thing woman life child world school state family student".split()  # noqa: SIM905


# -- processes ------------------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """User and system time of all threads, to the nanosecond where the kernel tells."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def cluster(args: argparse.Namespace, step_ms: float) -> Iterator[tuple[int, int]]:
    """(port, pid of the frontend) of a running cluster."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
        registry = f"file://{folder}/registry"
        workers = [sys.executable, __file__, "--role", "workers", "--registry", registry]
        workers += ["--workers", str(args.workers), "--step-ms", str(step_ms)]
        frontend = [sys.executable, "-m", "headwater", "frontend", "--registry", registry, "--port", str(port)]
        frontend += ["--router-policy", args.router_policy, *args.frontend_flag]
        log = open(args.log or os.devnull, "ab")  # noqa: SIM115 - closed below
        children = [subprocess.Popen(words, env=environment, stderr=log) for words in (workers, frontend)]
        try:
            wait_ready(port, children)
            yield port, children[1].pid
        finally:
            for child in reversed(children):
                child.send_signal(signal.SIGTERM)
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(10)
                child.kill()
            log.close()


def wait_ready(port: int, children: list["subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(child.poll() is not None for child in children):
            raise SystemExit("a process ended before the cluster was ready; see --log FILE")
        with contextlib.suppress(urllib.error.URLError, OSError):
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2).status == 200:
                time.sleep(0.5)
                return
        time.sleep(0.05)
    raise SystemExit("the cluster did not become ready")


async def run_workers(args: argparse.Namespace) -> None:
    """Several workers in one process, each with a real mocker engine behind real planes."""
    from headwater.config.schema import EngineConfig
    from headwater.engines.mocker.engine import MockerEngine
    from headwater.runtime.endpoints import parse_bind
    from headwater.runtime.planes import ZmqPlanes
    from headwater.runtime.registry.open import open_registry
    from headwater.worker.shell import ShellConfig, WorkerShell

    paced = args.step_ms > 0
    config = EngineConfig(
        engine="mocker",
        served_model_name=("bench",),
        max_num_seqs=1024,
        max_waiting=8192,
        num_kv_blocks=200_000,
        max_model_len=40_000,
        mocker_speedup=1.0 if paced else 0.0,
        mocker_prefill_ms_per_token=0.0001,
        mocker_decode_base_ms=args.step_ms,
        mocker_decode_ms_per_sequence=0.0,
        mocker_decode_ms_per_kv_token=0.0,
    )
    registry = open_registry(args.registry)
    planes = ZmqPlanes(parse_bind("ipc"))
    shells = [
        WorkerShell(MockerEngine(config), registry, planes, ShellConfig(f"w{i}", "mocker", "bench", drain_timeout_s=1))
        for i in range(args.workers)
    ]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    running = [asyncio.create_task(shell.run(lambda progress: None)) for shell in shells]
    await stop.wait()
    for shell in shells:
        shell.stop()
    await asyncio.gather(*running, return_exceptions=True)
    await registry.close()
    await planes.close()


# -- load -----------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """One run of the load generator."""

    port: int
    words: int
    max_tokens: int
    connections: int
    seconds: float = 5.0
    requests: int = 0
    """Stop after so many; 0: after the time."""
    varied: bool = True
    seed: int = 1


@dataclass
class Result:
    requests: int = 0
    errors: int = 0
    error_sample: str = ""
    reads: int = 0
    wall_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection, one request after the other. Looks at no more of an answer than it must."""

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.head = b""
        self.tail = b""
        self.reads = 0
        self.began = 0.0
        self.last = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        request = self.runner.next_request()
        if request is None:
            self.transport.close()
            return
        self.head, self.tail, self.reads = b"", b"", 0
        self.began = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        runner = self.runner
        if not self.reads:
            self.head = data[:300]
            runner.result.ttft_ms.append((now - self.began) * 1e3)
        elif runner.keep_gaps:
            runner.result.gaps_ms.append((now - self.last) * 1e3)
        self.last = now
        self.reads += 1
        self.tail = (self.tail + data)[-64:]
        if not self.head.startswith(b"HTTP/1.1 200"):
            runner.failed(self.head)
            self.transport.close()
        elif self.tail.endswith(b"\r\n0\r\n\r\n"):
            runner.result.requests += 1
            runner.result.reads += self.reads
            if b"[DONE]" not in self.tail:
                runner.failed(self.tail)
            self.next()

    def connection_lost(self, exc: Exception | None) -> None:
        self.runner.lost(self)


class Runner:
    def __init__(self, load: Load, keep_gaps: bool = False) -> None:
        self.load = load
        self.keep_gaps = keep_gaps
        self.result = Result()
        self.random = random.Random(load.seed)
        self.sent = 0
        self.open = 0
        self.done = asyncio.Event()
        self.deadline = 0.0

    async def run(self) -> Result:
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        self.deadline = began + self.load.seconds
        self.open = self.load.connections
        for start in range(0, self.load.connections, 200):
            batch = min(200, self.load.connections - start)
            await asyncio.gather(
                *(loop.create_connection(lambda: Client(self), "127.0.0.1", self.load.port) for _ in range(batch))
            )
        await self.done.wait()
        self.result.wall_s = time.perf_counter() - began
        return self.result

    def next_request(self) -> bytes | None:
        load = self.load
        over = self.sent >= load.requests if load.requests else time.perf_counter() >= self.deadline
        if over:
            return None
        self.sent += 1
        return http_request(prompt_of(self.random, load.words), load.max_tokens)

    def failed(self, sample: bytes) -> None:
        self.result.errors += 1
        self.result.error_sample = self.result.error_sample or sample.decode(errors="replace")

    def lost(self, client: Client) -> None:
        self.open -= 1
        if self.open == 0:
            self.done.set()


def prompt_of(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(SIMPLE_WORDS, k=words))


def http_request(prompt: str, max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": "bench",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 0.7,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return (head + f"content-length: {len(body)}\r\n\r\n").encode() + body


def run_load(load: Load) -> Result:
    """In a process of its own."""
    words = [sys.executable, __file__, "--role", "load", "--load", json.dumps(asdict(load))]
    return Result(**json.loads(subprocess.run(words, check=True, capture_output=True).stdout))


# -- scenarios ------------------------------------------------------------------------------------------------------


def words_for(port: int, tokens: int) -> int:
    """How many words make a prompt of so many tokens, template included."""
    body = json.dumps(
        {"model": "bench", "messages": [{"role": "user", "content": prompt_of(random.Random(0), 50)}], "max_tokens": 1}
    ).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    counted = json.load(urllib.request.urlopen(request))["usage"]["prompt_tokens"]
    return max(1, tokens - (counted - 50))


def measure(port: int, pid: int, load: Load) -> dict[str, float]:
    run_load(Load(**{**asdict(load), "seconds": 1.0, "seed": load.seed + 1000, "requests": min(load.requests, 500)}))
    before = cpu_s(pid)
    result = run_load(load)
    used = cpu_s(pid) - before
    if result.errors:
        print("errors:", result.errors, result.error_sample, file=sys.stderr)
    requests = max(1, result.requests)
    return {
        "requests": result.requests,
        "errors": result.errors,
        "cpu_ms_per_request": used * 1e3 / requests,
        "requests_per_s": result.requests / result.wall_s,
        "tokens_per_s": result.requests * load.max_tokens / result.wall_s,
        "reads_per_request": result.reads / requests,
        "ttft_p50_ms": statistics.median(result.ttft_ms) if result.ttft_ms else 0.0,
        "rss_mb": rss_mb(pid),
    }


def scenario_costs(args: argparse.Namespace) -> dict[str, Any]:
    """Short and long prompts, one token and a hundred, workers without delay."""
    found: dict[str, Any] = {}
    with cluster(args, 0.0) as (port, pid):
        found["rss_at_start_mb"] = rss_mb(pid)
        short, long = words_for(port, 131), words_for(port, 2031)
        cells = {"131->1": (short, 1), "2031->1": (long, 1), "131->100": (short, 100)}
        for name, (words, tokens) in cells.items():
            rounds = [
                measure(port, pid, Load(port, words, tokens, 64, args.seconds, seed=number))
                for number in range(args.rounds)
            ]
            found[name] = sorted(rounds, key=lambda row: row["cpu_ms_per_request"])[len(rounds) // 2]
    one, long_one, many = (found[name]["cpu_ms_per_request"] for name in cells)
    found["us_per_prompt_token"] = (long_one - one) * 1e3 / 1900
    found["us_per_streamed_token_joined"] = (many - one) * 1e3 / 99
    return found


def scenario_paced(args: argparse.Namespace) -> dict[str, Any]:
    """Every token has a write of its own: steps of 5 ms, 64 streams; steps of 40 ms, 1,000 streams."""
    found: dict[str, Any] = {}
    for name, step_ms, streams in (("5 ms, 64 streams", 5.0, 64), ("40 ms, 1000 streams", 40.0, 1000)):
        with cluster(args, step_ms) as (port, pid):
            words = words_for(port, 131)
            row = measure(port, pid, Load(port, words, 100, streams, args.seconds * 2))
            row["us_per_token"] = row["cpu_ms_per_request"] * 10
            found[name] = row
    return found


def scenario_streams(args: argparse.Namespace) -> dict[str, Any]:
    """2,000 concurrent streams."""
    with cluster(args, 20.0) as (port, pid):
        words = words_for(port, 131)
        return measure(port, pid, Load(port, words, 100, 2000, requests=6000))


def scenario_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory over many requests."""
    with cluster(args, 0.0) as (port, pid):
        words = words_for(port, 131)
        series = []
        for number in range(11):
            if number:
                run_load(Load(port, words, 2, 64, requests=args.memory_requests // 10, seed=number))
            series.append(round(rss_mb(pid), 1))
        return {"requests": args.memory_requests, "rss_mb": series}


def scenario_long(args: argparse.Namespace) -> dict[str, Any]:
    """Gaps of 32 streams at 5 ms, alone, beside prompts of 30,000 tokens, and beside prompts of 10 MB."""
    found: dict[str, Any] = {}
    with cluster(args, 5.0) as (port, pid):
        words = words_for(port, 131)
        big = " ".join(random.Random(5).choices(SIMPLE_WORDS, k=29_900))
        huge = " ".join(random.Random(6).choices(SIMPLE_WORDS, k=1_900_000))[:10_000_000]
        for name, prompt in (("alone", None), ("30,000 tokens", big), ("10 MB", huge), ("alone again", None)):
            load = Load(port, words, 100, 32, args.seconds * 2)
            command = [sys.executable, __file__, "--role", "gaps", "--load", json.dumps(asdict(load))]
            child = subprocess.Popen(command, stdout=subprocess.PIPE)
            answers = beside(port, prompt, args.seconds * 2 - 1) if prompt is not None else []
            output, _ = child.communicate()
            row = json.loads(output)
            if answers:
                row["big_requests"] = len(answers)
                row["big_status"] = sorted({status for status, _ in answers})
                row["big_ms_p50"] = statistics.median(ms for _, ms in answers)
                row["big_ms_max"] = max(ms for _, ms in answers)
            found[name] = row
        found["rss_mb"] = rss_mb(pid)
    return found


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


SCENARIOS = {
    "costs": scenario_costs,
    "paced": scenario_paced,
    "streams": scenario_streams,
    "long": scenario_long,
    "memory": scenario_memory,
}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def play(load: Load, keep_gaps: bool) -> Result:
    return await Runner(load, keep_gaps).run()


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
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    parser.add_argument("--registry", default="", help=argparse.SUPPRESS)
    parser.add_argument("--step-ms", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--load", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "workers":
        uvloop.run(run_workers(args))
    elif args.role == "load":
        result = uvloop.run(play(Load(**json.loads(args.load)), False))
        print(json.dumps(asdict(result)))
    elif args.role == "gaps":
        result = uvloop.run(play(Load(**json.loads(args.load)), True))
        gaps = result.gaps_ms
        shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
        row = {f"gap_{name}_ms": percentile(gaps, share) for name, share in shares.items()}
        print(json.dumps({**row, "gap_max_ms": max(gaps), "errors": result.errors, "requests": result.requests}))
    else:
        found = {"load_average": os.getloadavg()}
        for name in args.scenarios or SCENARIOS:
            found[name] = SCENARIOS[name](args)
            print(json.dumps({name: found[name]}, indent=1), file=sys.stderr)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
