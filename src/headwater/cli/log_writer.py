"""Lines to standard error without ever waiting for it.

A terminal that is held up, or a reader that stopped reading, must not stop serving: lines wait in a bounded queue for
a thread to write them, and beyond the bound they are dropped and counted.
"""

import queue
import threading
from collections.abc import Callable
from typing import BinaryIO

_CLOSE_TIMEOUT_S = 2.0


class LogWriter:
    """Also a text stream, as far as `logging.StreamHandler` needs one."""

    def __init__(self, stream: BinaryIO, own_prefix: bytes = b"", capacity: int = 10_000) -> None:
        """`own_prefix` stands before what is written through logging."""
        self._stream = stream
        self._own_prefix = own_prefix
        self._lines: queue.Queue[bytes | None] = queue.Queue(capacity)
        self._dropped = 0
        self._divert: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def divert(self, to: Callable[[str], None] | None) -> None:
        """Give lines to somebody who shares the terminal (None: back to the stream)."""
        self._divert = to

    def line(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def write(self, text: str) -> None:
        """What logging calls with a whole record, or with its line end."""
        if text.strip():
            self.line(self._own_prefix + text.rstrip("\n").encode(errors="replace"))

    def flush(self) -> None:
        return

    def close(self) -> None:
        """Write what is waiting, as far as the stream takes it in time."""
        try:
            self._lines.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._put(line)
            if self._dropped and self._lines.empty():
                dropped, self._dropped = self._dropped, 0
                self._put(f"({dropped} lines dropped: standard error was not read fast enough)".encode())

    def _put(self, line: bytes) -> None:
        divert = self._divert
        try:
            if divert is not None:
                divert(line.decode(errors="replace"))
            else:
                self._stream.write(line + b"\n")
                self._stream.flush()
        except (OSError, ValueError):
            return
