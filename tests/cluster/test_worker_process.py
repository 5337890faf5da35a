"""Worker processes over ipc and a file registry: killed, stopped, told to leave, their store wiped."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headwater.protocol.cluster import Instance
from headwater.protocol.frames import StepFrame, Submit, WorkerFrame
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.endpoints import parse_bind
from headwater.runtime.planes import ZmqPlanes
from headwater.runtime.registry.base import InstanceGone, InstancePut, Outage, RegistryEvent
from headwater.runtime.registry.file import FileRegistry
from headwater.runtime.requests.base import WorkerLink
from headwater.runtime.wire import Limits

HERE = Path(__file__).parent
QUICK = Limits(heartbeat_s=0.1, silence_s=1.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the registry. Sockets go to a short folder of this test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("r")))
    return tmp_path / "registry"


@dataclass
class Child:
    """A process that speaks in lines."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list[str])
    reading: "asyncio.Task[None] | None" = None

    @classmethod
    async def start(cls, script: str, *arguments: object) -> "Child":
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / script), *map(str, arguments), stdout=asyncio.subprocess.PIPE
        )
        child = cls(process)
        child.reading = asyncio.create_task(child._read())
        return child

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines += [line.decode().strip()]

    def said(self, what: str) -> list[Any]:
        return [value for word, value in map(json.loads, self.lines) if word == what]

    async def exit_code(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 15)
        assert self.reading is not None
        await self.reading
        return code

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        await self.exit_code()


@dataclass
class Front:
    """A link, and what came by it."""

    link: WorkerLink
    outputs: list[SequenceOutput] = field(default_factory=list[SequenceOutput])
    broken: list[str] = field(default_factory=list[str])

    def on_frame(self, frame: WorkerFrame) -> None:
        if isinstance(frame, StepFrame):
            self.outputs += frame.outputs

    def submit(self, max_tokens: int, stream: int = 1) -> None:
        self.link.send(Submit([EngineRequest(stream, "r", "m", b"", SamplingParams(max_tokens=max_tokens))]))

    def reason(self, stream: int = 1) -> str | None:
        reasons = [output.finish_reason for output in self.outputs if output.stream == stream and output.finish_reason]
        return reasons[0] if reasons else None


