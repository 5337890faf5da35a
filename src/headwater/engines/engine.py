"""`CoreEngine`: the `Engine` contract on top of an `EngineCore` and a loop that steps it.

An engine package supplies a `BuildEngine` (executor, card, sizes) and chooses a loop; everything else is here, so that
all engines of this kind behave alike:

    def create(config: EngineConfig) -> Engine:
        return CoreEngine(config, lambda progress: build(config, progress), ThreadedLoop())

State on the event-loop side: the open streams (so that nothing is delivered after an abort and every stream gets
exactly one end) and a mirror of the resident blocks, built from the delivered events, so that a snapshot agrees with
the events that were delivered before it. Streams are unique over the life of the engine.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from headwater.clock import Clock, RealClock
from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo, EngineListener, KvMemory, ProgressSink
from headwater.engines.core import BuildEngine, EngineCore, StepOutcome
from headwater.engines.limits import limits_of
from headwater.engines.loop import Command, StepLoop
from headwater.engines.port import CorePort
from headwater.engines.preparation import Preparation
from headwater.errors import Draining, HeadwaterError, InternalError, WorkerLost
from headwater.kv.resident import ResidentBlocks
from headwater.protocol.events import LoadReport, WorkerEvent
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.scheduler.scheduler import Scheduler
from headwater.types import Role

_CLOSE_TIMEOUT_S = 10.0


class CoreEngine:
    """An engine whose steps are planned by the scheduler. See `headwater.engines.base.Engine`."""

    def __init__(self, config: EngineConfig, build: BuildEngine, loop: StepLoop, *, clock: Clock | None = None) -> None:
        self._config = config
        self._build = build
        self._loop = loop
        self._clock = clock or RealClock()
        self._listener: EngineListener | None = None
        self._role: Role = "both"
        self._open: set[int] = set()
        self._refused: set[int] = set()
        """Streams whose refusal is on its way."""
        self._preparation: Preparation | None = None
        self._once_prepared: dict[int, Command] = {}
        """How to hand over those that are not simply submitted."""
        self._port: CorePort | None = None
        self._kv_memory: KvMemory | None = None
        self._resident = ResidentBlocks()
        self._load = LoadReport(0, 0, 0, 0, 0)
        self._refusing: HeadwaterError | None = InternalError("the engine is not started")
        self._draining = False
        self._drained = asyncio.Event()
        self._closed = False

    async def start(self, listener: EngineListener, progress: ProgressSink) -> EngineInfo:
        self._listener = listener
        self._event_loop = asyncio.get_running_loop()
        info = await self._loop.start(self._build_core, progress, self)
        if self._kv_memory is not None:
            self._port = CorePort(self._kv_memory, self)
        if not self._closed:
            self._refusing = None
        return info

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Hand over to the loop; refusals follow on the next turn of the event loop."""
        try:
            if self._refusing is not None:
                raise self._refusing
            ready = [request for request in requests if not self._begin_preparing(request)]
            if ready:
                self._loop.submit(ready)
            self._open.update(request.stream for request in requests)
        except HeadwaterError as error:
            self._refuse([request.stream for request in requests], error)

    def abort(self, streams: Sequence[int]) -> None:
        self._refused.difference_update(streams)
        known = [stream for stream in streams if stream in self._open]
        if known:
            self._open.difference_update(known)
            if self._preparation is not None:
                self._preparation.abort(known)
                self._forget_prepared(known)
            self._loop.abort(known)
            self._note_open()

    def load(self) -> LoadReport:
        """As of the last report delivered."""
        return self._load

    def resident_blocks(self) -> list[WorkerEvent]:
        return list(self._resident.snapshot())

    async def set_role(self, role: Role) -> None:
        """Any role at any time: a role says what is sent here, and this engine can do both."""
        self._role = role

    async def drain(self, timeout_s: float) -> bool:
        if self._refusing is None:
            self._refusing = Draining("this worker is draining; another one will take the request")
        self._draining = True
        self._note_open()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        return self._drained.is_set()

    async def close(self) -> None:
        """End what is open with a retryable error, stop the loop, close the executor. Bounded in time."""
        error = Draining("this worker was closed")
        self._refusing = error
        first = not self._closed
        self._closed = True
        if first:
            self._end_all(error)
            if self._port is not None:
                self._port.close()
        if self._preparation is not None:
            await self._preparation.close(_CLOSE_TIMEOUT_S)
        await self._loop.close(_CLOSE_TIMEOUT_S)

    def on_outcome(self, outcome: StepOutcome) -> None:
        """From the loop: deliver one step."""
        if self._listener is None:
            return
        if outcome.news and self._port is not None:
            self._port.on_news(outcome.news)
        opened = self._open
        outputs = [output for output in outcome.outputs if output.stream in opened]
        for output in outputs:
            if output.finish_reason is not None:
                opened.discard(output.stream)
        if outputs:
            self._listener.on_step(outputs)
        if outcome.events:
            self._note_events(outcome.events)
            self._listener.on_events(outcome.events)
        self._note_open()

    def on_failed(self, error: HeadwaterError) -> None:
        """From the loop: the core is dead."""
        if self._closed or self._listener is None:
            return
        self._refusing = WorkerLost(f"this worker's engine has failed: {error}")
        self._end_all(error)
        if self._port is not None:
            self._port.close()
        self._listener.on_failed(error)

    # For the KV port

    @property
    def kv(self) -> CorePort | None:
        return self._port

    def submit_as(self, request: EngineRequest, command: Command) -> None:
        try:
            if self._refusing is not None:
                raise self._refusing
            if self._begin_preparing(request):
                self._once_prepared[request.stream] = command
            else:
                self._loop.call(command)
            self._open.add(request.stream)
        except HeadwaterError as error:
            self._refuse([request.stream], error)
            if self._port is not None:
                self._port.refused(request.stream)

    def call(self, command: Command) -> None:
        self._loop.call(command)

    def forget(self, stream: int) -> None:
        self._open.discard(stream)
        if self._preparation is not None:
            self._preparation.abort([stream])
            self._forget_prepared([stream])
        self._note_open()

    def num_resident(self, block_ids: bytes) -> int:
        return self._resident.num_leading(block_ids)

    def call_soon(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone
            self._event_loop.call_soon_threadsafe(work)

    def _build_core(self, progress: ProgressSink) -> tuple[EngineCore, EngineInfo]:
        built = self._build(progress)
        if built.prepare is not None:
            self._preparation = Preparation(built.prepare, self._on_prepared)
        self._kv_memory = built.kv
        scheduler = Scheduler(limits_of(self._config, built.info))
        return EngineCore(scheduler, built.executor, self._clock), built.info

    def _begin_preparing(self, request: EngineRequest) -> bool:
        """Whether the request has something that takes long; it then comes back to `_on_prepared`."""
        if self._preparation is None or request.sampling.structured is None:
            return False
        self._preparation.begin(request)
        return True

    def _on_prepared(self, request: EngineRequest, error: HeadwaterError | None) -> None:
        if request.stream not in self._open:
            return
        try:
            if error is not None:
                raise error
            command = self._once_prepared.pop(request.stream, None)
            if command is None:
                self._loop.submit([request])
            else:
                self._loop.call(command)
        except HeadwaterError as refused:
            self._forget_prepared([request.stream])
            self.on_outcome(StepOutcome([SequenceOutput.failed(request.stream, refused)], []))

    def _forget_prepared(self, streams: Sequence[int]) -> None:
        """Those that were to be handed over once they are prepared will not be."""
        for stream in streams:
            if self._once_prepared.pop(stream, None) is not None and self._port is not None:
                self._port.refused(stream)

    def _refuse(self, streams: list[int], error: HeadwaterError) -> None:
        self._refused.update(streams)
        asyncio.get_running_loop().call_soon(self._answer_refused, streams, error)

    def _note_events(self, events: list[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, LoadReport):
                self._load = event
            else:
                self._resident.apply(event)

    def _answer_refused(self, streams: list[int], error: HeadwaterError) -> None:
        outputs = [SequenceOutput.failed(stream, error) for stream in streams if stream in self._refused]
        self._refused.difference_update(streams)
        if outputs and self._listener is not None:
            self._listener.on_step(outputs)

    def _end_all(self, error: HeadwaterError) -> None:
        outputs = [SequenceOutput.failed(stream, error) for stream in self._open]
        self.on_outcome(StepOutcome(outputs, []))

    def _note_open(self) -> None:
        if self._draining and not self._open:
            self._drained.set()
