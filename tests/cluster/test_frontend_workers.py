"""A frontend before real worker processes (mocker engines): what clients notice when a worker dies or leaves."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from api_client import Connection
from scripted_worker import until

from etcd_fixture import EtcdServer, need_etcd
from headwater.config.schema import FrontendConfig, RouterConfig, ServeConfig
from headwater.frontend.process import Frontend
from headwater.runtime.endpoints import IpcEndpoints
from headwater.runtime.planes import ZmqPlanes
from headwater.runtime.registry.open import open_registry

NUM_TOKENS = 60
REQUEST = {
    "model": "mock",
    "messages": [{"role": "user", "content": "tell me"}],
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@dataclass
class Setting:
    frontend: Frontend
    port: int
    folder: Path
    registry_url: str
    workers: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    """By the id they registered under."""

    async def add_worker(self) -> str:
        command = [sys.executable, "-m", "headwater", "worker", "--engine", "mocker", "--served-model-name", "mock"]
        command += ["--registry", self.registry_url, "--mocker-decode-base-ms", "20"]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        child = await asyncio.create_subprocess_exec(
            *command, env=environment, stderr=asyncio.subprocess.DEVNULL, stdin=asyncio.subprocess.DEVNULL
        )
        view = self.frontend.view

        def registered() -> bool:
            return any(worker.instance.pid == child.pid and worker.eligible for worker in view.workers)

        self.workers[f"starting-{child.pid}"] = child
        await until(registered, 60)
        worker_id = next(worker.worker_id for worker in view.workers if worker.instance.pid == child.pid)
        self.workers[worker_id] = self.workers.pop(f"starting-{child.pid}")
        return worker_id

    def eligible(self) -> set[str]:
        return {worker.worker_id for worker in self.frontend.view.workers if worker.eligible}

    def booked(self) -> dict[str, int]:
        return {worker.worker_id: worker.booked_sequences for worker in self.frontend.view.workers}

    async def stream(self) -> str:
        """`complete`, or the code of the error that ended it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            connection = Connection(reader, writer)
            await connection.send("POST", "/v1/chat/completions", REQUEST)
            reply = await connection.read()
        finally:
            writer.close()
        if reply.status != 200:
            return str(reply.json()["error"]["code"])
        events = [line.removeprefix("data: ") for line in reply.body.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        last = json.loads(events[-2])
        if "error" in last:
            return str(last["error"]["code"])
        return "complete" if last["usage"]["completion_tokens"] == NUM_TOKENS else "short"


@contextlib.asynccontextmanager
async def setting(folder: Path, registry_url: str | None = None) -> AsyncIterator[Setting]:
    registry_url = registry_url or (folder / "registry").as_uri()
    registry = open_registry(registry_url)
    planes = ZmqPlanes(IpcEndpoints(folder / "s"))
    config = ServeConfig(
        frontend=FrontendConfig(port=0, request_timeout=60), router=RouterConfig(router_policy="least_loaded")
    )
    frontend = Frontend(config, planes, registry)
    state = Setting(frontend, await frontend.start(share_port=False), folder, registry_url)
    try:
        yield state
    finally:
        for child in state.workers.values():
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        await frontend.stop(0.2)
        await registry.close()
        await planes.close()


@pytest.mark.usefixtures("demo_model")
def test_a_killed_worker_costs_nobody_anything(run_folder: Path) -> None:
    async def main() -> None:
        async with setting(run_folder) as it:
            victim, survivor = [await it.add_worker() for _ in range(2)]
            await until(lambda: it.frontend.models.ready, 30)
            streams = [asyncio.ensure_future(it.stream()) for _ in range(16)]
            await until(lambda: sum(it.booked().values()) == 16)
            assert set(it.booked().values()) == {8}
            await asyncio.sleep(0.3)
            it.workers[victim].send_signal(signal.SIGKILL)
            await until(lambda: it.eligible() == {survivor})
            assert await it.stream() == "complete", "new requests go where somebody lives"
            outcomes = await asyncio.gather(*streams)
            assert outcomes == ["complete"] * 16
            assert it.booked() == {survivor: 0}
            replacement = await it.add_worker()
            assert it.eligible() == {survivor, replacement}
            assert set(await asyncio.gather(*(it.stream() for _ in range(6)))) == {"complete"}

    uvloop.run(main())


@pytest.mark.usefixtures("demo_model")
def test_a_worker_that_is_told_to_leave_costs_nobody_anything(run_folder: Path) -> None:
    async def main() -> None:
        async with setting(run_folder) as it:
            leaver, stayer = [await it.add_worker() for _ in range(2)]
            await until(lambda: it.frontend.models.ready, 30)
            streams: list[asyncio.Future[str]] = []
            for number in range(40):
                streams.append(asyncio.ensure_future(it.stream()))
                if number == 15:
                    it.workers[leaver].send_signal(signal.SIGTERM)
                await asyncio.sleep(0.02)
            assert set(await asyncio.gather(*streams)) == {"complete"}
            assert await asyncio.wait_for(it.workers[leaver].wait(), 20) == 0
            assert it.eligible() == {stayer}

    uvloop.run(main())


@pytest.mark.usefixtures("demo_model")
def test_a_stopped_worker_costs_nobody_anything_and_is_taken_back_when_it_goes_on(run_folder: Path) -> None:
    async def main() -> None:
        async with setting(run_folder) as it:
            frozen, awake = [await it.add_worker() for _ in range(2)]
            await until(lambda: it.frontend.models.ready, 30)
            streams = [asyncio.ensure_future(it.stream()) for _ in range(8)]
            await until(lambda: sum(it.booked().values()) == 8)
            it.workers[frozen].send_signal(signal.SIGSTOP)
            outcomes = await asyncio.gather(*streams)
            assert outcomes == ["complete"] * 8
            assert it.eligible() == {awake}
            it.workers[frozen].send_signal(signal.SIGCONT)
            await until(lambda: it.eligible() == {frozen, awake}, 20)
            assert set(await asyncio.gather(*(it.stream() for _ in range(6)))) == {"complete"}

    uvloop.run(main())


@pytest.mark.usefixtures("demo_model")
def test_an_etcd_that_is_away_for_longer_than_its_leases_costs_nobody_anything(run_folder: Path) -> None:
    need_etcd()

    async def main(etcd: EtcdServer) -> None:
        async with setting(run_folder, f"etcd://127.0.0.1:{etcd.port}/test") as it:
            workers = {await it.add_worker() for _ in range(2)}
            await until(lambda: it.frontend.models.ready, 30)
            streams = [asyncio.ensure_future(it.stream()) for _ in range(4)]
            await asyncio.to_thread(etcd.stop)
            await until(lambda: not it.frontend.cluster.registry_reachable, 10)
            assert set(await asyncio.gather(*streams)) == {"complete"}
            await asyncio.sleep(6.0)
            assert await it.stream() == "complete"
            assert it.eligible() == workers
            await asyncio.to_thread(etcd.start)
            await until(lambda: it.frontend.cluster.registry_reachable, 10)
            assert await it.stream() == "complete"
            assert it.eligible() == workers

    etcd = EtcdServer(run_folder / "etcd")
    etcd.folder.mkdir()
    etcd.start()
    try:
        uvloop.run(main(etcd))
    finally:
        etcd.stop()
