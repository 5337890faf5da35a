"""Whole lines at the end of a file that several processes write to and any of them may rotate.

When the file is full it becomes FILE.1, FILE.1 becomes FILE.2, and so on; the oldest is deleted. The file is private
to the user. Opening and rotating happen under a lock on a file beside it.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class LineFile:
    """Every method raises `OSError`."""

    def __init__(self, path: Path, lock: Path, *, max_bytes: int, kept_files: int, header: bytes = b"") -> None:
        self._path = path
        self._lock = lock
        self._max_bytes = max_bytes
        self._kept_files = kept_files
        self._header = header
        self._descriptor = -1
        with self._locked():
            self._open()

    def append(self, lines: list[bytes]) -> None:
        if self._is_stale():
            with self._locked():
                self._open()
        _write_all(self._descriptor, b"".join(lines))
        if os.fstat(self._descriptor).st_size >= self._max_bytes:
            self._rotate()

    def sync(self) -> None:
        """To the disk."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_stale(self) -> bool:
        """Whether another process has rotated the file, or somebody deleted it."""
        if self._descriptor < 0:
            return True
        try:
            return os.stat(self._path).st_ino != os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return True

    def _open(self) -> None:
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        if self._header and os.fstat(self._descriptor).st_size == 0:
            _write_all(self._descriptor, self._header)

    def _rotate(self) -> None:
        with self._locked():
            if not self._is_stale():
                for number in range(self._kept_files, 0, -1):
                    source = self._numbered(number - 1)
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(source, self._numbered(number))
                with contextlib.suppress(FileNotFoundError):
                    self._path.unlink()  # nothing is kept
            self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time: opening, rotating."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
