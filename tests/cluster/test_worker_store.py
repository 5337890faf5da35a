"""A worker is not ready before the KV store that its own graph is starting: what it computed by then would be missing
there. For a store that is somebody else's it does not wait long."""

import asyncio
from pathlib import Path

import pytest

from headwater.clock import RealClock
from headwater.config.schema import EngineConfig, KvConfig, RuntimeConfig, ServeConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.kv.node.open import NodeOptions, open_store
from headwater.kv.node.server import Server
from headwater.kv.stores.ledgered import TierOptions
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore
from headwater.worker import process
from headwater.worker.shell import WorkerShell


def test_the_store_of_its_graph_is_waited_for_and_another_not(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_OTHER_STORE_S", 0.05)
    socket = run_folder / "kv.sock"

    async def check() -> None:
        cluster = MemoryStore()
        registry = MemoryRegistry(cluster)
        planes = InprocPlanes()
        shells, running = [], []
        for kv in (KvConfig(kv_host=16 << 20, kv_socket=str(socket)), KvConfig(kv_socket=str(socket))):
            config = ServeConfig(
                engine=EngineConfig(engine="mocker", num_kv_blocks=16), runtime=RuntimeConfig(drain_timeout=1.0), kv=kv
            )
            about = process._shell_config(config, len(shells))
            shells.append(WorkerShell(MockerEngine(config.engine), registry, planes, about))
            running.append(asyncio.create_task(shells[-1].run(lambda progress: None)))

        def states() -> list[str]:
            found = {entry.worker_id.rsplit("-", 1)[0]: entry.state for entry in cluster.feed.instances.values()}
            return [found.get(f"worker-{index}", "") for index in range(2)]

        await eventually(lambda: states()[1] == "ready", "the second goes on without", 10)
        await asyncio.sleep(0.3)
        assert states()[0] != "ready"
        clock = RealClock()
        store = open_store(NodeOptions(TierOptions(16 << 20)), clock)
        server = Server(store, socket, clock)
        store.start()
        server.start()
        await eventually(lambda: states() == ["ready", "ready"], "the store is there", 10)
        for shell in shells:
            shell.stop()
            shell.stop()
        await asyncio.gather(*running)
        await registry.close()
        await server.close()
        await store.close()

    run_leak_checked(check())
