"""Folders of the graphs that run on this host: one private folder each, found by `headwater status`.

<run folder>/                 0700, ours, or refused; see `headwater.runtime.endpoints`
  serve-xxxxxxxx/             0700; also the default place of the embedded registry
    cluster.json              how to reach it; its flock, held by the supervisor, says that it runs
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headwater.runtime.owned_folder import OwnedFolder, is_abandoned, run_folder

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

    def __init__(self) -> None:
        self._folder = OwnedFolder(_PREFIX, _RECORD)
        self.path = self._folder.path

    def publish(self, record: ClusterRecord) -> None:
        self._record = record
        data = msgspec.json.encode(record)
        os.pwrite(self._folder.lock_fd, data, 0)
        os.ftruncate(self._folder.lock_fd, len(data))

    def restarted(self, failure: str | None) -> None:
        """A rolling restart is over."""
        count = self._record.restarts + 1
        self.publish(msgspec.structs.replace(self._record, restarts=count, restart_failure=failure))

    def close(self) -> None:
        self._folder.close()


@contextlib.contextmanager
def cluster_folder() -> Iterator[ClusterFolder]:
    """A new folder; those that dead supervisors left behind are removed."""
    folder = ClusterFolder()
    try:
        yield folder
    finally:
        folder.close()


def running_clusters() -> list[ClusterRecord]:
    """The graphs of this user on this host, the newest first."""
    folders = run_folder().glob(f"{_PREFIX}*")
    records = [_read(path / _RECORD) for path in folders if not is_abandoned(path, _RECORD)]
    return sorted((record for record in records if record), key=lambda record: -record.started)


def _read(path: Path) -> ClusterRecord | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=ClusterRecord)
    except (OSError, msgspec.MsgspecError):
        return None
