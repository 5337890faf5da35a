"""Loops that step an `EngineCore`: on a thread of its own, or on the event loop in modelled time.

Whoever owns the loop lives on the event loop and is called there: `on_outcome` once per step, `on_failed` once at
most. Nothing is delivered after `close` has returned. Every queue is bounded: commands to the thread by
`_MAX_COMMANDS` (more is refused with `Overloaded`), outcomes on their way to the event loop by `_MAX_UNDELIVERED`
(the thread then waits).
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from headwater.engines.base import EngineInfo, Progress, ProgressSink
from headwater.engines.core import EngineCore, StepOutcome, StepOwner
from headwater.errors import ConfigError, EngineFailed, HeadwaterError, ModelError, Overloaded
from headwater.protocol.request import EngineRequest, SequenceOutput

_log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_RETRY_S = 0.02
"""Pause when sequences are open and yet nothing could be planned."""
_LOADING_S = 0.1
"""The same when all of them wait for blocks from outside, whose arrival ends the pause."""
_MAX_COMMANDS = 10_000
_MAX_UNDELIVERED = 64
_MAX_CATCH_UP_S = 0.1
"""How far the modelled time may run behind the real one before the rest is forgotten."""

BuildCore = Callable[[ProgressSink], tuple[EngineCore, EngineInfo]]

Command = Callable[[EngineCore], Sequence[SequenceOutput]]
"""Something to do between steps; the answer holds outputs of sequences that were refused."""


class StepLoop(Protocol):
    """Owns an `EngineCore` and the time between its steps. `start` is called once, `close` any number of times."""

    async def start(self, build: BuildCore, progress: ProgressSink, owner: StepOwner) -> EngineInfo: ...

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Raises `Overloaded`."""
        ...

    def abort(self, streams: Sequence[int]) -> None: ...

    def call(self, command: Command) -> None:
        """Do something on the core, in order with submissions and aborts; never in the middle of a computation."""
        ...

    async def close(self, timeout_s: float) -> None: ...


