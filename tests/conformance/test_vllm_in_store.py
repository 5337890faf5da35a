"""Real vLLM below a worker of ours, with the KV store of its node. See `real_vllm`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.kv.node.agent import StoreAgent
from kv_process import store_process
from real_vllm import VLLM_PYTHON, needs_vllm, tiny_model

TOKENS, START_S = 600, 300.0

pytestmark = needs_vllm(900)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def served(model: Path, store: Path, folder: Path) -> Iterator[str]:
    """A whole life of a cluster with one vLLM worker: its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--served-model-name", "m", "--kv-socket", str(store)]
    flags += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command = [str(VLLM_PYTHON), "-m", "headwater", "serve", "--engine", "vllm", "--model", str(model), *flags]
    own = {"XDG_RUNTIME_DIR": str(folder), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = (folder / "log").open("ab")
    with log, subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + START_S
            while not ready(port):
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def ready(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return bool(json.load(answer)["workers"]["ready"])
    return False


def ask(url: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    body["nvext"] = {"extra_fields": ["plan"]}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def eventually_stored(store: Path) -> None:
    with StoreAgent(store, "test") as agent:
        deadline = time.monotonic() + 20
        while not agent._call(agent.client.status()).result(5).tiers[0].num_blocks:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_restarted_cluster_counts_on_what_the_store_has_and_gets_it(model: Path, run_folder: Path) -> None:
    """Nobody but the store has told the second life's router of the prompt."""
    store, prompt = run_folder / "kv.sock", [20 + (number * 7) % 170 for number in range(TOKENS)]
    with store_process(store):
        with served(model, store, run_folder) as url:
            computed = ask(url, prompt)
        eventually_stored(store)
        with served(model, store, run_folder) as url:
            loaded = ask(url, prompt)
            other = ask(url, prompt, cache_salt="another")
    before, after, salted = (answer["nvext"]["plan"][0] for answer in (computed, loaded, other))
    assert (before["predicted"]["cached_tokens"], before["actual"]["cached_tokens"]) == (0, 0)
    found = after["actual"]["cached_tokens"]
    assert TOKENS // 2 < found < TOKENS
    assert after["predicted"]["cached_tokens"] == int(0.9 * found), "known before, and worth less than on the device"
    assert loaded["choices"] == computed["choices"]
    assert (salted["predicted"]["cached_tokens"], salted["actual"]["cached_tokens"]) == (0, 0), "a salt of its own"
