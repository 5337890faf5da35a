"""`ExternalEngine`: the `Engine` contract around an engine that plans its own steps, in another process or host.

A subclass opens the other side, hands over requests, cancels them and reports what comes back; everything that the
contract asks beyond that is here, so that all engines of this kind behave alike: every stream ends exactly once,
nothing follows an abort, what can never be served is refused before it is sent, the line is bounded, deadlines end
what runs over, a failure ends everything with an error, and the snapshot of resident blocks agrees with the events
that were delivered before it. Everything runs on the event loop that called `start`.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.clock import Clock, RealClock
from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo, EngineListener, KvPort, ProgressSink
from headwater.engines.limits import limits_of
from headwater.engines.load_reports import LoadReports, Totals
from headwater.errors import (
    DeadlineExceeded,
    Draining,
    EngineFailed,
    HeadwaterError,
    InternalError,
    Overloaded,
    WorkerLost,
)
from headwater.kv.connectors.naming import Naming
from headwater.kv.identity import chain_block_ids, namespace, split_block_ids
from headwater.kv.resident import ResidentBlocks
from headwater.protocol.events import LoadReport, StepTiming, WorkerEvent
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.scheduler.limits import SchedulerLimits
from headwater.types import Role

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenStream:
    """One sequence that was handed over and has not ended."""

    request: EngineRequest
    num_prompt_tokens: int
    """Resumed tokens included."""
    submitted: float
    """By the clock's `now`."""
    timer: asyncio.TimerHandle | None = None
    num_generated: int = 0


