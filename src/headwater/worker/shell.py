"""Everything around an engine that makes it a worker: registration, requests in, steps out, events, drain, end.

    starting --engine loaded--> ready --stop()--> draining --nothing open, or time is up--> closed
                                  \\--engine failed--> closed (`serve` raises)

Every sequence that was accepted ends for its frontend with exactly one last output: from the engine, or from here when
the engine could not finish it. What a vanished frontend asked for is aborted at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headwater.engines.base import Engine, EngineInfo, Progress, ProgressSink, Sleeper
from headwater.errors import Draining, EngineFailed, HeadwaterError, InvalidRequest, Unavailable
from headwater.handoff.service import Handoffs
from headwater.protocol.events import BlocksCleared, LoadReport, WorkerEvent
from headwater.protocol.frames import (
    Abort,
    Drain,
    FetchArtifact,
    FrontendFrame,
    ReleaseBlocks,
    SetRole,
    Sleep,
    StepFrame,
    Submit,
    Wake,
)
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.runtime.planes import Planes
from headwater.runtime.registry.base import Registry
from headwater.runtime.requests.base import WorkerLink
from headwater.tiers.service import KvTiers
from headwater.transfer.options import AgentOptions
from headwater.types import Role
from headwater.worker.artifacts import ArtifactStore
from headwater.worker.leaving import Leaving
from headwater.worker.load import REPORT_INTERVAL_S, SHARED_INTERVAL_S, LoadReporter
from headwater.worker.nap import Nap
from headwater.worker.pulse import Pulse
from headwater.worker.record import WorkerRecord, starting
from headwater.worker.role_changes import RoleChanges
from headwater.worker.shares import FrontendShares
from headwater.worker.streams import StreamTable

_log = logging.getLogger(__name__)

SETTLE_S = 0.3
"""Time for frontends to hear of the draining before the worker closes, even when nothing is open."""
CLOSE_TIMEOUT_S = 20.0
HURRY_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ShellConfig:
    """What a worker is called and how it leaves."""

    worker_id: str
    engine: str
    served_name: str
    """What to call the model until the engine knows."""
    role: Role = "both"
    adaptive: bool = False
    """Whether frontends may give it another role."""
    drain_timeout_s: float = 30.0
    transfer: AgentOptions = field(default_factory=AgentOptions)
    """How KV blocks move to and from other workers."""
    kv_socket: Path | None = None
    """Where this node's KV store listens; None: there is none."""
    kv_patience_s: float = 2.0
    """How long that store may still be starting when the engine is ready."""


