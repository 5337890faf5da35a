"""Everything of a frontend but HTTP and the API layer, before scripted workers, over both kinds of planes."""

import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from scripted_worker import ScriptedWorker, until

from headwater.clock import RealClock
from headwater.errors import HeadwaterError, ModelError
from headwater.frontend.artifacts import ArtifactCache
from headwater.frontend.cluster import Cluster
from headwater.frontend.dispatcher import ClusterDispatcher, DispatchLimits
from headwater.frontend.metrics import FrontendMetrics
from headwater.frontend.models import ModelSet
from headwater.frontend.moves import MoveLimits
from headwater.frontend.records import OpenRequests
from headwater.frontend.vigil import VigilLimits
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.router.policies import LeastLoaded
from headwater.router.router import Router
from headwater.router.view import ClusterView
from headwater.runtime.endpoints import IpcEndpoints
from headwater.runtime.planes import InprocPlanes, Planes, ZmqPlanes
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore
from headwater.runtime.wire import Limits


@dataclass
class Built:
    card: ModelCard
    artifacts: Mapping[str, bytes]


class Sink:
    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.error: HeadwaterError | None = None

    def on_output(self, output: SequenceOutput) -> None:
        self.outputs.append(output)

    def on_error(self, error: HeadwaterError) -> None:
        assert self.error is None
        self.error = error

    @property
    def finished(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]


@dataclass
class Rig:
    """Everything of a frontend but HTTP and the API layer."""

    planes: Planes
    registry: MemoryRegistry
    view: ClusterView
    models: ModelSet[Built]
    dispatcher: ClusterDispatcher
    cluster: Cluster
    workers: list[ScriptedWorker] = field(default_factory=list)
    build_failures: int = 0
    may_build: threading.Event = field(default_factory=threading.Event)
    """Set, unless a test holds it up."""

    async def worker(self, worker_id: str, card: ModelCard | None = None, **options) -> ScriptedWorker:
        worker = ScriptedWorker(worker_id, self.planes, card, **options)
        self.workers.append(worker)
        await worker.start(self.registry)
        return worker

    async def serving(self, *worker_ids: str) -> list[ScriptedWorker]:
        workers = [await self.worker(worker_id) for worker_id in worker_ids]
        await until(lambda: self.models.ready and len(self.view.eligible("f1")) == len(workers))
        return workers

    def eligible(self) -> set[str]:
        return {worker.worker_id for worker in self.view.eligible("f1")}

    def by_id(self, worker_id: str | None) -> ScriptedWorker:
        return next(worker for worker in self.workers if worker.worker_id == worker_id)

    def worker_of(self, stream: int) -> str | None:
        decision = self.dispatcher.decision_of(stream)
        return decision.worker_id if decision is not None else None

    def submit(
        self,
        *,
        n: int = 1,
        prompt: bytes = b"\1\0\0\0" * 20,
        max_tokens: int = 10,
        sinks: list[Sink] | None = None,
    ) -> tuple[list[int], list[Sink]]:
        requests = [EngineRequest(0, "r1", "m", prompt, SamplingParams(max_tokens=max_tokens)) for _ in range(n)]
        sinks = sinks or [Sink() for _ in range(n)]
        return self.dispatcher.submit(self.models.get("m").card, requests, sinks), sinks


@contextlib.asynccontextmanager
async def rig(
    planes: Planes,
    cache: Path | None = None,
    max_streams: int = 100,
    moves: MoveLimits | None = None,
    vigil: VigilLimits | None = None,
    first_token_s: float = 0.0,
) -> AsyncIterator[Rig]:
    registry = MemoryRegistry(MemoryStore())
    view = ClusterView()
    dispatcher = ClusterDispatcher(
        Router(view, LeastLoaded()),
        OpenRequests(),
        FrontendMetrics(),
        RealClock(),
        DispatchLimits(moves=moves or MoveLimits(), max_streams=max_streams, first_token_s=first_token_s),
    )
    made: list[Rig] = []

    def build(card: ModelCard, artifacts: Mapping[str, bytes]) -> Built:
        assert made[0].may_build.wait(10)
        if made[0].build_failures:
            made[0].build_failures -= 1
            raise ModelError("no good")
        return Built(card, artifacts)

    models = ModelSet(view, build, ArtifactCache(cache))
    subscriber = planes.subscriber()
    link = lambda address: planes.link(address, "fe-1")  # noqa: E731
    cluster = Cluster(registry, link, subscriber, view, models, dispatcher, vigil)
    running = Rig(planes, registry, view, models, dispatcher, cluster)
    running.may_build.set()
    made.append(running)
    cluster.start()
    try:
        yield running
    finally:
        await cluster.close()
        await cluster.close()
        await subscriber.close()
        for worker in running.workers:
            await worker.close()
        await registry.close()
        view.check()


Scenario = Callable[[Rig], Awaitable[None]]


@pytest.fixture(params=["inproc", "zmq"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Runs a scenario over the planes of the parameter."""

    def run(scenario: Scenario, **options) -> None:
        async def main() -> None:
            limits = Limits(heartbeat_s=0.1, silence_s=1.0)
            planes: Planes = InprocPlanes(limits)
            if request.param == "zmq":
                planes = ZmqPlanes(IpcEndpoints(tmp_path / "s"), limits)
            async with rig(planes, **options) as running:
                await scenario(running)
            await planes.close()

        uvloop.run(main())

    return run
