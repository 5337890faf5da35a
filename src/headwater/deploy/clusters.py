"""Folders of the graphs that run on this host: one private folder each, found by `headwater status`.

<run folder>/                 0700, ours, or refused; see `headwater.runtime.endpoints`
  serve-xxxxxxxx/             0700; also the default place of the embedded registry
    cluster.json              how to reach it; its flock, held by the supervisor, says that it runs
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headwater.runtime.endpoints import default_run_folder, ensure_private

_RECORD = "cluster.json"
_PREFIX = "serve-"
_MAX_RECORD_BYTES = 64 * 1024


class ClusterRecord(msgspec.Struct, frozen=True):
    """One running graph."""

    pid: int
    url: str
    registry: str
    started: float
    """Epoch seconds."""
    key: str = ""
    """Of the operator: opens the admin routes."""
    cert: str = ""
    """The certificate that the port shows, if it speaks TLS."""
    restarts: int = 0
    """Rolling restarts that are over."""
    restart_failure: str | None = None
    """Why the last one did not replace everything."""
    store: str = ""
    """Where its KV store listens, if it runs one."""


class ClusterFolder:
    """The folder of one graph, for as long as its supervisor runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path / _RECORD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def publish(self, record: ClusterRecord) -> None:
        self._record = record
        data = msgspec.json.encode(record)
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def restarted(self, failure: str | None) -> None:
        """A rolling restart is over."""
        count = self._record.restarts + 1
        self.publish(msgspec.structs.replace(self._record, restarts=count, restart_failure=failure))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


@contextlib.contextmanager
def cluster_folder() -> Iterator[ClusterFolder]:
    """A new folder; those that dead supervisors left behind are removed."""
    base = _base()
    for path in base.glob(f"{_PREFIX}*"):
        if _is_stale(path):
            shutil.rmtree(path, ignore_errors=True)
    folder = ClusterFolder(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base)))
    try:
        yield folder
    finally:
        folder.close()


def running_clusters() -> list[ClusterRecord]:
    """The graphs of this user on this host, the newest first."""
    records = [_read(path / _RECORD) for path in _base().glob(f"{_PREFIX}*") if not _is_stale(path)]
    return sorted((record for record in records if record), key=lambda record: -record.started)


def _base() -> Path:
    base = default_run_folder()
    ensure_private(base)
    return base


def _is_stale(path: Path) -> bool:
    """Nobody holds the lock. A folder without a record is about to get one, unless it is old."""
    try:
        fd = os.open(path / _RECORD, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return _age_s(path) > 60.0
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _age_s(path: Path) -> float:
    """By the file system's own clock, which is what stamped the folder."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime


def _read(path: Path) -> ClusterRecord | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=ClusterRecord)
    except (OSError, msgspec.MsgspecError):
        return None