class WorkerShell:
    """One worker. `start`, then `serve` until `stop` is called or the engine fails, then `close`."""

    def __init__(self, engine: Engine, registry: Registry, planes: Planes, config: ShellConfig) -> None:
        self._engine = engine
        self._record = WorkerRecord(registry)
        self._config = config
        self._planes = planes
        self._listener = planes.listener()
        self._publisher = planes.publisher()
        self._load = LoadReporter(self._report)
        self._streams = StreamTable()
        self._pulse = Pulse(lambda: len(self._streams) > 0, self._load.repeat)
        self._shares = FrontendShares()
        self._artifacts = ArtifactStore([], {})
        self._handoffs: Handoffs | None = None
        self._tiers = (
            KvTiers(engine, config.kv_socket, config.worker_id, self._publisher.publish) if config.kv_socket else None
        )
        self._leaving = Leaving(config.drain_timeout_s)
        self._nap = Nap(engine, self._record, self, lambda: self._leaving.within_s)
        self._role_changes = RoleChanges(engine, self._record)
        self._refusing: HeadwaterError | None = Unavailable("this worker is still loading its model")
        self._failure: HeadwaterError | None = None
        self._abandoned = False
        self._closed = False

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    # Life

    async def start(self, progress: ProgressSink) -> EngineInfo:
        """Load, register, be ready. Raises what the engine raises; `close` is to be called all the same."""
        request_address = await self._listener.listen(self._config.worker_id, self._on_frame, self._on_gone)
        event_address = await self._publisher.open(self._config.worker_id, self._snapshot)
        await self._record.register(
            starting(
                self._config.worker_id,
                self._config.served_name,
                request_address,
                event_address,
                engine=self._config.engine,
                role=self._config.role,
                adaptive=self._config.adaptive,
                can_sleep=isinstance(self._engine, Sleeper),
            )
        )
        info = await self._engine.start(self, _without_ready(progress))
        self._artifacts = ArtifactStore(info.card.artifacts, info.artifacts)
        self._handoffs = Handoffs(
            self._engine, info, self._config.worker_id, self._open_link, self._listener.send, self._config.transfer
        )
        self._handoffs.on_failed = self._end_stream
        if self._tiers is not None:
            await self._tiers.start(info, self._go_on, self._config.kv_patience_s)
        adaptive = self._config.adaptive and info.role is None
        await self._role_changes.begin(info.role or self._config.role, adaptive=adaptive)
        self._refusing = self._failure
        await self._record.ready(info)
        progress(Progress("ready", detail=info.card.name))
        return info

    def stop(self) -> None:
        """Drain and leave; called again: leave at once."""
        self._leaving.tell()

    @property
    def hurried(self) -> bool:
        """Whether it was told twice to stop."""
        return self._leaving.hurried

    @property
    def abandoned(self) -> bool:
        """Whether the engine may still be loading or computing after `run`."""
        return self._abandoned or self.hurried

    async def run(self, progress: ProgressSink) -> None:
        """All of a worker's life. Raises what loading raises, and `EngineFailed` when the engine fails."""
        try:
            if await self._leaving.unless_told(self.start(progress)):
                await self.serve()
            else:
                self._abandoned = True
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.close(), HURRY_TIMEOUT_S if self.abandoned else CLOSE_TIMEOUT_S)

    async def serve(self) -> None:
        """Until told to stop and drained. Raises `EngineFailed` when the engine fails."""
        await self._leaving.wait()
        if self._failure is None:
            await self._drain()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Idempotent, bounded in time. The lease goes first, so that nothing new comes."""
        if self._closed:
            return
        self._closed = True
        self._nap.close()
        self._refusing = self._refusing or Draining("this worker was closed")
        await self._record.release()
        try:
            if self._tiers is not None:
                await self._tiers.close()
            await self._engine.close()
        finally:
            self.end_open(self._refusing)
            self._role_changes.close()
            if self._handoffs is not None:
                await self._handoffs.close()
            self._pulse.close()
            self._load.close()
            await self._listener.close()
            await self._publisher.close()

    async def _drain(self) -> None:
        _log.info("draining: %d streams are open", len(self._streams))
        self._refusing = Draining("this worker is draining; another one will take the request")
        await self._record.change(state="draining")
        await self._leaving.unless_hurried(self._settle())
        if len(self._streams):
            _log.warning("%d streams were still open and are cut off", len(self._streams))

    async def _settle(self) -> None:
        within_s = self._leaving.within_s
        handed_over = self._handoffs.drain(within_s) if self._handoffs is not None else asyncio.sleep(0)
        await asyncio.gather(self._engine.drain(within_s), handed_over, asyncio.sleep(SETTLE_S))

    # Frontends

    def _on_frame(self, peer: bytes, frame: FrontendFrame) -> None:
        match frame:
            case Submit(requests):
                self._submit(peer, requests)
            case Abort(streams):
                self._abort(self._streams.take(peer, streams))
            case Drain(within_s):
                _log.info("told by a frontend to leave within %g s", within_s)
                self._leaving.shorten(within_s)
                self.stop()
            case ReleaseBlocks(streams):
                self._release(peer, streams)
            case Sleep():
                self._nap.sleep()
            case Wake():
                self._nap.wake()
            case SetRole(role):
                self._role_changes.ask(role)
            case FetchArtifact():
                self._listener.send(peer, self._artifacts.read(frame))

    def _on_gone(self, peer: bytes) -> None:
        if self._handoffs is not None:
            self._handoffs.gone(peer)
        handles = self._streams.take_all(peer)
        if handles:
            _log.info("a frontend is gone: aborting its %d streams", len(handles))
            self._abort(handles)
        self._shares.gone(peer)
        self._load.repeat()

    def _submit(self, peer: bytes, requests: list[EngineRequest]) -> None:
        accepted: list[EngineRequest] = []
        refused: list[SequenceOutput] = []
        for request in requests:
            stream = request.stream
            try:
                accepted.append(self._open(peer, request))
            except HeadwaterError as error:
                refused.append(SequenceOutput.failed(stream, error))
        if refused:
            self._listener.send(peer, StepFrame(refused))
        if accepted:
            if _log.isEnabledFor(logging.DEBUG):
                for request in accepted:
                    _log.debug("accepted", extra={"request_id": request.request_id, "stream": request.stream})
            plain = [request for request in accepted if not self._in_store(request) and not self._exchanges(request)]
            if plain:
                self._engine.submit(plain)
            self._pulse.begin()
            self._tell_shares()

    def _open(self, peer: bytes, request: EngineRequest) -> EngineRequest:
        """Name a request for the engine; who reads its blocks is known from here on. Raises why not."""
        if self._refusing is not None:
            raise self._refusing
        stream = request.stream
        handle = self._streams.open(peer, stream)
        if handle is None:
            raise InvalidRequest(f"stream {stream} is open already", param="stream")
        request.stream = handle
        if request.export is not None and self._handoffs is not None:
            try:
                self._handoffs.export(peer, stream, request)
            except HeadwaterError:
                self._streams.take(peer, [stream])
                raise
        order = request.export or request.pairing
        asked_by = order.frontend_id.encode() if order is not None else b""
        self._shares.opened(asked_by or peer, handle, request)
        return request

    def _name_of(self, peer: bytes) -> str:
        """Of a frontend, connected or named by another worker."""
        return self._listener.frontend_id(peer) or peer.decode(errors="replace")

    def _exchanges(self, request: EngineRequest) -> bool:
        """Whether another worker computes the prompt, so that a request goes to the engine by another way."""
        return self._handoffs is not None and self._handoffs.load(request)

    def _go_on(self, request: EngineRequest) -> None:
        """A request of which the store has nothing to give."""
        if not self._exchanges(request):
            self._engine.submit([request])

    def _in_store(self, request: EngineRequest) -> bool:
        """Whether a request goes on once blocks of it that the store may have were looked for."""
        return self._tiers is not None and self._tiers.take(request)

    def _release(self, peer: bytes, streams: list[int]) -> None:
        """Exported sequences whose blocks the peer does not read any more."""
        handles = self._streams.take(peer, streams)
        if self._handoffs is not None:
            self._handoffs.release(peer, streams)
        self._abort(handles)

    def _open_link(self, address: str) -> WorkerLink:
        return self._planes.link(address, self._config.worker_id)

    def _abort(self, handles: Sequence[int]) -> None:
        if handles:
            if self._tiers is not None:
                self._tiers.abort(handles)
            if self._handoffs is not None:
                self._handoffs.abort(handles)
            self._engine.abort(handles)
            self._shares.closed(handles)
            self._tell_shares()

    def _end_stream(self, handle: int, error: HeadwaterError) -> None:
        """The engine has not ended it, and is to."""
        self._engine.abort([handle])
        self.on_step([SequenceOutput.failed(handle, error)])

    def _tell_shares(self) -> None:
        """Other frontends are to know what this one has sent, also while the engine's step goes on."""
        if self._listener.num_peers > 1:
            self._load.repeat()

    def _report(self, report: LoadReport) -> None:
        shared = self._listener.num_peers > 1
        self._load.interval_s = SHARED_INTERVAL_S if shared else REPORT_INTERVAL_S
        if shared:
            report = msgspec.structs.replace(report, frontends=self._shares.loads(self._name_of))
        if self._handoffs is not None and (counts := self._handoffs.counts()) is not None:
            report = msgspec.structs.replace(report, handoffs=counts)
        if self._tiers is not None:
            report = msgspec.structs.replace(report, store=self._tiers.counts())
        self._publisher.publish([report])

    def refuse(self, error: HeadwaterError | None) -> None:
        """New requests, from now on. Whoever drains or has failed refuses them anyhow."""
        if not self._leaving.told and self._failure is None:
            self._refusing = error

    def end_open(self, error: HeadwaterError) -> None:
        """Tell frontends that what is open will not be finished here."""
        for peer, streams in self._streams.open_streams().items():
            self._abort(self._streams.take(peer, streams))
            self._listener.send(peer, StepFrame([SequenceOutput.failed(stream, error) for stream in streams]))

    def _snapshot(self) -> list[WorkerEvent]:
        """Everything a frontend needs to know that joins now."""
        tiers = self._tiers.snapshot() if self._tiers is not None else []
        return [*self._engine.resident_blocks(), *tiers, *self._load.recall()]

    # EngineListener

    def on_step(self, outputs: list[SequenceOutput]) -> None:
        if self._handoffs is not None:
            self._handoffs.stepped(outputs)
        self._shares.stepped(outputs)
        if self._tiers is not None:
            self._tiers.stepped(outputs)
        for peer, routed in self._streams.route(outputs).items():
            self._listener.send(peer, StepFrame(routed))

    def on_events(self, events: list[WorkerEvent]) -> None:
        others: list[WorkerEvent] = []
        for event in events:
            if isinstance(event, LoadReport):
                self._pulse.heard()
                self._load.offer(event)
                if self._tiers is not None:
                    self._tiers.observe(event)
                if self._handoffs is not None:
                    self._handoffs.observe(event)
            else:
                others.append(event)
                if self._tiers is not None and isinstance(event, BlocksCleared) and event.tier is None:
                    others += self._tiers.snapshot()  # of what the engine knew: the store has not lost anything
        self._publisher.publish(others)

    def on_failed(self, error: HeadwaterError) -> None:
        _log.error("the engine failed: %s", error)
        self._failure = error if isinstance(error, EngineFailed) else EngineFailed(str(error))
        self._refusing = self._failure
        self.end_open(self._failure)
        self._leaving.must()


def _without_ready(progress: ProgressSink) -> ProgressSink:
    """An engine is ready before its worker is: that is told when the registry knows."""

    def pass_on(report: Progress) -> None:
        if report.phase != "ready":
            progress(report)

    return pass_on
