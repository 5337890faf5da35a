"""Folders that end with the process that made them, `kill -9` included: the next one of the same kind clears them away.

Each lies in this user's run folder, or in another that is closed to others, and holds a file that its process keeps
locked. The kernel gives the lock back when the process, and whatever it forked, is gone.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from headwater.runtime.private_folder import default_run_folder, ensure_private

_LOCK = "lock"
_SETTLED_AFTER_S = 60.0


class OwnedFolder:
    """A new folder `{prefix}xxxxxxxx`. Those of the prefix whose owners are dead are removed first."""

    def __init__(self, prefix: str, lock: str = _LOCK, *, base: Path | None = None) -> None:
        base = base or run_folder()
        for path in base.glob(f"{prefix}*"):
            if is_abandoned(path, lock):
                shutil.rmtree(path, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        self.lock_fd = _locked(self.path / lock)
        self._open = True

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock_fd)


def run_folder() -> Path:
    """This user's folder for sockets, made if need be. Raises `ConfigError` when others may use it."""
    base = default_run_folder()
    ensure_private(base)
    return base


def _locked(path: Path) -> int:
    """A file that nobody ever sees without its lock."""
    unseen = path.with_name(f".{path.name}")
    fd = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    unseen.rename(path)
    return fd


def is_abandoned(path: Path, lock: str = _LOCK) -> bool:
    """Nobody holds the lock. A folder without one is about to get it, unless it is old."""
    try:
        fd = os.open(path / lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return _is_old(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _is_old(path: Path) -> bool:
    """By the file system's own clock, which is what stamped the folder. What another process has just cleared away is
    not."""
    with tempfile.TemporaryFile(dir=path.parent) as now, contextlib.suppress(FileNotFoundError):
        return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime > _SETTLED_AFTER_S
    return False
