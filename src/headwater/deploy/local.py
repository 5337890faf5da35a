"""The local supervisor: runs frontends and workers as child processes and keeps them running.

A thin shell around `Supervision`, which decides: this module starts processes, carries signals, timers and reports,
and tells an observer. SIGTERM and SIGINT stop everything; SIGUSR2 restarts one process after the other, as does SIGHUP
unless it says that our terminal was closed. Children get the configuration through an unlinked file that they inherit:
nothing secret is on a command line, in an environment or under a name.
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
from headwater.deploy.actions import (
    Action,
    AllReady,
    Finish,
    GaveUp,
    Kill,
    Part,
    Restarting,
    Rolled,
    Start,
    Stopping,
    Terminate,
)
from headwater.deploy.child import Seat, arguments
from headwater.deploy.ports import Listeners
from headwater.deploy.process import Child, describe_exit
from headwater.deploy.reports import READY, WAIT, FailureReport, HungReport, ProgressReport, Report
from headwater.deploy.restarts import RestartLimits
from headwater.deploy.supervision import Limits, Supervision

CHILD_COMMAND = (sys.executable, "-m", "headwater.deploy.parts")
_SPAWN_FAILED_EXIT = 126
RESTART_SIGNAL = signal.SIGUSR2
HANDOVER_SIGNAL = signal.SIGUSR1
"""To a frontend: another one accepts from its socket now."""


class Observer(Protocol):
    """Hears what happens; called on the event loop and must not block."""

    def on_log(self, part: Part, lines: Sequence[bytes]) -> None: ...

    def on_progress(self, part: Part, report: ProgressReport) -> None: ...

    def on_restarting(self, part: Part, reason: str, delay_s: float) -> None: ...

    def on_gave_up(self, part: Part, reason: str) -> None: ...

    def on_serving(self) -> None: ...

    def on_rolling(self) -> None:
        """One process after the other is being replaced."""
        ...

    def on_rolled(self, failure: str | None) -> None: ...

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
        self._listeners = Listeners(config.frontend.host, config.frontend.port)
        self._children: dict[Part, Child] = {}
        self._failures: dict[Part, FailureReport] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Drain and leave; called again: leave at once."""
        self._apply(self._core.stop(self._clock.now()))

    def restart(self) -> None:
        """Replace one process after the other; nothing if that is under way."""
        actions = self._core.restart(self._clock.now())
        if actions:
            self._observer.on_rolling()
        self._apply(actions)

    def pids(self) -> dict[Part, int]:
        return {part: child.pid for part, child in self._children.items()}

    async def run(self) -> Finish:
        """Until stopped, or until nothing useful is left to run."""
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[Finish] = self._loop.create_future()
        self._config_file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed below; outlives this frame
        self._config_file.write(msgspec.json.encode(self._config))
        self._config_file.flush()
        handlers = {n: act for n, act in self._handlers().items() if signal.getsignal(n) is not signal.SIG_IGN}
        try:
            for number, act in handlers.items():
                self._loop.add_signal_handler(number, act)
            self._apply(self._core.begin(self._clock.now()))
            return await self._finished
        finally:
            for number in handlers:
                self._loop.remove_signal_handler(number)
            await self._release()

    def _handlers(self) -> dict[signal.Signals, Callable[[], None]]:
        on_hangup = self.stop if os.isatty(0) else self.restart
        return {
            signal.SIGTERM: self.stop,
            signal.SIGINT: self.stop,
            signal.SIGHUP: on_hangup,
            RESTART_SIGNAL: self.restart,
        }

    async def _release(self) -> None:
        """Leave nothing running, whatever happened."""
        if self._timer is not None:
            self._timer.cancel()
        for child in self._children.values():
            child.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listeners.close()
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
            case Terminate(part, succeeded):
                if child := self._children.get(part):
                    child.terminate(HANDOVER_SIGNAL if succeeded else signal.SIGTERM)
            case Kill(part):
                if child := self._children.get(part):
                    child.kill()
            case AllReady():
                self._spawn_task(self._await_serving())
            case Finish():
                if not self._finished.done():
                    self._finished.set_result(action)
            case _:
                self._tell(action)

    def _tell(self, news: Restarting | GaveUp | Rolled | Stopping) -> None:
        match news:
            case Restarting(part, reason, delay_s):
                if delay_s:
                    self._close_listeners(part)
                self._observer.on_restarting(part, reason, delay_s)
            case GaveUp(part, reason):
                self._close_listeners(part)
                self._observer.on_gave_up(part, reason)
            case Rolled(failure):
                self._observer.on_rolled(failure)
            case Stopping(reason):
                self._observer.on_stopping(reason)

    def _start(self, part: Part) -> None:
        self._failures.pop(part, None)
        report_fds = os.pipe()
        config_fd = self._config_file.fileno()
        try:
            seat = Seat(part.index, self._listeners.of(part.index) if part.kind == "frontend" else ())
            command = [*self._command, *arguments(part.kind, seat, config_fd, report_fds[1])]
            child = Child.start(command, report_fds, (config_fd, *seat.listen_fds), _child_environment())
        except OSError as error:
            self._loop.call_soon(self._exited, part, _SPAWN_FAILED_EXIT, f"cannot start: {error}")
            return
        self._children[part] = child
        self._spawn_task(self._watch(part, child))

    def _close_listeners(self, part: Part) -> None:
        """Nobody accepts from its sockets for now: clients are to find somebody else's."""
        if part.kind == "frontend" and self._config.frontends > 1:
            self._listeners.drop(part.index)

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
        if isinstance(report, HungReport):
            self._hung(report, part)
            return
        self._observer.on_progress(part, report)
        now = self._clock.now()
        if report.phase == WAIT:
            self._core.waits(part, report.detail)
        else:
            self._core.progressed(part, now)
        self._apply(self._core.ready(part, now) if report.phase == READY else [])

    def _hung(self, report: HungReport, frontend: Part) -> None:
        part = next((part for part, child in self._children.items() if child.pid == report.pid), None)
        if part is None or part.kind != "worker":
            return
        actions = self._core.hung(part, frontend, self._clock.now())
        if actions:
            self._failures[part] = FailureReport("hung", f"it has answered nothing for {report.silent_s:.0f} s")
            self._apply(actions)

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
    if config.kv.own_store:
        frontends.append(Part("store", 0))
    return [*frontends, *(Part("worker", index) for index in range(config.workers))]


def limits_of(config: ServeConfig) -> Limits:
    return Limits(
        restarts=RestartLimits(max_restarts=config.max_restarts),
        ready_timeout_s=config.ready_timeout,
        drain_timeout_s=config.runtime.drain_timeout,
        handover_timeout_s=config.runtime.handover_timeout,
        hang_restart_s=config.faults.hang_restart,
    )


def _child_environment() -> dict[str, str]:
    """Ours without configuration, which reaches children through the file alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    return {**kept, "PYTHONUNBUFFERED": "1"}
