"""Files of keys: replaced as a whole, private to the user, changed by one process at a time.

Invariants: a reader sees the old content or the new one, never a part; nobody else can read it at any moment.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from headwater.errors import ConfigError


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """For as long as the file is read and replaced. Raises `ConfigError`."""
    try:
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot change {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_private(path: Path, content: bytes) -> None:
    """Raises `ConfigError`."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
