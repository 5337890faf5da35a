"""Where the keyring comes from: a file, an environment variable, or the output of a command.

    /etc/headwater/keys.json     a file, read again when it changes
    env:KEYRING                  a variable that holds the document
    command:vault read keys      a program (no shell) that prints the document, run again once a minute

A file must belong to us or to root and be writable by nobody else: whoever can write it can let himself in. What
cannot be read, or is no keyring, raises `ConfigError`.
"""

import os
import shlex
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Protocol

from headwater.errors import ConfigError
from headwater.frontend.tenants.keyring import MAX_DOCUMENT_BYTES

_COMMAND_TIMEOUT_S = 15.0
_COMMAND_INTERVAL_S = 60.0
_FILE_INTERVAL_S = 1.0


class KeySource(Protocol):
    name: str
    interval_s: float
    """How often to look whether it has changed; 0: never."""

    def changed(self) -> bool:
        """Whether reading again may give something else. Cheap for files."""
        ...

    def read(self) -> bytes:
        """May block. Raises `ConfigError`."""
        ...


class FileSource:
    interval_s = _FILE_INTERVAL_S

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.path = path
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        try:
            return _identity(os.stat(self.path)) != self._seen
        except OSError:
            return True

    def read(self) -> bytes:
        try:
            with open(self.path, "rb", opener=_open_at_once) as file:
                found = os.fstat(file.fileno())
                self._seen = _identity(found)
                if not stat.S_ISREG(found.st_mode):
                    raise ConfigError(
                        f"the keyring {self.path} is no regular file",
                        hint="command:PROGRAM prints one, env:NAME holds one",
                    )
                _check_owner(self.path, found)
                return file.read(MAX_DOCUMENT_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"cannot read the keyring {self.path}: {error.strerror}") from error


class EnvironmentSource:
    interval_s = 0.0

    def __init__(self, variable: str) -> None:
        self.name = f"env:{variable}"
        self._variable = variable

    def changed(self) -> bool:
        return False

    def read(self) -> bytes:
        value = os.environ.get(self._variable)
        if not value:
            raise ConfigError(f"the variable {self._variable} is not set, and the keyring is to come from it")
        return value.encode()


class CommandSource:
    interval_s = _COMMAND_INTERVAL_S

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"the command cannot be read: {error}") from error
        if not self._words:
            raise ConfigError("the command names no program")
        if shutil.which(self._words[0]) is None:
            raise ConfigError(f"there is no program {self._words[0]} to print the keyring")
        self.name = f"command:{self._words[0]}"

    def changed(self) -> bool:
        return True

    def read(self) -> bytes:
        try:
            done = subprocess.run(
                self._words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{self.name} gives no keyring: {type(error).__name__}") from error
        if done.returncode:
            raise ConfigError(f"{self.name} gives no keyring: it ended with exit code {done.returncode}")
        return done.stdout


def open_source(spec: str) -> KeySource:
    """Raises `ConfigError`."""
    kind, _, rest = spec.partition(":")
    if kind == "env":
        return EnvironmentSource(rest)
    if kind == "command":
        return CommandSource(rest)
    return FileSource(Path(spec.removeprefix("file://")).expanduser())


def _open_at_once(path: str, flags: int) -> int:
    """Also a pipe that nobody writes to."""
    return os.open(path, flags | os.O_NONBLOCK)


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_owner(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.geteuid(), 0) or mode & 0o022:
        raise ConfigError(
            f"the keyring {path} has owner {found.st_uid} and mode {mode:04o}: others could let themselves in",
            hint=f"chown {os.geteuid()} {path} && chmod 600 {path}",
        )
