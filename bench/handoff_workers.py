"""Worker processes with roles, and a client that asks one of them directly: what the hand-off benchmarks share."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headwater.errors import WorkerError
from headwater.protocol.cluster import Instance
from headwater.protocol.events import EventBatch, EventSnapshot, HandoffCounts, LoadReport
from headwater.protocol.frames import Abort, StepFrame, Submit, WorkerFrame
from headwater.protocol.request import EngineRequest, RemotePrefill, SamplingParams
from headwater.runtime.endpoints import parse_bind
from headwater.runtime.events.base import EventSubscriber
from headwater.runtime.planes import ZmqPlanes
from headwater.runtime.registry.base import Registry
from headwater.runtime.registry.open import open_registry
from headwater.runtime.requests.base import WorkerLink

READY_S = 240.0


@dataclass(eq=False)
class Worker:
    """A process, and what it tells a client."""

    instance: Instance
    process: subprocess.Popen[bytes] | None
    """None: in this process."""
    link: WorkerLink
    subscriber: EventSubscriber
    load: LoadReport | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    first_s: dict[int, float] = field(default_factory=dict[int, float])
    ended: dict[int, str] = field(default_factory=dict[int, str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False

    @property
    def counts(self) -> HandoffCounts:
        return (self.load and self.load.handoffs) or HandoffCounts(0, 0, 0, 0)

    def remote(self, expected_ms: float = 0.0, address: str = "") -> RemotePrefill:
        return RemotePrefill(self.instance.worker_id, address or self.instance.request_address, expected_ms)

    def on_frame(self, frame: WorkerFrame) -> None:
        if isinstance(frame, StepFrame):
            now = asyncio.get_running_loop().time()
            for output in frame.outputs:
                self.first_s.setdefault(output.stream, now)
                self.tokens.setdefault(output.stream, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ended[output.stream] = output.finish_reason
            self.changed.set()

    def on_batch(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, LoadReport):
                self.load = event

    def on_snapshot(self, snapshot: EventSnapshot) -> None:
        self.load = snapshot.load or self.load

    def on_broken(self, error: Exception) -> None:
        self.lost = True
        self.changed.set()

    async def run(self, request: EngineRequest) -> tuple[float, float]:
        """(seconds to the first token, to the last one)."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self.link.send(Submit([request]))
        while request.stream not in self.ended and not self.lost:
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 1.0)
        return self.first_s.get(request.stream, begun) - begun, loop.time() - begun

    def abort(self, stream: int) -> None:
        self.link.send(Abort([stream]))

    async def free(self, timeout_s: float) -> bool:
        """Whether all its blocks are free in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while loop.time() < deadline:
            load = self.load
            if load is not None and load.kv_blocks_free == load.kv_blocks_total:
                return True
            await asyncio.sleep(0.05)
        return False


@dataclass
class Bench:
    """The processes of one benchmark, in a folder of their own."""

    folder: Path
    registry: Registry
    planes: ZmqPlanes
    flags: tuple[str, ...]
    workers: list[Worker] = field(default_factory=list[Worker])
    _started: int = 0

    @property
    def registry_url(self) -> str:
        return f"file://{self.folder}/registry"

    async def start(self, role: str, *flags: str) -> Worker:
        self._started += 1
        command = [sys.executable, "-m", "headwater", "worker", "--registry", self.registry_url, "--role", role]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        path = self.folder / f"{role}-{self._started}.log"
        with path.open("wb") as log:
            command += [*self.flags, *flags]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: ASYNC220
        return await self.connect(await self._ready(process, path), process)

    async def connect(self, instance: Instance, process: subprocess.Popen[bytes] | None) -> Worker:
        link = self.planes.link(instance.request_address, f"bench-{self._started}")
        worker = Worker(instance, process, link, self.planes.subscriber())
        await link.connect(worker.on_frame, worker.on_broken, 5)
        await worker.subscriber.subscribe(instance.event_address, worker.on_batch, worker.on_snapshot)
        self.workers.append(worker)
        return worker

    async def reconnect(self, worker: Worker) -> None:
        """To one that was given up; again if it was busy waking up, as frontends do."""
        for _ in range(3):
            await worker.link.close()
            worker.link = self.planes.link(worker.instance.request_address, "bench-again")
            worker.lost = False
            with contextlib.suppress(WorkerError):
                await worker.link.connect(worker.on_frame, worker.on_broken, 5)
                return
        raise SystemExit("a worker does not take connections any more")

    async def stop(self, worker: Worker) -> None:
        self.workers.remove(worker)
        await worker.link.close()
        await worker.subscriber.close()
        if worker.process is not None:
            worker.process.send_signal(signal.SIGCONT)
            worker.process.kill()
            await asyncio.to_thread(worker.process.wait)

    async def _ready(self, process: subprocess.Popen[bytes], log: Path) -> Instance:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            for instance in await self.registry.instances():
                if instance.pid == process.pid and instance.state == "ready":
                    return instance
            if process.poll() is not None:
                raise SystemExit(f"a worker ended with code {process.returncode}:\n{last_words(log)}")
            await asyncio.sleep(0.1)
        raise SystemExit("a worker was not ready in time")


def last_words(log: Path) -> str:
    return log.read_text()[-3000:]


@contextlib.asynccontextmanager
async def bench(*flags: str) -> AsyncIterator[Bench]:
    """`flags`: of every worker."""
    with tempfile.TemporaryDirectory(prefix="hw-handoff-") as name:
        os.environ["XDG_RUNTIME_DIR"] = name
        folder = Path(name)
        registry = open_registry(f"file://{folder}/registry")
        planes = ZmqPlanes(parse_bind("ipc", run_folder=folder / "bench"))
        made = Bench(folder, registry, planes, flags)
        try:
            yield made
        finally:
            for worker in list(made.workers):
                await made.stop(worker)
            await registry.close()
            await planes.close()


def prompt_of(length: int, letter: int, vocabulary: int = 400) -> list[int]:
    """Different letters share no prefix."""
    return [letter % vocabulary] + [(letter * 31 + position * 7 + 1) % vocabulary for position in range(length - 1)]


def request(stream: int, prompt: Sequence[int], max_tokens: int, prefill: RemotePrefill | None = None) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return EngineRequest(stream, f"r{stream}", "m", array("I", prompt).tobytes(), sampling, prefill=prefill)
