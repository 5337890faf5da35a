"""The local supervisor: runs frontends and workers as child processes and keeps them running.

A thin shell around `Supervision`, which decides: this module starts processes, carries signals, timers and reports,
and tells an observer. Children get the configuration through an unlinked file that they inherit: nothing secret is on
a command line, in an environment or under a name.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from typing import IO, Protocol

import msgspec

from headwater.clock import Clock, RealClock
from headwater.config.fields import ENVIRONMENT_PREFIX
from headwater.config.schema import ServeConfig
from headwater.deploy.child import arguments
from headwater.deploy.process import Child, describe_exit
from headwater.deploy.reports import READY, FailureReport, ProgressReport, Report
from headwater.deploy.restarts import RestartLimits
from headwater.deploy.supervision import (
    Action,
    AllReady,
    Finish,
    GaveUp,
    Kill,
    Limits,
    Part,
    Restarting,
    Start,
    Stopping,
    Supervision,
    Terminate,
)

CHILD_COMMAND = (sys.executable, "-m", "headwater.deploy.parts")
_SPAWN_FAILED_EXIT = 126
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Observer(Protocol):
    """Hears what happens; called on the event loop and must not block."""

    def on_log(self, part: Part, lines: Sequence[bytes]) -> None: ...

    def on_progress(self, part: Part, report: ProgressReport) -> None: ...

    def on_restarting(self, part: Part, reason: str, delay_s: float) -> None: ...

    def on_gave_up(self, part: Part, reason: str) -> None: ...

    def on_serving(self) -> None: ...

    def on_stopping(self, reason: str) -> None: ...


class LocalSupervisor:
    """Runs one graph once: `await run()`."""

    def __init__(
        self,
        config: ServeConfig,
        observer: Observer,
        *,
        check_serving: Callable[[], Awaitable[None]],
        command: Sequence[str] = CHILD_COMMAND,
        clock: Clock | None = None,
    ) -> None:
        """`check_serving` returns once the whole answers requests; it is cancelled when that is no longer wanted."""
        self._config = config
        self._observer = observer
        self._check_serving = check_serving
        self._command = command
        self._clock = clock or RealClock()
        self._core = Supervision(parts_of(config), limits_of(config))
        self._children: dict[Part, Child] = {}
        self._failures: dict[Part, FailureReport] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Drain and leave; called again: leave at once."""
        self._apply(self._core.stop(self._clock.now()))

    def pids(self) -> dict[Part, int]:
        return {part: child.pid for part, child in self._children.items()}

    async def run(self) -> Finish:
        """Until stopped, or until nothing useful is left to run."""
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[Finish] = self._loop.create_future()
        self._config_file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed below; outlives this frame
        self._config_file.write(msgspec.json.encode(self._config))
        self._config_file.flush()
        signals = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        try:
            for number in signals:
                self._loop.add_signal_handler(number, self.stop)
            self._apply(self._core.begin(self._clock.now()))
            return await self._finished
        finally:
            for number in signals:
                self._loop.remove_signal_handler(number)
            await self._release()

    async def _release(self) -> None:
        """Leave nothing running, whatever happened."""
        if self._timer is not None:
            self._timer.cancel()
        for child in self._children.values():
            child.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._config_file.close()

    # Actions

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._act(action)
        if not self._finished.done():
            self._arm_timer()

    def _act(self, action: Action) -> None:
        match action:
            case Start(part):
                self._start(part)
            case Terminate(part):
                if child := self._children.get(part):
                    child.terminate()
            case Kill(part):
                if child := self._children.get(part):
                    child.kill()
            case Restarting(part, reason, delay_s):
                self._observer.on_restarting(part, reason, delay_s)
            case GaveUp(part, reason):
                self._observer.on_gave_up(part, reason)
            case Stopping(reason):
                self._observer.on_stopping(reason)
            case AllReady():
                self._spawn_task(self._await_serving())
            case Finish():
                if not self._finished.done():
                    self._finished.set_result(action)

    def _start(self, part: Part) -> None:
        self._failures.pop(part, None)
        report_fds = os.pipe()
        config_fd = self._config_file.fileno()
        command = [*self._command, *arguments(part.kind, part.index, config_fd, report_fds[1])]
        try:
            child = Child.start(command, report_fds, config_fd, _child_environment())
        except OSError as error:
            self._loop.call_soon(self._exited, part, _SPAWN_FAILED_EXIT, f"cannot start: {error}")
            return
        self._children[part] = child
        self._spawn_task(self._watch(part, child))

    async def _watch(self, part: Part, child: Child) -> None:
        code = await child.wait(
            lambda lines: self._observer.on_log(part, lines), lambda report: self._reported(part, report)
        )
        del self._children[part]
        failure = self._failures.get(part)
        self._exited(part, code, str(failure) if failure else describe_exit(code))

    async def _await_serving(self) -> None:
        await self._check_serving()
        if not self._core.stopping:
            self._core.serving()
            self._observer.on_serving()
            self._arm_timer()

    def _spawn_task(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._finished.done():
            self._finished.set_exception(error)

    # Events

    def _exited(self, part: Part, code: int, reason: str) -> None:
        self._apply(self._core.exited(part, self._clock.now(), code, reason))

    def _reported(self, part: Part, report: Report) -> None:
        if isinstance(report, FailureReport):
            self._failures[part] = report
            return
        self._observer.on_progress(part, report)
        now = self._clock.now()
        self._core.progressed(now)
        self._apply(self._core.ready(part, now) if report.phase == READY else [])

    def _tick(self) -> None:
        self._timer = None
        self._apply(self._core.tick(self._clock.now()))

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._core.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._clock.now()), self._tick)


def parts_of(config: ServeConfig) -> list[Part]:
    """Frontends first: they are up in a moment and can say that the rest is still loading."""
    frontends = [Part("frontend", index) for index in range(config.frontends)]
    return [*frontends, *(Part("worker", index) for index in range(config.workers))]


def limits_of(config: ServeConfig) -> Limits:
    return Limits(
        restarts=RestartLimits(max_restarts=config.max_restarts),
        ready_timeout_s=config.ready_timeout,
        drain_timeout_s=config.runtime.drain_timeout,
    )


def _child_environment() -> dict[str, str]:
    """Ours without configuration, which reaches children through the file alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    return {**kept, "PYTHONUNBUFFERED": "1"}