class Cluster:
    """One observer of the registry, any number of children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = FileRegistry(folder)
        self.planes = ZmqPlanes(parse_bind("ipc"), QUICK)
        self.events: list[RegistryEvent] = []
        self.alive: dict[str, Instance] = {}
        self.children: list[Child] = []
        self.links: list[WorkerLink] = []
        self.watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async for event in self.registry.watch():
            self.events.append(event)
            if isinstance(event, InstancePut):
                self.alive[event.instance.worker_id] = event.instance
            elif isinstance(event, InstanceGone):
                del self.alive[event.worker_id]

    async def start(self, *, bind: str = "ipc", load_s: float = 0.0, drain_s: float = 10.0) -> Child:
        child = await Child.start("worker_child.py", self.folder.as_uri(), bind, load_s, drain_s)
        self.children.append(child)
        return child

    def of(self, child: Child) -> Instance | None:
        found = [instance for instance in self.alive.values() if instance.pid == child.process.pid]
        return found[0] if found else None

    async def ready(self, child: Child) -> Instance:
        await eventually(lambda: self.state(child) == "ready", "the worker to be ready", 20)
        instance = self.of(child)
        assert instance is not None
        return instance

    def state(self, child: Child) -> str | None:
        instance = self.of(child)
        return instance.state if instance is not None else None

    async def front(self, instance: Instance) -> Front:
        front = Front(self.planes.link(instance.request_address, "frontend"))
        self.links.append(front.link)
        await front.link.connect(front.on_frame, lambda error: front.broken.append(error.code), 10)
        return front

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        for child in self.children:
            await child.end()
        await self.registry.close()
        await self.watching
        await self.planes.close()


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    made = Cluster(folder)
    try:
        yield made
    finally:
        await made.close()


def test_a_killed_worker_is_gone_and_its_link_broken_once(folder: Path) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            doomed, other = await it.start(), await it.start()
            front, safe = await it.front(await it.ready(doomed)), await it.front(await it.ready(other))
            front.submit(1_000_000)
            safe.submit(200)
            await eventually(lambda: bool(front.outputs), "tokens")
            doomed.process.kill()
            await eventually(lambda: it.of(doomed) is None and bool(front.broken), "the news")
            await eventually(lambda: safe.reason() == "length", "the other worker's stream")
            assert front.broken == ["worker_lost"]
            assert safe.broken == []
            assert len([e for e in it.events if isinstance(e, InstanceGone)]) == 1
            again = await it.start()
            fresh = await it.front(await it.ready(again))
            fresh.submit(3)
            await eventually(lambda: fresh.reason() == "length", "a stream of the new worker")

    run_leak_checked(check())


def test_a_killed_frontend_has_its_streams_aborted(folder: Path) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            worker = await it.start()
            instance = await it.ready(worker)
            frontend = await Child.start("frontend_child.py", instance.request_address)
            it.children.append(frontend)
            await eventually(lambda: len(frontend.lines) > 2, "its tokens", 20)
            frontend.process.kill()
            await eventually(lambda: worker.said("aborted") == [3], "the aborts")
            front = await it.front(instance)
            front.submit(3)
            await eventually(lambda: front.reason() == "length", "another frontend's stream")

    run_leak_checked(check())


def test_sigterm_drains(folder: Path) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            worker = await it.start()
            front = await it.front(await it.ready(worker))
            front.submit(300)
            await eventually(lambda: bool(front.outputs), "tokens")
            worker.process.terminate()
            await eventually(lambda: it.state(worker) == "draining", "draining")
            front.submit(3, stream=2)
            await eventually(lambda: front.reason(2) == "error", "the refusal")
            assert await worker.exit_code() == 0
            await eventually(lambda: front.reason(1) == "length", "the running stream")
            assert [token for output in front.outputs for token in output.token_ids] == list(range(300))
            await eventually(lambda: it.of(worker) is None, "the lease's end")
            assert os.listdir(folder / "instances") == []

    run_leak_checked(check())


def test_a_second_sigterm_leaves_at_once(folder: Path) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            worker = await it.start(drain_s=600)
            front = await it.front(await it.ready(worker))
            front.submit(1_000_000)
            await eventually(lambda: bool(front.outputs), "tokens")
            worker.process.terminate()
            await eventually(lambda: it.state(worker) == "draining", "draining")
            worker.process.terminate()
            assert await worker.exit_code() == 128 + signal.SIGTERM
            await eventually(lambda: front.reason() == "error", "the end")
            await eventually(lambda: it.of(worker) is None, "the lease's end")

    run_leak_checked(check())


def test_sigterm_while_loading(folder: Path) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            worker = await it.start(load_s=600)
            await eventually(lambda: it.state(worker) == "starting", "the registration", 20)
            worker.process.terminate()
            assert await worker.exit_code() == 0
            await eventually(lambda: it.of(worker) is None, "the lease's end")

    run_leak_checked(check())


def test_a_failed_engine_ends_the_process(folder: Path) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            worker = await it.start()
            front = await it.front(await it.ready(worker))
            front.submit(666)
            assert await worker.exit_code() == 1
            assert worker.said("failed") == ["engine_failed"]
            await eventually(lambda: front.reason() == "error" and it.of(worker) is None, "the news")
            error = front.outputs[-1].error
            assert error is not None
            assert error.code == "engine_failed"

    run_leak_checked(check())


def test_a_stopped_worker_is_given_up_by_its_frontends(folder: Path) -> None:
    """A process that hangs keeps its lease; silence breaks the link."""

    async def check() -> None:
        async with cluster(folder) as it:
            worker = await it.start()
            front = await it.front(await it.ready(worker))
            front.submit(1_000_000)
            await eventually(lambda: bool(front.outputs), "tokens")
            worker.process.send_signal(signal.SIGSTOP)
            await eventually(lambda: bool(front.broken), "the break", 10)
            assert front.broken == ["worker_lost"]
            assert it.of(worker) is not None
            worker.process.send_signal(signal.SIGCONT)
            await eventually(lambda: worker.said("aborted") == [1], "the abort of what nobody waits for", 10)

    run_leak_checked(check())


def test_a_wiped_registry_folder_comes_back_and_serving_goes_on(folder: Path) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            workers = [await it.start() for _ in range(2)]
            front = await it.front(await it.ready(workers[0]))
            await it.ready(workers[1])
            front.submit(1500)
            shutil.rmtree(folder)
            await eventually(lambda: len(_entries(folder / "instances")) == 2, "the records", 10)
            fresh = FileRegistry(folder)
            assert {found.pid for found in await fresh.instances()} == {w.process.pid for w in workers}
            assert [entry.name for entry in await fresh.models()] == ["org/scripted"]
            await fresh.close()
            await eventually(lambda: front.reason() == "length", "the stream", 20)
            assert not [event for event in it.events if isinstance(event, InstanceGone)]
            await eventually(lambda: _outages(it.events) in ([], [False, True]), "the outage's end")
            workers[1].process.kill()
            await eventually(lambda: it.of(workers[1]) is None, "news of a death after the wipe")

    run_leak_checked(check())


def _entries(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _outages(events: list[RegistryEvent]) -> list[bool]:
    return [event.reachable for event in events if isinstance(event, Outage)]


def test_tcp_on_the_loopback(folder: Path) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            worker = await it.start(bind="127.0.0.1")
            instance = await it.ready(worker)
            assert instance.request_address.startswith("tcp://127.0.0.1:")
            front = await it.front(instance)
            front.submit(5)
            await eventually(lambda: front.reason() == "length", "the stream")
            worker.process.kill()
            await eventually(lambda: front.broken == ["worker_lost"], "the break")

    run_leak_checked(check())


def test_an_address_that_can_be_reached_from_outside_is_refused(folder: Path) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            worker = await it.start(bind="192.0.2.1")
            assert await worker.exit_code() == 1
            assert worker.said("failed") == ["config_error"]

    run_leak_checked(check())


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"<s>": 0, "Ġone": 1, "Ġtwo": 2}}, "added_tokens": []}))
    return path


@pytest.mark.parametrize(("times", "code"), [(1, 0), (2, 128 + signal.SIGTERM)])
def test_the_command_obeys_signals(folder: Path, tokenizer: Path, times: int, code: int) -> None:
    async def check() -> None:
        async with cluster(folder) as it:
            command = ("worker", "--engine", "mocker", "--mocker-speedup", "1", "--tokenizer", str(tokenizer))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headwater",
                *command,
                "--registry",
                folder.as_uri(),
                stdout=asyncio.subprocess.PIPE,
            )
            worker = Child(process)
            worker.reading = asyncio.create_task(worker._read())
            it.children.append(worker)
            front = await it.front(await it.ready(worker))
            front.submit(100_000)
            await eventually(lambda: bool(front.outputs), "tokens")
            process.terminate()
            await eventually(lambda: it.state(worker) == "draining", "draining")
            if times == 1:
                await front.link.close()
            else:
                process.terminate()
            assert await worker.exit_code() == code
            await eventually(lambda: it.of(worker) is None, "the lease's end")

    run_leak_checked(check())
