"""Is the output the same with the store as without, while every tier gives up blocks and serves others?

    python bench/kv_identity.py [--requests 500] [--json]

The real model, requests of several kinds about some of 40 documents, several at a time: first without a store, then
with a tiny device cache over a tiny host, disk and object tier (SeaweedFS on this machine), none of which holds all.
Both runs get the same requests; texts, stop reasons, numbers of tokens and log probabilities have to be equal to the
last bit.
Exit code 1 if anything differs, or if a tier evicted nothing or served nothing: then nothing was shown.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from kv_pays import BLOCK_BYTES, server, words

from headwater.kv.node.client import StoreClient
from headwater.kv.node.wire import TierStatus
from object_servers import ObjectServer, seaweedfs

DOCUMENTS = 40
DOCUMENT_TOKENS = 190
DEVICE_BLOCKS = 48
HOST_BLOCKS, DISK_BLOCKS, OBJECT_BLOCKS = 60, 110, 240
BLOCK_TOKENS = 16
AT_ONCE = 3
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
MODEL = "smollm2-135m-instruct"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    "penalties": {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "log probabilities": {"temperature": 0, "logprobs": 3},
    "stop": {"temperature": 0.7, "seed": 7, "stop": [" the", ","]},
    "structured": {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
}


def requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Kinds and bodies: some documents are asked about much more often than others."""
    random = Random(1)
    documents = [words(random, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    made: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        document = documents[min(int(random.paretovariate(0.6)) - 1, number) % DOCUMENTS]
        part = document[: random.choice((DOCUMENT_TOKENS, DOCUMENT_TOKENS, DOCUMENT_TOKENS // 2))]
        prompt = part + words(random, random.randint(1, 20))
        made.append((kind, {"model": MODEL, "prompt": prompt, "max_tokens": random.randint(1, 8), **KINDS[kind]}))
    return made


def ask(url: str, body: dict[str, Any]) -> tuple[Any, int]:
    """What has to be the same, and how many tokens of the prompt were not computed."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return (answer["choices"], usage["completion_tokens"]), cached


class Run(NamedTuple):
    answers: list[Any]
    cached_blocks: int
    seconds: float
    loaded_blocks: int
    tiers: dict[str, TierStatus]


def run(flags: Sequence[str], folder: Path, bodies: Sequence[dict[str, Any]]) -> Run:
    folder.mkdir()
    device = ["--num-kv-blocks", str(DEVICE_BLOCKS), "--max-model-len", "256", "--max-num-seqs", str(AT_ONCE)]
    with server([*device, *flags], folder) as url, ThreadPoolExecutor(AT_ONCE) as askers:
        began = time.monotonic()
        done = list(askers.map(lambda body: ask(url, body), bodies))
        seconds = time.monotonic() - began
        time.sleep(2.0)  # the last reports are on their way
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
        tiers = asyncio.run(tiers_of(folder)) if flags else {}
    loaded = re.search(r"^headwater_worker_store_blocks_loaded_total.* (\S+)$", metrics, re.MULTILINE)
    return Run(
        [answer for answer, _ in done],
        sum(cached for _, cached in done) // BLOCK_TOKENS,
        seconds,
        int(float(loaded[1])) if loaded else 0,
        tiers,
    )


async def tiers_of(folder: Path) -> dict[str, TierStatus]:
    (socket,) = await asyncio.to_thread(lambda: list(folder.glob("headwater-*/serve-*/kv.sock")))
    client = StoreClient(socket, "bench")
    await client.start(patience_s=30.0)
    report = await client.status()
    await client.close()
    return {tier.tier: tier for tier in report.tiers}


def movements(made: Sequence[dict[str, Any]], done: Run) -> dict[str, tuple[int, int]]:
    """Per tier: blocks evicted and served. Of the device: what came in beyond what it holds, and was not loaded."""
    full = sum(len(body["prompt"]) // BLOCK_TOKENS for body in made)
    came = full - done.cached_blocks + done.loaded_blocks
    moved = {"device": (came - DEVICE_BLOCKS, done.cached_blocks - done.loaded_blocks)}
    return moved | {name: (tier.num_evicted, tier.num_hits) for name, tier in done.tiers.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kinds, bodies = zip(*requests(args.requests), strict=True)
    with tempfile.TemporaryDirectory(prefix="hw-same-") as name, contextlib.ExitStack() as held:
        root = Path(name)
        plain = run([], root / "plain", bodies)
        (root / "s3").mkdir()
        s3 = held.enter_context(seaweedfs(root / "s3"))
        os.environ.update(s3.environment)
        kept = run(store_flags(root, s3), root / "store", bodies)
    differing = [kind for kind, one, other in zip(kinds, plain.answers, kept.answers, strict=True) if one != other]
    moved = movements(bodies, kept)
    idle = [name for name, counts in moved.items() if min(counts) <= 0]
    report = {
        "requests": len(bodies),
        "by_kind": Counter(kinds),
        "differing": Counter(differing),
        "seconds": {"without": plain.seconds, "with": kept.seconds},
        "cached_blocks": {"without": plain.cached_blocks, "with": kept.cached_blocks},
        "loaded_blocks": kept.loaded_blocks,
        "tiers": {name: {"evicted": gone, "served": served} for name, (gone, served) in moved.items()},
    }
    if args.json:
        print(json.dumps(report))
    else:
        show(report)
    return 1 if differing or idle or len(moved) != 4 else 0


def store_flags(root: Path, s3: ObjectServer) -> list[str]:
    def size(blocks: int) -> str:
        return str(blocks * BLOCK_BYTES)

    flags = ["--kv-host", size(HOST_BLOCKS), "--kv-disk", f"{root / 'disk'}:{size(DISK_BLOCKS)}"]
    url = s3.url("same", more=f"cap={size(OBJECT_BLOCKS)}")
    return [*flags, "--kv-object", url, "--kv-admission", "all"]


def show(report: dict[str, Any]) -> None:
    for kind, count in report["by_kind"].items():
        print(f"{kind:20} {count:4} requests, {report['differing'][kind]} differ")
    for name, counts in report["tiers"].items():
        print(f"{name:20} {counts['evicted']:6} blocks evicted, {counts['served']:6} served")
    for what in ("without", "with"):
        seconds, cached = report["seconds"][what], report["cached_blocks"][what]
        print(f"{what + ' the store':20} {seconds:6.1f} s, {cached:6} blocks of prompts not computed")


if __name__ == "__main__":
    sys.exit(main())
