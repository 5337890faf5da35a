"""What becomes of a transfer, on both sides, and what can stop one."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from headwater.clock import Clock
from headwater.errors import PeerLost, TransferError, TransferTimeout
from headwater.transfer.reactor import Reactor, Timer

_LOOK_S = 0.2


class Stop:
    """Why a piece of work must end early: a deadline, or the first error that any thread reports."""

    __slots__ = ("_clock", "_error", "deadline")

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._error: TransferError | None = None
        self.deadline = clock.now() + timeout_s

    def fail(self, error: TransferError) -> None:
        if self._error is None:
            self._error = error

    def check(self) -> None:
        """Raise what stopped it, if anything did."""
        if self._error is not None:
            raise type(self._error)(self._error.message)
        if self._clock.now() >= self.deadline:
            raise TransferTimeout("not done when the deadline came")

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline - self._clock.now())


@contextmanager
def held(lock: threading.Lock, stop: Stop) -> Iterator[None]:
    """A lock that others may hold for as long as a peer takes to answer."""
    while not lock.acquire(timeout=min(_LOOK_S, stop.remaining_s)):
        stop.check()
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True, slots=True)
class Moved:
    """A transfer that is done."""

    num_bytes: int
    duration_ms: float
    backend: str


@dataclass(frozen=True, slots=True)
class Notice:
    """What the passive side learns: user bytes with the completion, or why there is none."""

    peer: str
    generation: int
    tag: bytes
    payload: bytes
    num_bytes: int
    error: TransferError | None = None


@dataclass(slots=True)
class _Expectation:
    peer: str
    generation: int | None
    future: Future[Notice]
    timer: Timer


class Inbox:
    """Notices, by tag for those who expect one, else in a bounded queue that drops the oldest."""

    def __init__(self, reactor: Reactor, max_notices: int) -> None:
        self._reactor = reactor
        self._lock = threading.Lock()
        self._queue: deque[Notice] = deque(maxlen=max_notices)
        self._expected: dict[tuple[str, bytes], _Expectation] = {}
        self._max_expected = max_notices
        self.dropped = 0

    def expect(self, peer: str, generation: int | None, tag: bytes, timeout_s: float) -> Future[Notice]:
        """Also finds a notice that is already here. Raises `TransferError` for a tag that is already expected."""
        future: Future[Notice] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            early = next((notice for notice in self._queue if (notice.peer, notice.tag) == (peer, tag)), None)
            if early is not None:
                self._queue.remove(early)
            elif (peer, tag) in self._expected or len(self._expected) >= self._max_expected:
                raise TransferError(f"tag {tag!r} of {peer} is already expected, or {self._max_expected} others are")
            else:
                timer = self._reactor.later(timeout_s, lambda: self._time_out(peer, tag, timeout_s))
                self._expected[peer, tag] = _Expectation(peer, generation, future, timer)
        if early is not None:
            _resolve(future, early)
        return future

    def deliver(self, notice: Notice) -> None:
        with self._lock:
            found = self._expected.pop((notice.peer, notice.tag), None)
            if found is None:
                self.dropped += len(self._queue) == self._queue.maxlen
                self._queue.append(notice)
        if found is not None:
            found.timer.cancel()
            _resolve(found.future, notice)

    def take(self, most: int) -> list[Notice]:
        with self._lock:
            return [self._queue.popleft() for _ in range(min(most, len(self._queue)))]

    def forget(self, peer: str, tag: bytes, error: TransferError) -> None:
        with self._lock:
            found = self._expected.pop((peer, tag), None)
        if found is not None:
            found.timer.cancel()
            found.future.set_exception(error)

    def lose(self, peer: str, generation: int, error: TransferError) -> None:
        """A life of a peer ended: nothing more will come from it."""
        with self._lock:
            lost = [
                key
                for key, expected in self._expected.items()
                if expected.peer == peer and expected.generation in (None, generation)
            ]
        for key in lost:
            self.forget(*key, error)

    def close(self) -> None:
        with self._lock:
            left = list(self._expected)
        for key in left:
            self.forget(*key, PeerLost("this agent was closed"))

    def _time_out(self, peer: str, tag: bytes, timeout_s: float) -> None:
        self.forget(peer, tag, TransferTimeout(f"{peer} sent nothing for {tag!r} within {timeout_s:g} s"))


def _resolve(future: Future[Notice], notice: Notice) -> None:
    if notice.error is None:
        future.set_result(notice)
    else:
        future.set_exception(notice.error)
