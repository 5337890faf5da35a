"""How soon is everything back? A frontend restarted over a large index, and etcd after an outage.

    python bench/recovery.py [--blocks 1000000] [--restarts 3] [--etcd-outage 60]

The frontend is a process of its own before four mock workers that hold the blocks; the clock runs from the start of the
process until it can serve and its index knows every block. The etcd (from the PATH) is killed, so that leases run out
meanwhile, and started again; the clock runs from its first healthy answer until a frontend's picture is whole and the
worker is registered again. How soon killed and hanging workers are noticed, `bench/chaos.py` says.
"""

import argparse
import asyncio
import contextlib
import os
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import uvloop
from own_cluster import wait_ready
from processes import Etcd, cpu_s, free_port, rss_mb, running

from headwater.config.schema import EngineConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.kv.identity import chain_block_ids
from headwater.protocol.events import BlocksStored, WorkerEvent
from headwater.runtime.endpoints import parse_bind
from headwater.runtime.planes import ZmqPlanes
from headwater.runtime.registry.base import InstanceGone, InstancePut, Outage
from headwater.runtime.registry.conformance import example_instance
from headwater.runtime.registry.open import open_registry
from headwater.worker.shell import ShellConfig, WorkerShell

WORKERS = 4
CHAIN_BLOCKS = 250
BLOCK_SIZE = 16


class FullEngine(MockerEngine):
    """A mock engine that says it holds so many blocks."""

    def __init__(self, config: EngineConfig, number: int, num_blocks: int) -> None:
        super().__init__(config)
        self._stored = [BlocksStored(chain_of(number, chain)) for chain in range(num_blocks // CHAIN_BLOCKS)]

    def resident_blocks(self) -> list[WorkerEvent]:
        return list(self._stored)


def chain_of(number: int, chain: int) -> bytes:
    tokens = (number * 1_000_003 + chain).to_bytes(4, "little") * (CHAIN_BLOCKS * BLOCK_SIZE)
    return chain_block_ids(b"recovery", tokens, BLOCK_SIZE)


async def run_workers(registry_url: str, num_blocks: int) -> None:
    config = EngineConfig(engine="mocker", served_model_name=("bench",), num_kv_blocks=num_blocks // WORKERS + 1)
    registry, planes = open_registry(registry_url), ZmqPlanes(parse_bind("ipc"))
    shells = [
        WorkerShell(FullEngine(config, i, num_blocks // WORKERS), registry, planes, ShellConfig(f"w{i}", "mocker", "b"))
        for i in range(WORKERS)
    ]
    await asyncio.gather(*(shell.run(lambda progress: None) for shell in shells))


def index_blocks(port: int) -> int:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        found = re.search(r"^headwater_router_index_blocks (\S+)", answer.read().decode(), re.MULTILINE)
        return int(float(found[1])) if found else 0
    return 0


def restart_frontend(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="hw-rec-") as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
        registry = f"file://{folder}/registry"
        workers = [sys.executable, __file__, "--workers-of", registry, "--blocks", str(args.blocks)]
        with running([workers], environment, None):
            for number in range(args.restarts + 1):
                port = free_port()
                frontend = [sys.executable, "-m", "headwater", "frontend", "--registry", registry, "--port", str(port)]
                began = time.monotonic()
                with running([frontend], environment, None) as children:
                    wait_ready(port, children)
                    while index_blocks(port) < args.blocks // CHAIN_BLOCKS // WORKERS * WORKERS * CHAIN_BLOCKS:
                        time.sleep(0.02)
                    took_s = time.monotonic() - began
                    if number:
                        pid = children[0].pid
                        figures = f"{took_s:.2f} s, {cpu_s(pid):.2f} s of CPU, {rss_mb(pid):.0f} MB"
                        print(f"frontend with {args.blocks:,} blocks: {figures}", flush=True)


async def etcd_outage(outage_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="hw-etcd-") as folder:
        etcd = Etcd(Path(folder))
        etcd.start()
        try:
            await measure_outage(etcd, outage_s)
        finally:
            etcd.kill()


async def measure_outage(etcd: Etcd, outage_s: float) -> None:
    owner, reader = (open_registry(f"etcd://127.0.0.1:{etcd.port}/bench") for _ in range(2))
    gone: list[str] = []
    await owner.register(example_instance())
    watch = reader.watch()
    while not isinstance(await anext(watch), InstancePut):
        pass
    etcd.kill()
    await asyncio.sleep(outage_s)
    etcd.start()
    began = time.monotonic()
    async for event in watch:
        if isinstance(event, InstanceGone):
            gone.append(event.worker_id)
        if isinstance(event, Outage) and event.reachable:
            break
    while not await reader.instances():  # noqa: ASYNC110 - it is another process that we wait for
        await asyncio.sleep(0.02)
    took_s = time.monotonic() - began
    print(f"etcd away for {outage_s:g} s: all back {took_s:.2f} s after it, {len(gone)} workers taken for gone")
    await owner.close()
    await reader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--etcd-outage", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--workers-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.workers_of:
        uvloop.run(run_workers(args.workers_of, args.blocks))
        return
    restart_frontend(args)
    asyncio.run(etcd_outage(args.etcd_outage))


if __name__ == "__main__":
    main()
