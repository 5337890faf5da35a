"""Lines to standard error without ever waiting for it.

A terminal that is held up, or a reader that stopped reading, must not stop serving: lines wait, bounded in bytes, for
a thread to write them, and beyond the bound they are dropped and counted. What waits is written in one go.
"""

import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO

_CLOSE_TIMEOUT_S = 2.0


class LogWriter:
    """Also a text stream, as far as `logging.StreamHandler` needs one."""

    def __init__(self, stream: BinaryIO, own_prefix: bytes = b"", max_pending_bytes: int = 16 * 1024 * 1024) -> None:
        """`own_prefix` stands before what is written through logging."""
        self._stream = stream
        self._own_prefix = own_prefix
        self._max_pending_bytes = max_pending_bytes
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._dropped = 0
        self._closing = False
        self._changed = threading.Condition()
        self._divert: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def divert(self, to: Callable[[str], None] | None) -> None:
        """Give lines to somebody who shares the terminal (None: back to the stream)."""
        self._divert = to

    def lines(self, lines: Sequence[bytes]) -> None:
        """Lines without their ends."""
        data = b"\n".join(lines) + b"\n"
        with self._changed:
            if self._pending_bytes + len(data) > self._max_pending_bytes:
                self._dropped += len(lines)
                return
            self._pending.append(data)
            self._pending_bytes += len(data)
            self._changed.notify()

    def write(self, text: str) -> None:
        """What logging calls with a whole record, or with its line end."""
        if text.strip():
            self.lines([self._own_prefix + text.rstrip("\n").encode(errors="replace")])

    def flush(self) -> None:
        return

    def close(self) -> None:
        """Write what is waiting, as far as the stream takes it in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                data, dropped = b"".join(self._pending), self._dropped
                self._pending, self._dropped = [], 0
            if dropped:
                data += f"({dropped} lines dropped: standard error was not read fast enough)\n".encode()
            self._put(data)
            with self._changed:
                # Only now: what is being written is still held in memory.
                self._pending_bytes = sum(map(len, self._pending))

    def _put(self, data: bytes) -> None:
        divert = self._divert
        try:
            if divert is not None:
                divert(data.decode(errors="replace").removesuffix("\n"))
            else:
                self._stream.write(data)
                self._stream.flush()
        except (OSError, ValueError):
            return
