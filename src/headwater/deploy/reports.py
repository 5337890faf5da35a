"""What a child process tells its supervisor: one JSON object a line over an inherited pipe."""

import os
import threading
import time

import msgspec

from headwater.engines.base import Progress
from headwater.errors import HeadwaterError

MAX_REPORT_BYTES = 64 * 1024
READY = "ready"
WAIT = "wait"
"""For something outside; no progress."""
_MIN_INTERVAL_S = 0.1


class ProgressReport(msgspec.Struct, frozen=True, omit_defaults=True, tag="progress"):
    """`headwater.engines.base.Progress` on the wire."""

    phase: str
    done: float = 0.0
    total: float | None = None
    unit: str = ""
    detail: str = ""


class FailureReport(msgspec.Struct, frozen=True, omit_defaults=True, tag="failure"):
    """Last words before the exit."""

    code: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class HungReport(msgspec.Struct, frozen=True, tag="hung"):
    """A frontend's word on a worker that has answered nothing for so long."""

    pid: int
    silent_s: float


Report = ProgressReport | FailureReport | HungReport

_DECODER = msgspec.json.Decoder(Report)


def decode_report(line: bytes) -> Report:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    return _DECODER.decode(line)


class Reporter:
    """The child's end, safe from any thread. Progress within a phase is thinned out; a vanished reader is no error."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._phase = ""
        self._at = 0.0

    def progress(self, progress: Progress) -> None:
        with self._lock:
            now = time.monotonic()
            complete = progress.total is not None and progress.done >= progress.total
            if progress.phase == self._phase and not complete and now - self._at < _MIN_INTERVAL_S:
                return
            self._phase, self._at = progress.phase, now
            report = ProgressReport(progress.phase, progress.done, progress.total, progress.unit, progress.detail)
            self._write(report)

    def failed(self, error: HeadwaterError) -> None:
        with self._lock:
            self._write(FailureReport(error.code, error.message, error.hint))

    def hung(self, pid: int, silent_s: float) -> None:
        with self._lock:
            self._write(HungReport(pid, silent_s))

    def _write(self, report: Report) -> None:
        line = msgspec.json.encode(report) + b"\n"
        if len(line) > MAX_REPORT_BYTES:
            return
        try:
            os.write(self._fd, line)
        except OSError:
            return
