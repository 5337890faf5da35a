"""What a supervisor decides: which process to start, end or give up, and when. Pure: events in, actions out.

    starting ──all ready──> (AllReady) ──serving()──> serving
        └────────────┬──────────────────────────────────┘
              stop, no progress in time, or all of a kind given up
                     v
    stopping: frontends drain first, while workers still serve their streams; then workers; then Finish

A rolling restart (`restart`) replaces one process after the other. A worker leaves, its streams end or go on at the
others, then its successor starts. A frontend's successor starts first, on the same listening socket; when it is ready
the old one stops accepting and has long to end what it has begun, while the restart goes on. A successor is another
part with the same index. When one cannot be started the rest stays as it is. The KV store of the node stays in a
rolling restart, leaves with the workers, and is the one kind that the rest goes on without.

Invariants, checked by `check()`: at most one live process per part; after `stop` nothing is started; `Finish` comes
exactly once and only when nothing is alive. A process that fails with `PERMANENT_EXIT` before it was ever ready is not
started again, because the same configuration would fail the same way. One that leaves with code 0 was asked to, and is
replaced at once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headwater.deploy.actions import (
    FAILED_EXIT,
    NOT_READY_EXIT,
    PERMANENT_EXIT,
    Action,
    AllReady,
    Finish,
    GaveUp,
    Kill,
    Kind,
    Part,
    Restarting,
    Rolled,
    Start,
    Stopping,
    Terminate,
)
from headwater.deploy.restarts import RestartLimits, RestartPolicy


@dataclass(frozen=True, slots=True)
class Limits:
    restarts: RestartLimits = field(default_factory=RestartLimits)
    ready_timeout_s: float = 600.0
    """Without any progress while starting; 0 for no limit."""
    drain_timeout_s: float = 30.0
    handover_timeout_s: float = 600.0
    """For a frontend that has been succeeded."""
    hang_restart_s: float = 120.0
    """How often a frontend says again that a worker hangs."""
    exit_grace_s: float = 5.0
    """What a process gets beyond its own drain time before it is killed."""


Status = Literal["down", "starting", "ready", "waiting", "given_up"]
_ALIVE = ("starting", "ready")


@dataclass(slots=True)
class _State:
    policy: RestartPolicy
    status: Status = "down"
    ready_at: float = 0.0
    ever_ready: bool = False
    start_at: float | None = None
    kill_at: float | None = None
    succeeded: bool = False
    trouble: str = ""
    """What it waits for, or why it ended last."""
    hung: dict[Part, float] = field(default_factory=dict)
    """When which frontend last said that it does not answer."""

    @property
    def alive(self) -> bool:
        return self.status in _ALIVE


@dataclass(slots=True)
class _Ending:
    """Why and how far the graph is being stopped."""

    code: int
    reason: str
    workers_too: bool = False
    finished: bool = False


@dataclass(slots=True)
class _Roll:
    """A rolling restart under way: who is still to be replaced, who leaves and who comes now."""

    waiting: deque[Part]
    leaving: Part | None = None
    coming: Part | None = None


@dataclass(slots=True)
class Supervision:
    """The state of a graph of processes."""

    parts: Sequence[Part]
    limits: Limits = field(default_factory=Limits)
    _states: dict[Part, _State] = field(init=False, default_factory=dict)
    _ready_by: float | None = field(init=False, default=None)
    _announced: bool = field(init=False, default=False)
    _serving: bool = field(init=False, default=False)
    _ending: _Ending | None = field(init=False, default=None)
    _roll: _Roll | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._states = {part: _State(RestartPolicy(self.limits.restarts)) for part in self.parts}

    @property
    def stopping(self) -> bool:
        return self._ending is not None

    @property
    def rolling(self) -> bool:
        return self._roll is not None

    @property
    def finished(self) -> bool:
        return self._ending is not None and self._ending.finished

    def status(self, part: Part) -> Status:
        return self._states[part].status

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        times = [at for state in self._states.values() for at in (state.start_at, state.kill_at) if at is not None]
        if self._ready_by is not None:
            times.append(self._ready_by)
        return min(times, default=None)

    # Events

    def begin(self, now: float) -> list[Action]:
        self._extend_ready_deadline(now)
        return [self._start(part) for part in self.parts]

    def progressed(self, part: Part, now: float) -> None:
        """A part reported that its start-up moves on."""
        self.waits(part, "")
        self._extend_ready_deadline(now)

    def waits(self, part: Part, what_for: str) -> None:
        """A part reported that it cannot go on by itself, which is no progress."""
        if part in self._states:
            self._states[part].trouble = what_for

    def ready(self, part: Part, now: float) -> list[Action]:
        state = self._states[part]
        if state.status != "starting":
            return []
        state.status, state.ready_at, state.ever_ready = "ready", now, True
        self._extend_ready_deadline(now)
        roll = self._roll
        if roll is not None and part == roll.coming:
            roll.coming = None
            return [*self._announce(), *self._roll_on(now)]
        return self._announce()

    def hung(self, part: Part, by: Part, now: float) -> list[Action]:
        """A frontend says that a worker does not answer any more, and says so again every `hang_restart_s`. When all
        do, another process is to take its place: one alone may be what is wrong. Nothing for one that is leaving."""
        state = self._states.get(part)
        if state is None or state.status != "ready" or state.kill_at is not None or self._ending is not None:
            return []
        state.hung[by] = now
        oldest = now - 2 * self.limits.hang_restart_s
        frontends = [other for other, its in self._states.items() if other.kind == "frontend" and its.status == "ready"]
        return [Kill(part)] if all(state.hung.get(other, oldest) > oldest for other in frontends) else []

    def serving(self) -> None:
        """The whole answers requests: start-up is over."""
        self._serving = True
        self._ready_by = None

    def exited(self, part: Part, now: float, code: int, reason: str) -> list[Action]:
        state = self._states[part]
        if not state.alive:
            return []
        ready_s = now - state.ready_at if state.status == "ready" else 0.0
        state.status, state.kill_at, state.trouble = "down", None, reason
        state.hung.clear()
        if self._ending is not None:
            return self._proceed(now)
        if state.succeeded:
            del self._states[part]
            return []
        if self._roll is not None and (part == self._roll.leaving or self._cannot_come(part)):
            return self._replaced(part, now, reason)
        if code == 0 and state.ever_ready:
            state.status, state.start_at = "waiting", now
            return [Restarting(part, reason, 0.0)]
        delay_s = None if code == PERMANENT_EXIT and not state.ever_ready else state.policy.after_exit(ready_s)
        if delay_s is None:
            return self._give_up(part, now, code, reason)
        state.status, state.start_at = "waiting", now + delay_s
        return [Restarting(part, reason, delay_s)]

    def restart(self, now: float) -> list[Action]:
        """Replace what runs, workers first. Nothing while that is under way already, or all is being stopped."""
        if self._roll is not None or self._ending is not None:
            return []
        replaceable = [part for part, state in self._states.items() if part.kind != "store" and not state.succeeded]
        ready = [part for part in replaceable if self._states[part].status == "ready"]
        self._roll = _Roll(deque(sorted(ready, key=lambda part: (part.kind == "frontend", part.index))))
        return self._roll_on(now)

    def stop(self, now: float, code: int = 0, reason: str = "asked to stop") -> list[Action]:
        """The first time: drain. Again: end everything now."""
        if self._ending is not None:
            return [Kill(part) for part in self._alive()]
        self._ending = _Ending(code, reason)
        self._ready_by = None
        self._roll = None
        for state in self._states.values():
            state.start_at = None
            if state.status == "waiting":
                state.status = "down"
        drain_s = self.limits.drain_timeout_s + self.limits.exit_grace_s
        return [Stopping(reason), *self._terminate("frontend", now + drain_s), *self._proceed(now)]

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for part, state in self._states.items():
            if state.start_at is not None and state.start_at <= now:
                actions.append(self._start(part))
            if state.kill_at is not None and state.kill_at <= now:
                state.kill_at = None
                actions.append(Kill(part))
        if self._ready_by is not None and self._ready_by <= now:
            waited = f"{self.limits.ready_timeout_s:g} s"
            missing = ", ".join(_missing(part, its) for part, its in self._states.items() if its.status != "ready")
            reason = f"not ready: no progress for {waited}" + (f" (waiting for {missing})" if missing else "")
            actions += self.stop(now, NOT_READY_EXIT, reason)
        return actions

    def check(self) -> None:
        """Assert the invariants."""
        for state in self._states.values():
            assert (state.start_at is not None) == (state.status == "waiting")
            assert state.kill_at is None or state.alive
        if self._roll is not None:
            assert self._roll.leaving is not None or self._roll.coming is not None
        if self._ending is not None:
            assert self._roll is None
            assert self._ready_by is None
            assert all(state.status != "waiting" for state in self._states.values())
            assert not (self._ending.finished and self._alive())

    # Decisions

    def _start(self, part: Part) -> Start:
        state = self._states[part]
        state.status, state.start_at = "starting", None
        return Start(part)

    def _roll_on(self, now: float) -> list[Action]:
        """The next step of a rolling restart, if the last one is done."""
        roll = self._roll
        if roll is None or roll.coming is not None:
            return []
        actions: list[Action] = []
        if roll.leaving is not None:
            actions, roll.leaving = self._dismiss(roll.leaving, now), None
        while roll.waiting:
            part = roll.waiting.popleft()
            if part not in self._states or self._states[part].status != "ready":
                continue  # it has died by itself since
            roll.leaving = part
            return [*actions, *self._dismiss(part, now)] if part.kind == "worker" else [*actions, self._succeed(part)]
        self._roll = None
        return [*actions, Rolled()]

    def _dismiss(self, part: Part, now: float) -> list[Action]:
        """A worker is replaced after it has left, a frontend has been already."""
        state = self._states[part]
        if not state.alive:
            return []
        state.succeeded = part.kind == "frontend"
        time_s = self.limits.handover_timeout_s if state.succeeded else self.limits.drain_timeout_s
        state.kill_at = now + time_s + self.limits.exit_grace_s
        return [Terminate(part, state.succeeded)]

    def _succeed(self, part: Part) -> Start:
        assert self._roll is not None
        self._roll.coming = part.successor
        self._states[part.successor] = _State(RestartPolicy(self.limits.restarts))
        return self._start(part.successor)

    def _cannot_come(self, part: Part) -> bool:
        """A frontend's successor has failed while the old one still serves."""
        roll = self._roll
        return roll is not None and part == roll.coming and part.kind == "frontend" and roll.leaving is not None

    def _replaced(self, part: Part, now: float, reason: str) -> list[Action]:
        """One of a pair has gone."""
        roll = self._roll
        assert roll is not None
        del self._states[part]
        if part == roll.coming:
            self._roll = None
            return [Rolled(f"{part} could not be replaced: {reason}")]
        roll.leaving = None
        if part.kind == "worker":
            return [self._succeed(part)]
        return self._roll_on(now)

    def _announce(self) -> list[Action]:
        left = [state.status for state in self._states.values() if state.status != "given_up"]
        if self._announced or self._ending is not None or any(status != "ready" for status in left):
            return []
        self._announced = True
        return [AllReady()]

    def _give_up(self, part: Part, now: float, code: int, reason: str) -> list[Action]:
        state = self._states[part]
        state.status = "given_up"
        rolled: list[Action] = []
        if self._roll is not None and part == self._roll.coming:
            self._roll = None
            rolled = [Rolled(f"{part} could not be started again: {reason}")]
        if state.policy.failures > self.limits.restarts.max_restarts:
            reason = f"{reason} (failed {state.policy.failures} times in a row)"
        actions: list[Action] = [*rolled, GaveUp(part, reason)]
        alike = [other for same, other in self._states.items() if same.kind == part.kind]
        needed = part.kind != "store" or (code == PERMANENT_EXIT and not state.ever_ready)
        if needed and all(other.status == "given_up" for other in alike):
            final = PERMANENT_EXIT if code == PERMANENT_EXIT else FAILED_EXIT
            return [*actions, *self.stop(now, final, f"no {part.kind} is left; {part}: {reason}")]
        return [*actions, *self._announce()]

    def _proceed(self, now: float) -> list[Action]:
        """Go on with stopping as far as what has left allows."""
        ending = self._ending
        if ending is None or ending.finished:
            return []
        alive = self._alive()
        if not alive:
            ending.finished = True
            return [Finish(ending.code, ending.reason)]
        if not ending.workers_too and all(part.kind != "frontend" for part in alive):
            ending.workers_too = True
            leave_by = now + self.limits.exit_grace_s
            return [*self._terminate("worker", leave_by), *self._terminate("store", leave_by)]
        return []

    def _terminate(self, kind: Kind, kill_at: float) -> list[Action]:
        actions: list[Action] = []
        for part in self._alive():
            if part.kind == kind:
                self._states[part].kill_at = kill_at
                actions.append(Terminate(part))
        return actions

    def _alive(self) -> list[Part]:
        return [part for part, state in self._states.items() if state.alive]

    def _extend_ready_deadline(self, now: float) -> None:
        if self.limits.ready_timeout_s > 0 and not self._serving and self._ending is None:
            self._ready_by = now + self.limits.ready_timeout_s


def _missing(part: Part, state: _State) -> str:
    return f"{part}: {state.trouble}" if state.trouble else str(part)
