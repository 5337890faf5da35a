"""Addresses of the planes: where sockets may live and who may reach them.

`ipc` sockets live in a folder closed to other users. `tcp` sockets are bound to one literal address; off the loopback
they are refused unless there are cluster keys or the caller says that the network is trusted.
"""

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import time
from pathlib import Path

from headwater.errors import ConfigError
from headwater.runtime.cluster_keys import split_key
from headwater.runtime.private_folder import default_run_folder, ensure_private

_MAX_UNIX_PATH = 100
"""Unix socket paths end at 107 bytes; the rest is for the suffix of the name."""
_STALE_AFTER_S = 10.0


class IpcEndpoints:
    """Makes socket paths in one folder and removes those whose process is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if "#" in str(folder):
            raise ConfigError(f"folder {folder} cannot hold sockets: '#' separates the parts of an address")
        if len(os.fsencode(folder)) + 24 > _MAX_UNIX_PATH:
            raise ConfigError(
                f"folder {folder} is too long for sockets: at most {_MAX_UNIX_PATH - 24} bytes",
                hint="set XDG_RUNTIME_DIR or TMPDIR to a shorter folder",
            )

    def new(self, purpose: str) -> str:
        ensure_private(self._folder)
        remove_dead_sockets(self._folder)
        return f"ipc://{self._folder}/{purpose}-{secrets.token_hex(4)}"


class TcpEndpoints:
    """Ports of one host address, chosen by the system."""

    def __init__(self, host: str, *, insecure: bool) -> None:
        literal = "127.0.0.1" if host == "localhost" else host
        try:
            address = ipaddress.ip_address(literal)
        except ValueError as error:
            raise ConfigError(f"bind address {host!r} is neither `ipc` nor an IP address") from error
        if address.is_unspecified:
            raise ConfigError(f"bind address {host} names no interface", hint="give the address that others dial")
        if not address.is_loopback and not insecure:
            raise ConfigError(
                f"bind address {host} can be reached from outside, and the planes have no keys",
                hint="--cluster-key (see `headwater keys cluster create`), or --insecure on a network you trust",
            )
        self._host = f"[{literal}]" if address.version == 6 else literal

    def new(self, purpose: str) -> str:
        return f"tcp://{self._host}:*"


Endpoints = IpcEndpoints | TcpEndpoints


def parse_bind(bind: str, *, run_folder: Path | None = None, insecure: bool = False) -> Endpoints:
    """`ipc`, or the literal address to bind tcp sockets to."""
    if bind == "ipc":
        return IpcEndpoints(run_folder or default_run_folder())
    return TcpEndpoints(bind, insecure=insecure)


def unlink_ipc(address: str) -> None:
    """Remove the file of an `ipc` address; nothing for others."""
    if address.startswith("ipc://"):
        with contextlib.suppress(OSError):
            os.unlink(split_key(address)[0].removeprefix("ipc://"))


def remove_dead_sockets(folder: Path) -> None:
    """Those on which nobody listens, but for new ones: they may be about to be listened on."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            found = path.lstat()
            if stat.S_ISSOCK(found.st_mode) and is_settled(found.st_mtime) and not _listens(path):
                path.unlink()


def is_settled(modified: float) -> bool:
    """Whether whoever made a file or folder at that time has had the time to take it into use."""
    return time.time() - modified > _STALE_AFTER_S


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return True
        except ConnectionRefusedError:
            return False
    return True
