"""Headwater's frontend before mock workers, part by part, so that each process can be measured by itself.

    python bench/own_cluster.py --registry file:///FOLDER --workers 4     the workers' process

Several workers live in one process, each with the real mocker engine behind the real planes, which is how NVIDIA
Dynamo starts its mockers too.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop
from processes import Process, free_port, running

from headwater.config.schema import EngineConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.runtime.endpoints import parse_bind
from headwater.runtime.planes import ZmqPlanes
from headwater.runtime.registry.open import open_registry
from headwater.worker.shell import ShellConfig, WorkerShell


@dataclass(frozen=True)
class ClusterOptions:
    workers: int = 4
    step_ms: float = 0.0
    """Of every decode step; 0: no delay anywhere."""
    router_policy: str = "round_robin"
    frontend_flags: tuple[str, ...] = ()
    log: str | None = None


@contextlib.contextmanager
def cluster(options: ClusterOptions) -> Iterator[tuple[int, int]]:
    """(port, pid of the frontend), once it is ready."""
    with started(options) as (port, children):
        wait_ready(port, children)
        yield port, children[1].pid


@contextlib.contextmanager
def started(options: ClusterOptions) -> Iterator[tuple[int, list[Process]]]:
    """(port, [workers, frontend]) as soon as the processes exist."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
        registry = f"file://{folder}/registry"
        workers = [sys.executable, __file__, "--registry", registry]
        workers += ["--workers", str(options.workers), "--step-ms", str(options.step_ms)]
        frontend = [sys.executable, "-m", "headwater", "frontend", "--registry", registry, "--port", str(port)]
        frontend += ["--router-policy", options.router_policy, *options.frontend_flags]
        with running([workers, frontend], environment, options.log) as children:
            yield port, children


def wait_ready(port: int, children: list[Process]) -> None:
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


async def run_workers(registry_url: str, count: int, step_ms: float) -> None:
    config = EngineConfig(
        engine="mocker",
        served_model_name=("bench",),
        max_num_seqs=1024,
        max_waiting=8192,
        num_kv_blocks=16_384,
        max_model_len=40_000,
        mocker_speedup=1.0 if step_ms > 0 else 0.0,
        mocker_prefill_ms_per_token=0.0001,
        mocker_decode_base_ms=step_ms,
        mocker_decode_ms_per_sequence=0.0,
        mocker_decode_ms_per_kv_token=0.0,
    )
    registry = open_registry(registry_url)
    planes = ZmqPlanes(parse_bind("ipc"))
    shells = [
        WorkerShell(MockerEngine(config), registry, planes, ShellConfig(f"w{i}", "mocker", "bench", drain_timeout_s=1))
        for i in range(count)
    ]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(shell.run(lambda progress: None)) for shell in shells]
    await stop.wait()
    for shell in shells:
        shell.stop()
    await asyncio.gather(*tasks, return_exceptions=True)
    await registry.close()
    await planes.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=0.0)
    args = parser.parse_args()
    uvloop.run(run_workers(args.registry, args.workers, args.step_ms))


if __name__ == "__main__":
    main()
