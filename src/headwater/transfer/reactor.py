"""One thread per agent that waits for sockets and time; handlers run in it and must not block."""

import contextlib
import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

from headwater.clock import Clock

logger = logging.getLogger(__name__)

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
OnEvents = Callable[[int], None]


class Timer:
    """A call to come; `cancel()` from any thread."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Reactor:
    """`call` and `later` from any thread, `watch`, `change` and `unwatch` only from handlers."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.now = clock.now
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, READ, None)
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"transfer-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End after the calls made so far. Idempotent; not from a handler."""
        if self._closing:
            return
        self.call(self._end)
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join()

    def call(self, function: Callable[[], None]) -> bool:
        """Run `function` in the reactor, soon; False once it is closed."""
        with self._lock:
            if self._closing:
                return False
            self._calls.append(function)
            os.eventfd_write(self._wake, 1)
            return True

    def later(self, delay_s: float, function: Callable[[], None]) -> Timer:
        timer = Timer(function)
        when = self.now() + delay_s
        self.call(lambda: heapq.heappush(self._timers, (when, next(self._order), timer)))
        return timer

    def watch(self, sock: socket.socket, events: int, on_events: OnEvents) -> None:
        self._selector.register(sock, events, on_events)

    def change(self, sock: socket.socket, events: int, on_events: OnEvents) -> None:
        self._selector.modify(sock, events, on_events)

    def unwatch(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def _end(self) -> None:
        with self._lock:
            self._closing = True

    def _run(self) -> None:
        while not self._closing or self._calls:
            # What arrived is read before timers judge how long a peer was silent.
            for key, events in self._selector.select(self._until_timer()):
                if key.data is None:
                    os.eventfd_read(self._wake)
                else:
                    self._handle(key.data, events)
            self._run_timers()
            for _ in range(len(self._calls)):
                self._handle(self._calls.popleft())
        self._selector.close()
        os.close(self._wake)

    def _until_timer(self) -> float | None:
        if self._calls:
            return 0.0
        return max(0.0, self._timers[0][0] - self.now()) if self._timers else None

    def _run_timers(self) -> None:
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            call = heapq.heappop(self._timers)[2].call
            if call is not None:
                self._handle(call)

    def _handle(self, function: Callable[..., None], *args: int) -> None:
        try:
            function(*args)
        except Exception:
            logger.exception("a transfer handler failed")