class ExternalEngine(ABC):
    """See `headwater.engines.base.Engine`."""

    kv: KvPort | None = None
    quiet_prefill = False
    """Whether the other side tells nothing of steps that bring no token."""
    relays = False
    """Whether answers pass as they are."""

    def __init__(self, config: EngineConfig, *, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or RealClock()
        self.open: dict[int, OpenStream] = {}
        self.totals = Totals()
        self.role: Role = "both"
        self._listener: EngineListener | None = None
        self._limits: SchedulerLimits | None = None
        self._info: EngineInfo | None = None
        self._num_waiting = 0
        """Open streams without a token."""
        self._refused: set[int] = set()
        """Streams whose refusal is on its way."""
        self._refusing: HeadwaterError | None = InternalError("the engine is not started")
        self._pausing: HeadwaterError | None = None
        self._resident = ResidentBlocks()
        self._reports = LoadReports(self.clock, self.load, self._tell_load)
        self._tasks: set[asyncio.Task[None]] = set()
        self._drained = asyncio.Event()
        self._draining = False
        self._closed = False

    # ---- what a subclass supplies

    @abstractmethod
    async def open_engine(self, progress: ProgressSink) -> EngineInfo:
        """Load, or connect. Raises `ModelError` or `ConfigError`."""

    @abstractmethod
    def send(self, stream: OpenStream, tokens: "array[int]") -> None:
        """Hand over one sequence, whose `tokens` are prompt and resumed ones; must not block.

        Raises a `HeadwaterError` to refuse it."""

    @abstractmethod
    def cancel(self, streams: Sequence[int]) -> None:
        """Stop these; what still comes of them is dropped here."""

    @abstractmethod
    async def close_engine(self) -> None:
        """Let go of the other side. Called once."""

    @abstractmethod
    def load(self) -> LoadReport:
        """State of now, without step timings."""

    # ---- Engine

    async def start(self, listener: EngineListener, progress: ProgressSink) -> EngineInfo:
        self._listener = listener
        info = await self.open_engine(progress)
        self._info = info
        self._limits = limits_of(self.config, _with_room_to_prefill(info))
        if not self._closed:
            self._refusing = None
            self._reports.begin()
        return info

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            try:
                self._submit_one(request)
            except HeadwaterError as error:
                self._refuse(request.stream, error)
        self.note_changed()

    def abort(self, streams: Sequence[int]) -> None:
        self._refused.difference_update(streams)
        known = [stream for stream in streams if stream in self.open]
        for stream in known:
            self._forget(stream)
        if known:
            self.cancel(known)
            self._note_open()
            self.note_changed()

    def resident_blocks(self) -> list[WorkerEvent]:
        return list(self._resident.snapshot())

    async def set_role(self, role: Role) -> None:
        """Any role at any time: a role says what is sent here."""
        self.role = role

    async def drain(self, timeout_s: float) -> bool:
        self._refusing = self._refusing or Draining("this worker is draining; another one will take the request")
        self._draining = True
        self._note_open()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        return self._drained.is_set()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        error = Draining("this worker was closed")
        self._refusing = error
        self._reports.close()
        streams = list(self.open)
        self._end_all(error)
        if streams:
            self.cancel(streams)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.close_engine()

    # ---- what a subclass may ask

    @property
    def info(self) -> EngineInfo:
        """Once it is open."""
        assert self._info is not None
        return self._info

    @property
    def default_namespace(self) -> bytes:
        """Of requests that bring none, once it is open."""
        assert self._limits is not None
        return self._limits.namespace

    def own_namespace(self, adapter: str | None) -> bytes:
        """Under which the other side keeps what is computed without a salt."""
        card = self.info.card
        return namespace(card.fingerprint, card.kv_layout, adapter=adapter) if adapter else self.default_namespace

    def namespace_of(self, request: EngineRequest) -> bytes:
        """Under which its blocks are hashed."""
        return request.namespace or self.own_namespace(request.adapter)

    def naming(self, request: EngineRequest) -> Naming:
        """How its blocks are named in a store that the other side goes to by itself."""
        return Naming(self.namespace_of(request).hex(), self.info.card.fingerprint, request.tenant)

    @property
    def resident(self) -> ResidentBlocks:
        """What the other side says it has, on the device."""
        return self._resident

    def block_ids(self, request: EngineRequest) -> bytes:
        """Of the prompt's full blocks."""
        return request.block_ids or chain_block_ids(
            self.namespace_of(request), request.prompt, self.info.card.block_size
        )

    def num_resident(self, block_ids: bytes) -> int:
        """How many of these ids of one chain, from its start, the other side says it has."""
        count = 0
        for block_id in split_block_ids(block_ids):
            if block_id not in self._resident:
                break
            count += 1
        return count

    def num_beyond_slots(self, num_said: int) -> int:
        """Open streams that wait: what is sent runs as far as the slots go, unless it was last said that more waits."""
        num_open = len(self.open)
        return min(num_open, max(num_open - self.info.max_num_seqs, num_said))

    def load_report(
        self, *, num_running: int, num_waiting: int, kv_blocks_free: int, away: str = "", num_whole: int = 0
    ) -> LoadReport:
        """What the other side has told, and what is counted here."""
        totals = self.totals
        return LoadReport(
            num_running=num_running,
            num_waiting=num_waiting,
            waiting_prefill_tokens=sum(s.num_prompt_tokens for s in self.open.values() if not s.num_generated),
            kv_blocks_total=self.info.kv_blocks,
            kv_blocks_free=kv_blocks_free,
            steps=totals.steps,
            preemptions=totals.preemptions,
            cached_tokens=totals.cached_tokens,
            prompt_tokens=totals.prompt_tokens,
            generated_tokens=totals.generated_tokens,
            away=away,
            quiet_prefill=self.quiet_prefill,
            num_whole=num_whole,
            relays=self.relays,
        )

    # ---- what a subclass reports

    @property
    def closed(self) -> bool:
        return self._closed

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """What one step, or one turn of the event loop, brought: at most one output per sequence."""
        told: list[SequenceOutput] = []
        for output in outputs:
            stream = self.open.get(output.stream)
            if stream is not None and not self._closed:
                self._count(stream, output)
                told.append(output)
        if told and self._listener is not None:
            self._listener.on_step(told)
        self._note_open()
        self.note_changed()

    def end(self, stream: int, error: HeadwaterError) -> None:
        """A sequence failed."""
        if stream in self.open:
            self.deliver([SequenceOutput.failed(stream, error)])

    def tell(self, events: list[WorkerEvent]) -> None:
        """Blocks stored, removed or cleared, in order."""
        if self._closed or self._listener is None or not events:
            return
        for event in events:
            if not isinstance(event, LoadReport) and event.tier in ("device", None):
                self._resident.apply(event)
        self._listener.on_events(events)

    def tell_device(self, events: list[WorkerEvent]) -> None:
        """The same where the other side goes to the host's store: of what lies below the device the store tells."""
        self.tell([event for event in events if isinstance(event, LoadReport) or event.tier in ("device", None)])

    def time_step(self, timing: StepTiming) -> None:
        self.totals.steps += 1
        self._reports.note_step(timing)

    def fail(self, error: HeadwaterError) -> None:
        """The engine is dead."""
        if self._closed or isinstance(self._refusing, WorkerLost) or self._listener is None:
            return
        self._refusing = WorkerLost(f"this worker's engine has failed: {error}")
        self._end_all(error)
        self._listener.on_failed(error)

    def pause(self, error: HeadwaterError) -> None:
        """The other side cannot work for now: what is open ends with a retryable error, and new work is refused."""
        if self._refusing is None:
            self._refusing = self._pausing = error
            self._end_all(error)

    def resume(self) -> None:
        if self._refusing is self._pausing:
            self._refusing = self._pausing = None

    @property
    def num_generating(self) -> int:
        """Open streams that have a token: each brings something with every step."""
        return len(self.open) - self._num_waiting

    @property
    def paused(self) -> bool:
        return self._pausing is not None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Until it ends or the engine is closed. An error that it does not handle is the engine's end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def note_changed(self) -> None:
        """Load may have changed: report soon."""
        if not self._closed and self._listener is not None and self._info is not None:
            self._reports.note_changed(idle=not self.open)

    # ---- inner life

    def _submit_one(self, request: EngineRequest) -> None:
        if self._refusing is not None:
            raise self._refusing
        limits = self._limits
        if limits is None or request.stream in self.open:
            raise InternalError(f"stream {request.stream} is open already")
        if self._num_waiting >= limits.max_waiting:
            raise Overloaded(f"{self._num_waiting} sequences wait at this worker, the most it takes (max_waiting)")
        remaining_s = self._remaining_s(request)
        tokens = limits.check(request)
        stream = OpenStream(request, len(tokens), self.clock.now())
        self.open[request.stream] = stream
        self._num_waiting += 1
        try:
            self.send(stream, tokens)
        except HeadwaterError:
            self._forget(request.stream)
            raise
        if remaining_s is not None:
            stream.timer = asyncio.get_running_loop().call_later(remaining_s, self._expire, request.stream)

    def _remaining_s(self, request: EngineRequest) -> float | None:
        if request.deadline is None:
            return None
        remaining_s = request.deadline - self.clock.epoch()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"the request's deadline passed {-remaining_s:.1f} s ago")
        return remaining_s

    def _expire(self, stream: int) -> None:
        if stream in self.open:
            self.end(stream, DeadlineExceeded("the request's deadline came before the answer was complete"))
            self.cancel([stream])

    def _refuse(self, stream: int, error: HeadwaterError) -> None:
        self._refused.add(stream)
        asyncio.get_running_loop().call_soon(self._answer_refused, stream, error)

    def _answer_refused(self, stream: int, error: HeadwaterError) -> None:
        if stream in self._refused:
            self._refused.discard(stream)
            if self._listener is not None:
                self._listener.on_step([SequenceOutput.failed(stream, error)])

    def _count(self, stream: OpenStream, output: SequenceOutput) -> None:
        count = len(output.token_ids)
        if count and not stream.num_generated:
            self._num_waiting -= 1
            self.totals.prompt_tokens += stream.num_prompt_tokens
            self.totals.cached_tokens += output.num_cached_tokens or 0
        stream.num_generated += count
        self.totals.generated_tokens += count
        if output.finish_reason is not None:
            self._forget(output.stream)

    def _forget(self, stream: int) -> None:
        gone = self.open.pop(stream)
        if not gone.num_generated:
            self._num_waiting -= 1
        if gone.timer is not None:
            gone.timer.cancel()

    def _end_all(self, error: HeadwaterError) -> None:
        outputs = [SequenceOutput.failed(stream, error) for stream in self.open]
        for output in outputs:
            self._forget(output.stream)
        if outputs and self._listener is not None:
            self._listener.on_step(outputs)
        self._note_open()

    def _note_open(self) -> None:
        if self._draining and not self.open:
            self._drained.set()

    def _tell_load(self, report: LoadReport) -> None:
        if self._listener is not None:
            self._listener.on_events([report])

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the engine failed", exc_info=error)
            self.fail(EngineFailed(f"{type(error).__name__}: {error}"))


def _with_room_to_prefill(info: EngineInfo) -> EngineInfo:
    """An engine that plans its own steps need not keep to the least that our scheduler asks for."""
    least = info.max_num_seqs + info.card.block_size
    return replace(info, max_num_batched_tokens=max(info.max_num_batched_tokens, least))
