"""One JSON object a line, written beside the work, never in its way: the account of usage, the audit log.

`write` costs an append. A thread encodes and writes once a second, and at `close`. What waits is bounded; what does
not fit, or cannot be written because the disk is full, is dropped, counted, and said once a minute.
"""

import logging
import threading
from collections import deque
from pathlib import Path

import msgspec

from headwater.clock import Clock
from headwater.errors import ConfigError
from headwater.frontend.line_file import LineFile

logger = logging.getLogger(__name__)

_MAX_PENDING = 16_384
_FLUSH_INTERVAL_S = 1.0
_COMPLAIN_INTERVAL_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
_MAX_BYTES = 256 * 1024 * 1024
_KEPT_FILES = 9


class LineLog:
    """`write` and `close` are for one thread, the event loop's."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises `ConfigError` when the file cannot be written."""
        self._path = path
        self._clock = clock
        self._pending: deque[msgspec.Struct] = deque()
        # Each of these is written by one thread only.
        self._num_refused = self._num_lost = 0
        self._told = 0
        self._complained = float("-inf")
        self._closing = threading.Event()
        lock = path.with_name(f"{path.name}.lock")
        try:
            self._file = LineFile(path, lock, max_bytes=_MAX_BYTES, kept_files=_KEPT_FILES)
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name=f"log-{path.name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        return self._num_refused + self._num_lost

    def write(self, line: msgspec.Struct) -> None:
        """Never waits and never raises."""
        if len(self._pending) >= _MAX_PENDING:
            self._num_refused += 1
        else:
            self._pending.append(line)

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closing.wait(_FLUSH_INTERVAL_S):
            self._flush()
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        batch: list[msgspec.Struct] = []
        while self._pending:
            batch.append(self._pending.popleft())
        try:
            if batch:
                self._file.append([msgspec.json.encode(line) + b"\n" for line in batch])
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
            logger.warning("%d lines could not be written to %s%s", self.num_dropped, self._path, reason)
