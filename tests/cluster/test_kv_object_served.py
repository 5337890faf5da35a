"""A served graph with an object tier: found again by the next life, and no matter to requests when it fails."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from test_serve_command import serve

from headwater.kv.block import ROOT, Family
from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import Piece
from object_servers import ObjectServer

FLAGS = ["--engine", "mocker", "--mocker-speedup", "0", "--port", "0", "--kv-host", "64MiB", "--kv-admission", "all"]
PROMPT = " ".join(f"word{number}" for number in range(600))


@pytest.fixture
def environment(run_folder: Path, s3_server: ObjectServer) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    return {**kept, **s3_server.environment, "XDG_RUNTIME_DIR": str(run_folder)}


def complete(url: str, prompt: str = PROMPT) -> dict[str, Any]:
    """The usage of one request, which must succeed."""
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        usage: dict[str, Any] = json.load(response)["usage"]
    return usage


def kv(environment: dict[str, str], *arguments: str) -> Any:
    command = [sys.executable, "-m", "headwater", "kv", *arguments, "--json"]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)


def tier_of(environment: dict[str, str], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(tier for tier in kv(environment, "stat")["tiers"] if tier["tier"] == name)
    return found


def until(environment: dict[str, str], key: str, least: int) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while (tier := tier_of(environment, "object"))[key] < least:
        assert time.monotonic() < deadline, tier
        time.sleep(0.1)
    return tier


def test_the_next_life_of_a_graph_loads_from_the_bucket(environment: dict[str, str], s3_server: ObjectServer) -> None:
    flags = [*FLAGS, "--kv-object", s3_server.url("served")]
    with serve(environment, *flags) as first:
        usage = complete(first.url)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        blocks = usage["prompt_tokens"] // 16
        until(environment, "num_stored", blocks)
        rows = sorted(kv(environment, "ls", "--tier", "host"), key=lambda row: row["position"])[:blocks]
        assert first.end(signal.SIGTERM) == 0
    family = Family(rows[0]["model"], rows[0]["layout"], rows[0]["tenant"], rows[0]["payload_bytes"])
    chain = Piece(family, b"".join(bytes.fromhex(row["id"]) for row in rows), 0, ROOT)

    async def ask(socket: Path) -> None:
        """What the first request for it would begin, with more time than a fast engine gives it."""
        client = StoreClient(socket, "test")
        await client.start(patience_s=10.0)
        (run,) = await client.match(chain, timeout_s=5.0)
        assert (run.tier, run.num_blocks) == ("object", blocks // 64 * 64)
        await client.close()

    with serve(environment, *flags) as second:
        url = second.url
        (socket,) = Path(environment["XDG_RUNTIME_DIR"]).glob("headwater-*/serve-*/kv.sock")
        asyncio.run(ask(socket))
        assert complete(url)["prompt_tokens_details"]["cached_tokens"] == blocks // 64 * 64 * 16
        assert second.end(signal.SIGTERM) == 0


def test_a_wrong_bucket_costs_no_request(environment: dict[str, str], s3_server: ObjectServer) -> None:
    with serve(environment, *FLAGS, "--kv-object", s3_server.url("served", bucket="no-such-bucket")) as running:
        for _ in range(3):
            complete(running.url)
        deadline = time.monotonic() + 30
        while "no such bucket" not in tier_of(environment, "object")["problem"]:
            assert time.monotonic() < deadline, (kv(environment, "stat")["tiers"], running.err)
            # Something new to write: on a busy machine the first attempt may have failed for want of an answer.
            complete(running.url, f"{time.monotonic()} {PROMPT}")
        running.until(lambda: "--kv-object" in running.err)
        assert running.end(signal.SIGTERM) == 0
