"""A stream whose vLLM worker is killed in the middle goes on at another one. See `real_vllm`."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from real_vllm import VLLM_PYTHON, needs_vllm, tiny_model

START_S = 240.0
TOKENS = 300
FLAGS = ["--engine", "vllm", "--workers", "2", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
FLAGS += ["--block-size", "32", "--num-kv-blocks", "100", "--max-num-seqs", "4", "--served-model-name", "tiny"]

pytestmark = needs_vllm(600)


@contextmanager
def served(model: Path, run_folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"XDG_RUNTIME_DIR": str(run_folder)}
    command = [str(VLLM_PYTHON), "-m", "headwater", "serve", str(model), "--port", str(port), *FLAGS]
    with (run_folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def workers(url: str) -> list[dict[str, Any]]:
    with suppress(OSError), urllib.request.urlopen(f"{url}/debug/cluster", timeout=5) as answer:
        found: list[dict[str, Any]] = json.load(answer)["workers"]
        return found
    return []


def streamed(url: str, prompt: list[int]) -> Iterator[dict[str, Any]]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    sent = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(sent, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def test_a_stream_goes_on_when_its_worker_is_killed(tmp_path: Path, run_folder: Path) -> None:
    prompt = [3 + number * 7 % 90 for number in range(50)]
    with served(tiny_model(tmp_path), run_folder) as url:
        deadline = time.monotonic() + START_S
        while sum(worker["state"] == "ready" for worker in workers(url)) < 2:
            assert time.monotonic() < deadline, (run_folder / "serve.log").read_text()[-3000:]
            time.sleep(0.5)
        unbroken = [token for event in streamed(url, prompt) for token in token_ids(event)]
        got: list[int] = []
        usage: dict[str, Any] = {}
        killed = 0
        for event in streamed(url, prompt):
            got += token_ids(event)
            usage = event.get("usage") or usage
            if len(got) > 40 and not killed:
                (killed,) = [worker["pid"] for worker in workers(url) if worker["booked"]["sequences"]]
                os.kill(killed, signal.SIGKILL)
        assert killed
        assert usage["completion_tokens"] == len(got) == TOKENS
        assert got == unbroken, "of this model; vLLM's batches are not invariant"


def token_ids(event: dict[str, Any]) -> list[int]:
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
