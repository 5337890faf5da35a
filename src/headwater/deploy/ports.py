"""The port of a graph, checked and held before anything is loaded, and the sockets that listen on it.

Frontends share the port (SO_REUSEPORT). That option would also let two graphs of one user share a port by accident, so
the supervisor first listens alone for a moment, which fails if anybody else does, and then holds the address, without
listening, for as long as it runs.

The listening sockets are the supervisor's, one set for each frontend, and inherited by every process that takes its
place: while one process succeeds another, connections wait in the socket and none is refused or reset. The sockets of a
frontend that died are closed, so that the kernel gives new connections to the others meanwhile.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator

from headwater.errors import ConfigError

BACKLOG = 4096
"""Connections that wait for a frontend."""


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """The port, a free one for 0. Raises `ConfigError` if it cannot be had."""
    with contextlib.ExitStack() as held:
        for family, address in _addresses(host, port):
            try:
                with _socket(family, reuse_port=False) as alone:
                    alone.bind((address, port))
                    alone.listen(1)
                    port = alone.getsockname()[1]
                holder = held.enter_context(_socket(family, reuse_port=True))
                holder.bind((address, port))
            except OSError as error:
                raise _refused(host, port, error) from error
        yield port


class Listeners:
    """The listening sockets of all frontends."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._sockets: dict[int, list[socket.socket]] = {}

    def of(self, index: int) -> tuple[int, ...]:
        """Descriptors of one frontend's sockets, opened if need be. Raises `OSError` and `ConfigError`."""
        if index not in self._sockets:
            self._sockets[index] = self._open()
        return tuple(listener.fileno() for listener in self._sockets[index])

    def drop(self, index: int) -> None:
        for listener in self._sockets.pop(index, []):
            listener.close()

    def close(self) -> None:
        for index in list(self._sockets):
            self.drop(index)

    def _open(self) -> list[socket.socket]:
        opened: list[socket.socket] = []
        try:
            for family, address in _addresses(self._host, self._port):
                opened.append(_socket(family, reuse_port=True))
                opened[-1].bind((address, self._port))
                self._port = opened[-1].getsockname()[1]
                opened[-1].listen(BACKLOG)
        except OSError:
            for listener in opened:
                listener.close()
            raise
        return opened


def connectable(host: str) -> str:
    """An address under which a listener on `host` is reached from here."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    name, scheme = connectable(host), "https" if tls else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not the name of a host"
        raise ConfigError(f"--host {host}: {reason}", hint="127.0.0.1, 0.0.0.0 or an own address") from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _socket(family: socket.AddressFamily, *, reuse_port: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        hint = f"`ss -ltnp 'sport = :{port}'` shows by whom; --port 0 picks a free one"
        return ConfigError(f"{host}:{port} is in use by another process", hint=hint)
    if error.errno == errno.EACCES:
        return ConfigError(f"--port {port}: not allowed", hint="ports below 1024 need a privilege; take a higher one")
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", hint="--host names an own address")
