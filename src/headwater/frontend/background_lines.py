"""Lines for a file, written beside the work and never in its way.

`add` costs an append. A thread encodes and writes once a second, and at `close`. What waits is bounded in number and
bytes; what does not fit, or cannot be written because the disk is full, is dropped, counted, and said once a minute.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from headwater.clock import Clock
from headwater.frontend.line_file import LineFile

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FLUSH_INTERVAL_S = 1.0
_COMPLAIN_INTERVAL_S = 60.0
_CLOSE_TIMEOUT_S = 5.0


class BackgroundLines(Generic[T]):
    """`add` and `close` are for one thread, the event loop's. Owns the file."""

    def __init__(
        self,
        file: LineFile,
        encode: Callable[[T], bytes],
        clock: Clock,
        *,
        loss: str,
        max_pending: int,
        max_pending_bytes: int = 0,
        durable: bool = False,
    ) -> None:
        """`encode`: a line without its end; called on the thread. `loss`: what is said of how many, as in
        `requests could not be recorded`. `durable`: what was written outlives a loss of power."""
        self._file, self._encode, self._clock, self._loss = file, encode, clock, loss
        self._max_pending, self._max_pending_bytes, self._durable = max_pending, max_pending_bytes, durable
        self._pending: deque[tuple[T, int]] = deque()
        # Each of these is written by one thread only.
        self._noted_bytes = self._num_refused = 0
        self._taken_bytes = self._num_lost = 0
        self._wake = threading.Event()
        self._closing = False
        self._complained = float("-inf")
        self._told = 0
        self._thread = threading.Thread(target=self._run, name="background-lines", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        return self._num_refused + self._num_lost

    def add(self, line: T, num_bytes: int = 0) -> None:
        """Never waits and never raises. `num_bytes` is what it weighs against `max_pending_bytes`."""
        pending_bytes = self._noted_bytes - self._taken_bytes
        if len(self._pending) >= self._max_pending or pending_bytes + num_bytes > self._max_pending_bytes:
            self._num_refused += 1
            return
        self._noted_bytes += num_bytes
        self._pending.append((line, num_bytes))

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_FLUSH_INTERVAL_S)
            self._flush()
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        batch: list[T] = []
        while self._pending:
            line, num_bytes = self._pending.popleft()
            self._taken_bytes += num_bytes
            batch.append(line)
        try:
            if batch:
                self._file.append([self._encode(line) + b"\n" for line in batch])
                if self._durable:
                    self._file.sync()
        except OSError as error:
            self._num_lost += len(batch)
            self._complain(f": {error.strerror}")
        if self.num_dropped > self._told:
            self._complain("")

    def _complain(self, reason: str) -> None:
        now = self._clock.now()
        if now - self._complained >= _COMPLAIN_INTERVAL_S:
            self._complained, self._told = now, self.num_dropped
            logger.warning("%d %s%s", self.num_dropped, self._loss, reason)
