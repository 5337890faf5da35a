"""The frontend as a process of its own: signals, shared port, cached files, a worker killed behind it."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import uvloop
from api_client import CHAT, Connection, answer_at_once
from scripted_worker import ScriptedWorker, artifacts_of, until

from headwater.protocol.request import SequenceOutput
from headwater.runtime.endpoints import IpcEndpoints
from headwater.runtime.planes import ZmqPlanes
from headwater.runtime.registry.file import FileRegistry
from headwater.weights import ResolvedModel
from openai_twin import demo_artifacts, demo_card


@dataclass
class Process:
    port: int
    child: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def until_ready(self) -> None:
        for _ in range(600):
            async with self.connection() as connection:
                if (await connection.ask("GET", "/ready")).status == 200:
                    return
            await asyncio.sleep(0.05)
        raise AssertionError("not ready in time:\n" + "\n".join(self.lines))


@contextlib.asynccontextmanager
async def frontend(folder: Path, *flags: str, port: int = 0) -> AsyncIterator[Process]:
    command = [sys.executable, "-m", "headwater", "frontend", "--port", str(port)]
    command += ["--registry", (folder / "registry").as_uri(), *flags]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    child = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    assert child.stderr is not None
    process = Process(0, child)

    async def read_log() -> None:
        while line := await child.stderr.readline():
            process.lines.append(line.decode().rstrip())
            if found := re.search(r"listening on .*:(\d+)", process.lines[-1]):
                process.port = int(found[1])

    reading = asyncio.create_task(read_log())
    try:
        await until(lambda: process.port != 0 or child.returncode is not None, 20)
        assert process.port, process.lines
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        await reading


Scenario = Callable[[Path, ScriptedWorker], Awaitable[None]]


@pytest.fixture
def play(run_folder: Path, demo_model: ResolvedModel) -> Callable[[Scenario], None]:
    """Runs a scenario beside one registered worker."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            registry = FileRegistry(run_folder / "registry")
            planes = ZmqPlanes(IpcEndpoints(run_folder / "s"))
            contents = demo_artifacts(demo_model)
            card = msgspec.structs.replace(
                demo_card(demo_model), name="bench", served_names=["bench"], artifacts=artifacts_of(contents)
            )
            worker = ScriptedWorker("w1", planes, card, contents)
            await worker.start(registry)
            try:
                await scenario(run_folder, worker)
            finally:
                await worker.close()
                await registry.close()
                await planes.close()

        uvloop.run(main())

    return run


def test_sigterm_lets_running_streams_end_and_exits_with_0(play: Callable[[Scenario], None]) -> None:
    async def scenario(folder: Path, worker: ScriptedWorker) -> None:
        async with frontend(folder) as process:
            await process.until_ready()
            async with process.connection() as busy:
                await busy.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
                await until(lambda: bool(worker.requests))
                worker.step(SequenceOutput(worker.requests[0].stream, [504], num_cached_tokens=0))
                process.child.send_signal(signal.SIGTERM)
                await until(lambda: any("draining: 1 requests" in line for line in process.lines))
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", process.port)
                assert process.child.returncode is None
                worker.step(SequenceOutput(worker.requests[0].stream, [505, 506], "length"))
                assert (await busy.read()).body.endswith(b"data: [DONE]\n\n")
                assert await asyncio.wait_for(process.child.wait(), 10) == 0

    play(scenario)


def test_draining_has_a_bound(play: Callable[[Scenario], None]) -> None:
    async def scenario(folder: Path, worker: ScriptedWorker) -> None:
        async with frontend(folder, "--drain-timeout", "300ms") as process:
            await process.until_ready()
            async with process.connection() as stuck:
                await stuck.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
                await until(lambda: bool(worker.requests))
                process.child.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.child.wait(), 10) == 0
                assert await stuck.reader.read() == b"", "an answer that is cut off must not look complete"
                await until(lambda: worker.aborted == [worker.requests[0].stream])

    play(scenario)


def test_a_second_signal_ends_the_draining(play: Callable[[Scenario], None]) -> None:
    async def scenario(folder: Path, worker: ScriptedWorker) -> None:
        async with frontend(folder) as process:
            await process.until_ready()
            async with process.connection() as stuck:
                await stuck.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
                await until(lambda: bool(worker.requests))
                process.child.send_signal(signal.SIGTERM)
                await until(lambda: any("draining" in line for line in process.lines))
                process.child.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.child.wait(), 10) == 0

    play(scenario)


def test_frontends_share_a_port_and_the_files_of_a_model(play: Callable[[Scenario], None]) -> None:
    async def scenario(folder: Path, worker: ScriptedWorker) -> None:
        worker.on_submit = lambda request: answer_at_once(worker, request)
        async with frontend(folder, "--frontends", "2") as first:
            await first.until_ready()
            fetched = len(worker.fetches)
            assert fetched
            async with frontend(folder, "--frontends", "2", port=first.port) as second:
                await until(lambda: any("tokenizer" in line for line in second.lines), 30)
                await second.until_ready()
                assert len(worker.fetches) == fetched, "the second takes them from the cache"
                for _ in range(20):
                    async with first.connection() as connection:
                        assert (await connection.ask("POST", "/v1/chat/completions", CHAT)).status == 200
                first.child.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(first.child.wait(), 10) == 0
                async with second.connection() as connection:
                    assert (await connection.ask("POST", "/v1/chat/completions", CHAT)).status == 200

    play(scenario)


def test_a_second_frontend_on_a_port_that_is_not_shared_says_so(play: Callable[[Scenario], None]) -> None:
    async def scenario(folder: Path, worker: ScriptedWorker) -> None:
        async with frontend(folder) as first:
            command = [sys.executable, "-m", "headwater", "frontend", "--port", str(first.port)]
            command += ["--registry", (folder / "registry").as_uri()]
            child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
            _, errors = await asyncio.wait_for(child.communicate(), 20)
            assert child.returncode != 0
            assert f"127.0.0.1:{first.port} is in use" in errors.decode()
            assert "Traceback" not in errors.decode()

    play(scenario)
