"""Logging of one process: lines for people or JSON for machines, on stderr unless told otherwise."""

import json
import logging
import sys
import time
from typing import Any, Protocol

from headwater.config.schema import RuntimeConfig

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogStream(Protocol):
    """As much of a text stream as logging needs."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def configure_logging(runtime: RuntimeConfig, part: str, stream: LogStream | None = None) -> None:
    """Replace whatever handlers there are. Warnings of libraries become log lines too."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(part) if runtime.log_format == "json" else _text_formatter())
    logging.basicConfig(level=runtime.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, part, logger, message, and what was passed as `extra`."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry.update({name: value for name, value in vars(record).items() if name not in _STANDARD})
        return json.dumps(entry, default=str, ensure_ascii=False)


def _text_formatter() -> logging.Formatter:
    return logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
