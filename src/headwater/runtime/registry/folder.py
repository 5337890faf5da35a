"""The store of the `file` registry: one folder, one file per instance, one file for the model catalogue.

    folder/                 0700
      lock                  flock: held for every change of names
      catalogue.json        all entries; replaced as a whole
      instances/<worker id> JSON record; its flock, held by the owner, is the lease

A file gets its content and its lock before it gets its name (rename), so a reader never sees half a record and a named
file without a lock has no living owner. Nothing here waits longer than `LOCK_TIMEOUT_S`. All calls block: they belong
on a thread of their own. `OSError` means the store is out of reach.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import ConfigError
from headwater.runtime.registry.records import MAX_RECORD_BYTES

LOCK_TIMEOUT_S = 2.0
MAX_CATALOGUE_BYTES = 16 << 20
_TEMPORARY = ".new-"
_NOT_OURS = {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.ENXIO, errno.ENOTDIR}


class Held(ConfigError):
    """The worker id belongs to a live owner."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Claim:
    """An instance file whose lock this process holds."""

    worker_id: str
    data: bytes
    fd: int
    """-1 once given up."""
    published: bool = True
    """Whether `data` is what the file says; not so after an update that could not be written."""


@dataclass(frozen=True, slots=True)
class Record:
    """An instance file opened for reading. The descriptor stays open: through it the lease is tested."""

    fd: int
    inode: int
    data: bytes


class Folder:
    """Reads and changes one store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.instances = path / "instances"
        self._catalogue = path / "catalogue.json"

    def ensure(self) -> None:
        """Make what is missing. Raises `ConfigError` if others could read or write the folder."""
        for folder in (self.path, self.instances):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder)

    def check(self) -> None:
        """Raises `ConfigError` if others could have written what is there, so that it is not to be believed."""
        for folder in (self.path, self.instances):
            with contextlib.suppress(FileNotFoundError):
                _check_private(folder)

    # Instances

    def claim(self, worker_id: str, data: bytes) -> Claim:
        """Take the name. Raises `Held`."""
        with self._locked():
            self._refuse_if_held(worker_id)
            return Claim(worker_id, data, self._publish(worker_id, data))

    def replace(self, claim: Claim, data: bytes) -> None:
        """Publish a new record under a name held by `claim`."""
        with self._locked():
            if not self.holds(claim):
                self._refuse_if_held(claim.worker_id)
            fd = self._publish(claim.worker_id, data)
        former, claim.fd = claim.fd, fd
        claim.data, claim.published = data, True
        os.close(former)

    def holds(self, claim: Claim) -> bool:
        """Whether the name still leads to the claimed file: not so when the store was wiped."""
        return self.names(claim.worker_id, claim.fd)

    def names(self, worker_id: str, fd: int) -> bool:
        """Whether this open file is the one under the name."""
        try:
            named = os.stat(self.instances / worker_id, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(fd))

    def drop(self, claim: Claim) -> None:
        """Give the name up. The lock goes first: a missing name with a held lock would read as a wiped store."""
        try:
            with self._locked():
                if self.holds(claim):
                    fcntl.flock(claim.fd, fcntl.LOCK_UN)
                    os.unlink(self.instances / claim.worker_id)
        finally:
            former, claim.fd = claim.fd, -1
            os.close(former)

    def listing(self) -> dict[str, int]:
        """Inode numbers by worker id, whether or not the owner lives."""
        with os.scandir(self.instances) as entries:
            return {entry.name: entry.inode() for entry in entries if not entry.name.startswith(".")}

    def open_record(self, worker_id: str) -> Record | None:
        """None when there is none, or none that can be read. The caller closes the descriptor."""
        fd = self._open_instance(worker_id)
        if fd is None:
            return None
        with _closing_on_error(fd):
            return Record(fd, os.fstat(fd).st_ino, _read(fd, MAX_RECORD_BYTES))

    def remove_dead(self) -> int:
        """Remove files without a living owner, and leftovers of interrupted changes."""
        removed = 0
        with self._locked():
            for name in os.listdir(self.instances):
                if name.startswith(_TEMPORARY) or not self._is_held(name):
                    with contextlib.suppress(OSError):
                        os.unlink(self.instances / name)
                        removed += 1
        return removed

    # Catalogue

    def catalogue_version(self) -> tuple[int, int, int] | None:
        """Changes whenever the catalogue does; None: there is none."""
        try:
            found = os.stat(self._catalogue)
        except FileNotFoundError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def read_catalogue(self) -> bytes | None:
        try:
            fd = os.open(self._catalogue, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _read(fd, MAX_CATALOGUE_BYTES)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def changing_catalogue(self) -> Iterator[None]:
        """Reading and writing inside are one change."""
        with self._locked():
            yield

    def write_catalogue(self, data: bytes) -> None:
        """Only inside `changing_catalogue`. The catalogue outlives all processes, hence the fsync."""
        temporary = self.path / f"{_TEMPORARY}catalogue"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, self._catalogue)

    # Inside the lock

    def _refuse_if_held(self, worker_id: str) -> None:
        if self._is_held(worker_id):
            raise Held(
                f"worker id {worker_id!r} is already held by a live worker in {self.path}",
                hint="every worker process needs an id of its own",
            )

    def _is_held(self, name: str) -> bool:
        fd = self._open_instance(name)
        if fd is None:
            return False
        try:
            return is_locked(fd)
        finally:
            os.close(fd)

    def _open_instance(self, name: str) -> int | None:
        """A hostile or foreign entry (link, pipe, folder, another user's file) counts as none."""
        try:
            fd = os.open(self.instances / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NOT_OURS:
                return None
            raise
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None

    def _publish(self, worker_id: str, data: bytes) -> int:
        temporary = self.instances / f"{_TEMPORARY}{worker_id}"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with _closing_on_error(fd):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, data)
            os.replace(temporary, self.instances / worker_id)
        return fd

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while (fd := self._try_lock()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the lock of {self.path} was not free within {LOCK_TIMEOUT_S} s")
            time.sleep(0.002)
        try:
            yield
        finally:
            os.close(fd)

    def _try_lock(self) -> int | None:
        self.ensure()
        path = self.path / "lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with _closing_on_error(fd), contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd
        os.close(fd)
        return None


def is_locked(fd: int) -> bool:
    """Whether another open file holds the lock: whether the owner lives."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _check_private(folder: Path) -> None:
    found = os.stat(folder)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"registry folder {folder} has owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}",
            hint=f"it must belong to user {os.geteuid()} and be closed to others: chmod 700 {folder}",
        )


@contextlib.contextmanager
def _closing_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def _read(fd: int, limit: int) -> bytes:
    """At most one byte beyond the limit, so that a record that is too long is seen to be."""
    parts: list[bytes] = []
    left = limit + 1
    while left and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
