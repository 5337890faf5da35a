"""Does the KV store pay? The real model with a small device cache: without a store, and over one tier after the other.

    python bench/kv_pays.py [--requests 60] [--rounds 2] [--object s3://bucket/prefix | --seaweedfs] [--json]

`rag`: every request is one of twelve documents and a question of its own; the device holds two of them.
`turns`: eight conversations take turns, each with all of its history; the device holds two of them.
One request at a time, as token ids, greedy. The same requests go to every variant, variants take turns, and figures are
medians over rounds. Reuse is the part of prompt tokens that was not computed, as the server tells the client. A slow
disk reads and writes a block in several times what the model takes to compute it.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from processes import free_port, running

from object_servers import seaweedfs

DEVICE_BLOCKS = 110
DOCUMENT_TOKENS = 640
QUESTION_TOKENS = 24
OUTPUT_TOKENS = 16
BLOCK_BYTES = 737_280
SLOW_DISK_MB_PER_S = 5
SLOW_DISK = Path(__file__).parent / "slow_disk"
WAIT_S = 180.0


class Figures(NamedTuple):
    ttft_ms: float
    ttft_p95_ms: float
    seconds: float
    reuse: float
    texts: tuple[str, ...]


def rag(requests: int, random: Random) -> Iterator[list[int]]:
    documents = [words(random, DOCUMENT_TOKENS) for _ in range(12)]
    for _ in range(requests):
        yield random.choice(documents) + words(random, QUESTION_TOKENS)


def turns(requests: int, random: Random) -> Iterator[list[int]]:
    histories = [words(random, 300) for _ in range(8)]
    for number in range(requests):
        history = histories[number % len(histories)]
        history += words(random, 48)
        yield list(history)


def words(random: Random, count: int) -> list[int]:
    return [random.randrange(1_000, 40_000) for _ in range(count)]


WORKLOADS = {"rag": rag, "turns": turns}


@contextlib.contextmanager
def server(flags: Sequence[str], folder: Path, *, slow_disk: bool) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "headwater", "serve", "--port", str(port), "--device", "cpu", "--threads", "1"]
    command += ["--num-kv-blocks", str(DEVICE_BLOCKS), *flags]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    if slow_disk:
        environment |= {"PYTHONPATH": str(SLOW_DISK), "SLOW_DISK_MB_PER_S": str(SLOW_DISK_MB_PER_S)}
    url = f"http://127.0.0.1:{port}"
    with running([command], environment, str(folder / "log")) as (child,):
        deadline = time.monotonic() + WAIT_S
        while not ready(url):
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not become ready:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield url


def ready(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError):
        return bool(urllib.request.urlopen(f"{url}/ready", timeout=2).status == 200)
    return False


def ask(url: str, prompt: list[int]) -> tuple[float, dict[str, Any], str]:
    """Time to the first token in ms, usage, and the text."""
    body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first_ms, usage, text = time.perf_counter(), 0.0, {}, ""
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first_ms = first_ms or 1e3 * (time.perf_counter() - began)
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            text += "".join(choice["text"] for choice in chunk["choices"])
    return first_ms, usage, text


def measure(url: str, prompts: Sequence[list[int]]) -> Figures:
    ask(url, words(Random(99), 64))
    began = time.perf_counter()
    answers = [ask(url, prompt) for prompt in prompts]
    seconds = time.perf_counter() - began
    times = sorted(first_ms for first_ms, _, _ in answers)
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for _, usage, _ in answers)
    total = sum(map(len, prompts))
    texts = tuple(text for _, _, text in answers)
    return Figures(fmean(times), times[int(0.95 * (len(times) - 1))], seconds, cached / total, texts)


def variants(object_url: str | None) -> dict[str, list[str]]:
    """Flags of each; `{folder}` and `{prefix}` are its own."""

    def size(blocks: int) -> str:
        return str(blocks * BLOCK_BYTES)

    disk = ["--kv-disk", f"{{folder}}/disk:{size(1200)}", "--kv-admission", "all"]
    found = {
        "none": [],
        "host": ["--kv-host", size(1200)],
        "small host + disk": ["--kv-host", size(160), *disk],
        "small host + slow disk": ["--kv-host", size(160), *disk],
    }
    if object_url:
        cold = ["--kv-object", object_url, "--kv-admission", "all"]
        found["small host + object"] = ["--kv-host", size(160), *cold]
        found["small host + disk + object"] = ["--kv-host", size(160), *disk, *cold]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    bucket = parser.add_mutually_exclusive_group()
    bucket.add_argument("--object", help="URL of a bucket for the object tier")
    bucket.add_argument("--seaweedfs", action="store_true", help="one of SeaweedFS on this machine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print(f"{'workload':9} {'store':28} {'TTFT ms':>9} {'p95':>9} {'total s':>8} {'reuse':>7} {'TTFT x':>7} same")
    with bucket_of(args) as object_url:
        for name, make in WORKLOADS.items():
            rounds: dict[str, list[Figures]] = {}
            for number in range(args.rounds):
                prompts = list(make(args.requests, Random(number)))
                for variant, flags in variants(object_url).items():
                    with tempfile.TemporaryDirectory(prefix="hw-pays-") as folder:
                        mine = [flag.format(folder=folder, prefix=Path(folder).name) for flag in flags]
                        with server(mine, Path(folder), slow_disk="slow" in variant) as url:
                            rounds.setdefault(variant, []).append(measure(url, prompts))
            report(name, rounds, as_json=args.json)


@contextlib.contextmanager
def bucket_of(args: argparse.Namespace) -> Iterator[str | None]:
    """The URL of the object tier; where it has `{prefix}`, each run gets a place of its own."""
    if not args.seaweedfs:
        yield args.object
        return
    with tempfile.TemporaryDirectory(prefix="hw-pays-s3-") as folder, seaweedfs(Path(folder)) as s3:
        os.environ.update(s3.environment)
        yield s3.url("{prefix}", more="cap=1GiB")


def report(name: str, rounds: dict[str, list[Figures]], *, as_json: bool) -> None:
    base = median(figures.ttft_ms for figures in rounds["none"])
    for variant, all_figures in rounds.items():
        ttft_ms, p95_ms, seconds, reuse = (median(column) for column in zip(*(f[:4] for f in all_figures), strict=True))
        same = all(mine.texts == plain.texts for mine, plain in zip(all_figures, rounds["none"], strict=True))
        if as_json:
            row = {"workload": name, "store": variant, "ttft_ms": ttft_ms, "ttft_p95_ms": p95_ms, "seconds": seconds}
            print(json.dumps(row | {"reuse": reuse, "same_output": same}), flush=True)
        else:
            print(
                f"{name:9} {variant:28} {ttft_ms:9.1f} {p95_ms:9.1f} {seconds:8.1f} {reuse:7.1%} "
                f"{base / ttft_ms:7.2f} {'yes' if same else 'NO'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
