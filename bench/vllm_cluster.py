"""Real vLLM for CPU under measurement: our clusters of it, its own server, and loads of token ids."""

import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from processes import Process, free_port, running

PEERS = Path(os.environ.get("PEERS", Path(__file__).parent.parent / "build/peers"))
VLLM_PYTHON = str(PEERS / "vllm/bin/python")
MODEL = os.environ.get("VLLM_MODEL", str(PEERS / "demo"))
VOCABULARY = int(os.environ.get("VLLM_VOCABULARY", "40000"))
"""Of another model: token ids are drawn from the third on."""
START_TIMEOUT_S = 240
COMMON = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--served-model-name", "demo"]


def prompts(count: int, prefix: int, tail: int, num_prefixes: int, seed: int) -> list[list[int]]:
    """Each begins with one of the prefixes, drawn at random."""
    random = Random(seed)
    heads = [drawn(random, prefix) for _ in range(num_prefixes)]
    return [[*random.choice(heads), *drawn(random, tail)] for _ in range(count)]


def drawn(random: Random, count: int) -> list[int]:
    return [random.randrange(3, VOCABULARY) for _ in range(count)]


def environment(folder: str, cores: str | None = None) -> dict[str, str]:
    own = {"XDG_RUNTIME_DIR": folder, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if cores is not None:
        own["VLLM_CPU_OMP_THREADS_BIND"] = cores
    return {**os.environ, **own}


@contextlib.contextmanager
def headwater(*flags: str, workers: int, log: str | None, cores: str | None = None) -> Iterator[tuple[str, Process]]:
    """`headwater serve` in vLLM's interpreter: its URL once all workers are ready, and its process."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder:
        command = [VLLM_PYTHON, "-m", "headwater", "serve", "--port", str(port), *flags]
        with running([command], environment(folder, cores), log) as (process,):
            await_ready(lambda: _ready_workers(port) >= workers, process)
            yield f"http://127.0.0.1:{port}", process


@contextlib.contextmanager
def vllm_server(*flags: str, log: str | None, cores: str | None = None) -> Iterator[tuple[str, Process]]:
    """vLLM's own server, KV events on."""
    port, events, replay = free_port(), free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, *COMMON, *flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--kv-events-config", json.dumps(config)]
    command += ["--gpu-memory-utilization", "0.2", "--disable-uvicorn-access-log"]
    with (
        tempfile.TemporaryDirectory(prefix="hw-bench-") as folder,
        running([command], environment(folder, cores), log) as (process,),
    ):
        await_ready(lambda: fetched(f"http://127.0.0.1:{port}/health") is not None, process)
        yield f"http://127.0.0.1:{port}", process


def api_cpu_s(root: int) -> float:
    """CPU seconds of a process and its descendants but for vLLM's engine core and workers, which compute."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    total, left = 0.0, [root]
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):
            if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::"):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")
                left += children.get(pid, [])
    return total


def await_ready(ready: Any, process: Process) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            if ready():
                time.sleep(1.0)
                return
        time.sleep(0.2)
    raise SystemExit("a server did not become ready; see --log FILE")


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def metric(url: str, name: str) -> float:
    """Summed over its labels."""
    lines = fetched(f"{url}/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def _ready_workers(port: int) -> int:
    return int(json.loads(fetched(f"http://127.0.0.1:{port}/health"))["workers"]["ready"])


if __name__ == "__main__":
    sys.exit("this is for other scripts to import")