class ThreadedLoop:
    """Builds, steps and closes the core on one thread, as fast as the executor goes."""

    def __init__(self, name: str = "engine") -> None:
        self._name = name
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        """None: close."""
        self._slots = threading.BoundedSemaphore(_MAX_UNDELIVERED)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._finished: asyncio.Future[None] | None = None

    async def start(self, build: BuildCore, progress: ProgressSink, owner: StepOwner) -> EngineInfo:
        loop = asyncio.get_running_loop()
        self._owner = owner
        self._loop = loop
        self._finished = loop.create_future()
        started: asyncio.Future[EngineInfo] = loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(build, progress, started), name=self._name, daemon=True)
        self._thread.start()
        return await started

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        if self._commands.qsize() >= _MAX_COMMANDS:
            raise Overloaded(f"more than {_MAX_COMMANDS} commands wait for the engine's next step")
        self._commands.put(lambda core: core.submit(requests))

    def abort(self, streams: Sequence[int]) -> None:
        self._commands.put(partial(_abort, streams))

    def call(self, command: Command) -> None:
        self._commands.put(command)

    async def close(self, timeout_s: float) -> None:
        """Ask the thread to end and wait; a thread stuck inside the executor is left behind, with a log line."""
        self._closing.set()
        self._commands.put(None)
        if self._finished is None:
            return
        done, _ = await asyncio.wait([self._finished], timeout=timeout_s)
        if not done:
            _log.error("the engine thread is stuck in a step and was left behind after %.1f s", timeout_s)

    def _run(self, build: BuildCore, progress: ProgressSink, started: "asyncio.Future[EngineInfo]") -> None:
        """The thread's life."""
        core: EngineCore | None = None
        try:
            core, info = build(partial(self._post_progress, progress))
            self._post(_resolve, started, info)
            self._serve(core)
        except Exception as error:  # noqa: BLE001 - the thread's boundary
            failure = _as_failure(error)
            self._post(self._fail, started, failure)
        finally:
            if core is not None:
                _close_core(core)
            core = None  # freed now: after the next line the interpreter may be on its way out
            self._post(_resolve, self._finished, None)

    def _serve(self, core: EngineCore) -> None:
        wait_s = 0.0
        while self._take_commands(core, wait_s):
            ran = core.plan_step()
            if core.has_news:
                self._deliver(core.flush())
            if ran:
                core.execute_step()
            if outcome := core.finish_step():
                self._deliver(outcome)
            wait_s = 0.0 if ran else _pause_s(core)

    def _take_commands(self, core: EngineCore, wait_s: float) -> bool:
        """Apply all commands there are, after waiting for a first one at most `wait_s`. False: it is time to end."""
        refused: list[SequenceOutput] = []
        took = False
        while True:
            try:
                command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            except queue.Empty:
                break
            wait_s = 0.0
            if command is not None:
                took = True
                refused += command(core)
        if took and (outcome := told_early(core, refused)):
            self._deliver(outcome)
        return not self._closing.is_set()

    def _deliver(self, outcome: StepOutcome) -> None:
        while not self._slots.acquire(timeout=_HEARTBEAT_S):
            if self._closing.is_set() or self._loop.is_closed():
                self._closing.set()
                return
        self._post(self._on_outcome, outcome)

    def _on_outcome(self, outcome: StepOutcome) -> None:
        self._slots.release()
        if not self._closing.is_set():
            self._owner.on_outcome(outcome)

    def _fail(self, started: "asyncio.Future[EngineInfo]", failure: HeadwaterError) -> None:
        if not started.done():
            started.set_exception(failure)
        elif not self._closing.is_set():
            self._owner.on_failed(failure)

    def _post_progress(self, sink: ProgressSink, progress: Progress) -> None:
        self._post(sink, progress)

    def _post(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the event loop is gone, and with it everyone who could listen
            self._closing.set()


class InlineLoop:
    """Steps the core on the event loop, each step taking the time the executor says it took.

    `speedup` divides that time; 0 means no time at all: one step per turn of the event loop, so that I/O goes on
    between steps. A timer that fires late shortens the next step, so the average speed is as modelled.
    """

    def __init__(self, speedup: float = 1.0) -> None:
        self._scale = 0.001 / speedup if speedup > 0 else 0.0
        self._core: EngineCore | None = None
        self._next: asyncio.Handle | None = None
        self._resting = False
        """Whether what comes next is only a heartbeat."""
        self._due = 0.0
        self._closed = False

    async def start(self, build: BuildCore, progress: ProgressSink, owner: StepOwner) -> EngineInfo:
        self._loop = asyncio.get_running_loop()
        self._owner = owner

        def report(step: Progress) -> None:
            self._loop.call_soon_threadsafe(progress, step)

        core, info = await asyncio.to_thread(build, report)
        if self._closed:
            core.close()
            raise EngineFailed("the engine was closed while it started")
        self._core = core
        self._wake()
        return info

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        self.call(lambda core: core.submit(requests))

    def abort(self, streams: Sequence[int]) -> None:
        self.call(partial(_abort, streams))

    def call(self, command: Command) -> None:
        self._guard(self._call, command)

    async def close(self, timeout_s: float) -> None:
        self._closed = True
        self._stop()

    def _call(self, core: EngineCore, command: Command) -> None:
        if outcome := told_early(core, command(core)):
            self._loop.call_soon(self._deliver, outcome)
        self._wake()

    def _wake(self) -> None:
        """Begin a step on the next turn, unless one is under way or about to begin."""
        if self._resting or self._next is None:
            self._schedule(0.0, self._begin)

    def _schedule(self, delay_s: float, action: Callable[[EngineCore], None]) -> None:
        if self._next is not None:
            self._next.cancel()
        self._resting = False
        if delay_s > 0:
            self._next = self._loop.call_later(delay_s, self._guard, action)
        else:
            self._next = self._loop.call_soon(self._guard, action)

    def _begin(self, core: EngineCore) -> None:
        planned = core.plan_step()
        if core.has_news:
            self._loop.call_soon(self._deliver, core.flush())
        if not planned:
            self._due = 0.0
            self._loop.call_soon(self._deliver, core.finish_step())
            self._schedule(_pause_s(core), self._begin)
            self._resting = True
            return
        duration_ms = core.execute_step()
        delay_s = self._delay_until_due(duration_ms * self._scale) if self._scale else 0.0
        if delay_s > 0:
            self._schedule(delay_s, self._finish)
        else:
            self._finish(core)

    def _finish(self, core: EngineCore) -> None:
        self._loop.call_soon(self._deliver, core.finish_step())
        self._schedule(0.0, self._begin)

    def _delay_until_due(self, duration_s: float) -> float:
        now = self._loop.time()
        begun = max(self._due, now - _MAX_CATCH_UP_S) if self._due else now
        self._due = begun + duration_s
        return self._due - now

    def _deliver(self, outcome: StepOutcome) -> None:
        if not self._closed and outcome:
            self._owner.on_outcome(outcome)

    def _guard(self, action: Callable[..., None], *args: object) -> None:
        """Run an action on the core; whatever it raises ends the engine, not the event loop."""
        if self._core is None:
            return
        try:
            action(self._core, *args)
        except Exception as error:  # noqa: BLE001 - the callback's boundary
            failure = _as_failure(error)
            self._stop()
            self._loop.call_soon(self._fail, failure)

    def _fail(self, failure: HeadwaterError) -> None:
        if not self._closed:
            self._owner.on_failed(failure)

    def _stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
        core, self._core = self._core, None
        if core is not None:
            _close_core(core)


def _pause_s(core: EngineCore) -> float:
    """After a step that found nothing to run."""
    if not core.has_work:
        return _HEARTBEAT_S
    return _LOADING_S if core.only_loads else _RETRY_S


def told_early(core: EngineCore, refused: Sequence[SequenceOutput]) -> StepOutcome:
    """What commands have brought about."""
    outcome = core.flush()
    outcome.outputs.extend(refused)
    return outcome


def _abort(streams: Sequence[int], core: EngineCore) -> Sequence[SequenceOutput]:
    core.abort(streams)
    return ()


def _resolve(future: "asyncio.Future[object] | None", value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _as_failure(error: Exception) -> HeadwaterError:
    """The error as the outside sees it; logged here, once, when it is not one the operator can act on."""
    if isinstance(error, ConfigError | ModelError):
        return error
    _log.error("the engine failed", exc_info=error)
    return error if isinstance(error, HeadwaterError) else EngineFailed(f"the engine failed: {error!r}")


def _close_core(core: EngineCore) -> None:
    try:
        core.close()
    except Exception:  # noqa: BLE001 - nobody is left to tell but the log
        _log.exception("the engine did not close cleanly")
