"""One JSON object a line, written beside the work: the account of usage, the audit log."""

from pathlib import Path

import msgspec

from headwater.clock import Clock
from headwater.errors import ConfigError
from headwater.frontend.background_lines import BackgroundLines
from headwater.frontend.line_file import LineFile

_MAX_PENDING = 16_384
_MAX_BYTES = 256 * 1024 * 1024
_KEPT_FILES = 9


class LineLog:
    """`write` and `close` are for one thread, the event loop's."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises `ConfigError` when the file cannot be written."""
        lock = path.with_name(f"{path.name}.lock")
        try:
            file = LineFile(path, lock, max_bytes=_MAX_BYTES, kept_files=_KEPT_FILES)
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
        self._lines: BackgroundLines[msgspec.Struct] = BackgroundLines(
            file,
            msgspec.json.encode,
            clock,
            loss=f"lines could not be written to {path}",
            max_pending=_MAX_PENDING,
            durable=True,
        )

    def write(self, line: msgspec.Struct) -> None:
        """Never waits and never raises."""
        self._lines.add(line)

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._lines.close()
