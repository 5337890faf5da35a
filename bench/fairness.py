"""Fairness between tenants, live: `headwater serve` with mocker workers, a keyring, and two tenants.

    python bench/fairness.py [--seconds 20] [--rate 4] [--workers 2]

First the neighbour sends as much as makes the workers busy (80 % by default), then a hundred times as much as we do:
our p99 time to the first token may rise by a fifth. Then both send far more than can be served, with weights 3 and 1:
their worker time must be in that proportion within 5 %. Prints both; the exit code says whether it held.
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "fuzz"))

from served import Server, serving

MODEL = "smollm2-135m-instruct"
OUTPUT_TOKENS = 24
PROMPT_TOKENS = (250, 1500)
PREFILL_MS_PER_TOKEN = 0.4
_WARM_S = 8.0


@dataclass
class Tenant:
    name: str
    key: str
    ttft_ms: list[float] = field(default_factory=list)
    served_tokens: int = 0
    """Of prompts whose first token came after the first seconds."""
    since: float = field(default_factory=time.perf_counter)
    refused: int = 0
    failed: int = 0

    def p99(self) -> float:
        ordered = sorted(self.ttft_ms)
        return ordered[max(0, int(0.99 * len(ordered)) - 1)] if ordered else float("nan")


def headwater(*argv: str) -> str:
    return subprocess.run([sys.executable, "-m", "headwater", *argv], check=True, capture_output=True, text=True).stdout


def tenants(folder: Path, *weights: float) -> tuple[Path, list[Tenant]]:
    path, made = folder / "keys.json", []
    for name, weight in zip(("ours", "other"), weights, strict=True):
        key = json.loads(headwater("keys", "create", "--keys", str(path), "--tenant", name, "--json"))["key"]
        headwater("keys", "tenant", name, "--keys", str(path), "--weight", str(weight))
        made.append(Tenant(name, key))
    return path, made


async def ask(server: Server, tenant: Tenant, rng: random.Random) -> None:
    await ask_ids(server, tenant, [rng.randrange(100, 40_000) for _ in range(rng.randrange(*PROMPT_TOKENS))])


async def ask_ids(server: Server, tenant: Tenant, ids: list[int]) -> None:
    fields = {"model": MODEL, "prompt": ids, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {tenant.key}\r\nconnection: close\r\n"
    began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = (await asyncio.wait_for(reader.readline(), 120)).split()
        if status[1:2] != [b"200"]:
            tenant.refused += 1
        else:
            await asyncio.wait_for(reader.readuntil(b"data: "), 120)
            if (await asyncio.wait_for(reader.readexactly(8), 120)).startswith(b'{"error"'):
                tenant.refused += 1
                return
            now = time.perf_counter()
            tenant.ttft_ms.append(1e3 * (now - began))
            tenant.served_tokens += len(ids) if now - tenant.since > _WARM_S else 0
            await asyncio.wait_for(reader.read(-1), 120)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        tenant.failed += 1
    finally:
        with contextlib.suppress(UnboundLocalError):
            writer.close()


async def send(server: Server, tenant: Tenant, rate: float, seconds: float, seed: int) -> None:
    """Requests at random times, whatever becomes of the others."""
    rng, running = random.Random(seed), set()
    tenant.since = time.perf_counter()
    ends = tenant.since + seconds
    while time.perf_counter() < ends:
        await asyncio.sleep(rng.expovariate(rate))
        if len(running) < 1500:
            task = asyncio.ensure_future(ask(server, tenant, rng))
            running.add(task)
            task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def measure(args: argparse.Namespace, weights: Sequence[float], rates: Sequence[float]) -> list[Tenant]:
    with tempfile.TemporaryDirectory() as folder:
        path, both = tenants(Path(folder), *weights)
        flags = ["--mocker-speedup", "1", "--mocker-prefill-ms-per-token", str(PREFILL_MS_PER_TOKEN)]
        flags += ["--workers", str(args.workers), "--keys", str(path)]
        flags += ["--max-num-batched-tokens", str(args.step_tokens)]
        with serving(None, *flags) as server:
            seeds = range(len(both))
            work = [send(server, t, rate, args.seconds, seed) for t, rate, seed in zip(both, rates, seeds, strict=True)]
            asyncio.run(_all(work))
    return both


async def _all(work: Sequence[object]) -> None:
    await asyncio.gather(*work)  # type: ignore[call-overload]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=0.5, help="our requests per second")
    parser.add_argument("--neighbour", type=float, default=3.5, help="the neighbour's, usually")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-tokens", type=int, default=512, help="of a full step of a worker")
    args = parser.parse_args()
    fine = True
    usual = float("nan")
    print(f"{'neighbour sends':<18}{'our p50 ms':>12}{'our p99 ms':>12}{'served':>8}{'their p99 ms':>14}{'refused':>9}")
    for label, rate in (("usual", args.neighbour), ("100 x ours", 100 * args.rate)):
        ours, other = measure(args, (1, 1), (args.rate, rate))
        p50 = sorted(ours.ttft_ms)[len(ours.ttft_ms) // 2]
        row = f"{label:<18}{p50:>12.0f}{ours.p99():>12.0f}{len(ours.ttft_ms):>8}{other.p99():>14.0f}{other.refused:>9}"
        print(row, flush=True)
        fine = fine and ours.failed == ours.refused == 0 and not ours.p99() > 1.2 * usual
        usual = ours.p99() if label == "usual" else usual
    ours, other = measure(args, (3, 1), (20.0, 20.0))
    share = ours.served_tokens / max(1, other.served_tokens)
    print(f"worker time of weights 3 : 1 as {share:.2f} : 1")
    return 0 if fine and abs(share / 3 - 1) <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
