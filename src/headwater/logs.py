"""Logging of one process: lines for people or JSON for machines, on stderr unless told otherwise.

What is passed as `extra` (`request_id`, `worker_id`, ...) is kept in both forms. Secrets never pass: keys given to
`configure_logging`, keys of a keyring, and whatever follows `Bearer` are masked wherever they occur. A message from
outside cannot forge a line: control characters are escaped.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Iterable
from typing import Any, Protocol

from headwater.config.schema import RuntimeConfig

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_KEY = re.compile(r"(hw-[0-9a-f]{8}-)[A-Za-z0-9_-]{43}")
_BEARER = re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]{4,}")
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85, 0x2028, 0x2029) if code != 9}
_MASK = "***"
_MIN_SECRET_CHARS = 4


class LogStream(Protocol):
    """As much of a text stream as logging needs."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def configure_logging(
    runtime: RuntimeConfig, part: str, stream: LogStream | None = None, *, secrets: Iterable[str] = ()
) -> None:
    """Replace whatever handlers there are. Warnings of libraries become log lines too."""
    formatter = JsonFormatter(part, secrets) if runtime.log_format == "json" else TextFormatter(secrets)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    _leave_out_what_no_line_shows()
    logging.basicConfig(level=runtime.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def _leave_out_what_no_line_shows() -> None:
    """Source line, thread and process cost more per line than all the rest of it (see "Optimization" in `logging`)."""
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


class _Masking(logging.Formatter):
    """Masks secrets in the finished line."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        longest_first = sorted(
            {secret for secret in secrets if len(secret) >= _MIN_SECRET_CHARS}, key=len, reverse=True
        )
        self._secrets = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def mask(self, text: str) -> str:
        if self._secrets is not None:
            text = self._secrets.sub(_MASK, text)
        if "hw-" in text:
            text = _KEY.sub(rf"\1{_MASK}", text)
        return _BEARER.sub(rf"\1{_MASK}", text) if "bearer" in text.lower() else text


class TextFormatter(_Masking):
    """`12:00:00 INFO    headwater.worker: message key=value`, tracebacks on lines of their own."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__(secrets)
        self._second = -1
        self._time = ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the base class
        extra = "".join([f" {name}={value}" for name, value in _extra(record).items()])
        line = f"{self._time_of(record)} {record.levelname:<7} {record.name}: {record.message}{extra}"
        return self.mask(line if line.isprintable() else line.translate(_CONTROL))

    def _time_of(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._time = second, time.strftime("%H:%M:%S", time.localtime(second))
        return self._time

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name of the base class
        return self.mask(super().formatException(ei))


class JsonFormatter(_Masking):
    """One object a line: time, level, part, logger, message, and what was passed as `extra`."""

    def __init__(self, part: str, secrets: Iterable[str] = ()) -> None:
        super().__init__(secrets)
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            **_extra(record),
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        masked = {name: self.mask(value) if isinstance(value, str) else value for name, value in entry.items()}
        return json.dumps(masked, default=lambda value: self.mask(str(value)), ensure_ascii=False)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}
