"""The HTTP/1.1 server: listener, connections, one flush per loop turn, one tick for all deadlines, graceful stop.

It knows nothing of routes: one handler gets every request. Several servers, in one process or many, may share a port.
"""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Sequence

from headwater.errors import HeadwaterError, InternalError
from headwater.frontend.http.base import Handler, HttpRequest, OnAnswered
from headwater.frontend.http.connection import Connection
from headwater.frontend.http.cors import Cors
from headwater.frontend.http.exchange import Exchange
from headwater.frontend.http.head import BadHead, RequestIds
from headwater.frontend.http.limits import HttpLimits
from headwater.frontend.http.replies import date_line
from headwater.frontend.http.tls import Tls

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_SEND_BUFFER_BYTES = 256 * 1024
"""Asked of the kernel per connection: what a slow reader costs there, and how soon its slowness shows."""
_USER_TIMEOUT_MS = 60_000
"""How long sent bytes may stay unacknowledged before a peer that vanished without a word counts as gone."""
_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_EXCESS_CONNECTIONS = 256
"""So many beyond the limit get an answer that says so; the rest are just closed."""


class HttpServer:
    """Serves `handler`. Life: `start` -> (requests) -> `stop`."""

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits,
        *,
        cors: tuple[str, ...] = (),
        on_answered: OnAnswered | None = None,
        tls: Tls | None = None,
        tick_s: float = 0.5,
    ) -> None:
        self.limits = limits
        self.now = time.monotonic()
        """Monotonic seconds as of the last tick: exact enough for deadlines, free to read."""
        self._handler = handler
        self._cors = Cors(cors) if cors else None
        self._on_answered = on_answered
        self._tls = tls
        self._tick_s = tick_s
        self._request_ids = RequestIds()
        self._date = date_line(time.time())
        self._connections: set[Connection] = set()
        self._dirty: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._partial_bytes = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._listeners: list[asyncio.Server] = []
        self._ticker: asyncio.TimerHandle | None = None
        self._draining = False

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen; returns the port."""
        self._loop = asyncio.get_running_loop()
        return await self.start_on(await self._open_sockets(host, port, reuse_port))

    async def start_on(self, sockets: Sequence[socket.socket]) -> int:
        """Accept from sockets, which may listen already; returns the port. To be owned here; closed by `stop`."""
        self._loop = asyncio.get_running_loop()
        port = 0
        for sock in sockets:
            _set_options(sock)
            port = 0 if sock.family == socket.AF_UNIX else sock.getsockname()[1]
            self._listeners.append(await self._listen(sock))
        self._tick()
        return port

    async def _listen(self, sock: socket.socket) -> asyncio.Server:
        if sock.family == socket.AF_UNIX:
            return await self._loop.create_unix_server(lambda: Connection(self), sock=sock, backlog=_BACKLOG)
        if self._tls is None:
            return await self._loop.create_server(lambda: Connection(self), sock=sock, backlog=_BACKLOG)
        return await self._loop.create_server(
            lambda: Connection(self),
            sock=sock,
            backlog=_BACKLOG,
            ssl=self._tls.context,
            ssl_handshake_timeout=self.limits.header_timeout_s,
            ssl_shutdown_timeout=self.limits.linger_timeout_s,
        )

    async def stop(self, timeout_s: float) -> bool:
        """Accept no more, answer what comes on open connections for the last time, let running answers end.

        True when all did in time. Idle connections get a moment, in which a request may be on its way.
        """
        self._draining = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.drain()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
            complete = True
        except TimeoutError:
            complete = False
        await self._stop_hard()
        return complete

    async def _stop_hard(self) -> None:
        for connection in list(self._connections):
            connection.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    # -- what connections ask -----------------------------------------------------------------------------------

    def admit(self, connection: Connection) -> BadHead | None:
        """Every connection is kept account of; those beyond the limit are told why they may not stay."""
        self._connections.add(connection)
        self._empty.clear()
        excess = len(self._connections) - self.limits.max_connections
        if excess <= 0:
            return None
        if excess > _EXCESS_CONNECTIONS:
            connection.cut()
            return None
        return BadHead(503, f"the limit of {self.limits.max_connections} connections is reached")

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def hold(self, added_bytes: int) -> bool:
        """Account for bodies that are not complete; False when they are too much together."""
        self._partial_bytes += added_bytes
        return added_bytes <= 0 or self._partial_bytes <= self.limits.max_partial_bodies_bytes

    def name(self, request: HttpRequest) -> None:
        request.request_id = self._request_ids.accept(request.headers.get(b"x-request-id"))
        request.received = time.monotonic()

    def head_lines(self, request: HttpRequest) -> bytes:
        lines = b"%bx-request-id: %b\r\n" % (self._date, request.request_id.encode("ascii"))
        if self._cors is not None:
            origin = request.headers.get(b"origin")
            if origin is not None:
                lines += self._cors.headers(origin)
        return lines

    def wake(self, connection: Connection) -> None:
        self._dirty.append(connection)
        if len(self._dirty) == 1:
            self._loop.call_soon(self._flush)

    def run(self, exchange: Exchange) -> None:
        """Let the handler answer."""
        if self._draining:
            exchange.keep_alive = False
        if exchange.refusal is not None:
            exchange.refusal.send_to(exchange)
            return
        request = exchange.request
        if self._cors is not None and request.method == "OPTIONS" and b"origin" in request.headers:
            exchange.send(204, self._cors.preflight(request.headers), b"")
            return
        try:
            awaitable = self._handler(request, exchange)
        except HeadwaterError as error:
            exchange.fail(error)
        except Exception:  # noqa: BLE001 - border to the application, logged once and converted
            self._fail(exchange)
        else:
            if awaitable is not None:
                task = self._loop.create_task(self._finish(awaitable, exchange))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def answered(self, exchange: Exchange, *, complete: bool) -> None:
        if self._on_answered is not None:
            self._on_answered(exchange.request, exchange.status, complete)

    def log_cut(self, request: HttpRequest, reason: str) -> None:
        logger.warning("connection cut: %s (request %s, client %s)", reason, request.request_id, request.client)

    async def _open_sockets(self, host: str, port: int, reuse_port: bool) -> list[socket.socket]:
        """One bound socket per address of `host`, all on one port."""
        found = await self._loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets: list[socket.socket] = []
        failure: OSError | None = None
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            bound_port = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_bound_socket(family, (address[0], bound_port, *address[2:]), reuse_port))
            except OSError as error:
                if error.errno not in _NO_SUCH_FAMILY:
                    for sock in sockets:
                        sock.close()
                    raise
                failure = error
        if failure is not None and not sockets:
            raise failure
        return sockets

    # -- inner life ---------------------------------------------------------------------------------------------

    async def _finish(self, awaitable: Awaitable[None], exchange: Exchange) -> None:
        try:
            await awaitable
        except HeadwaterError as error:
            exchange.fail(error)
        except Exception:  # noqa: BLE001 - border to the application, logged once and converted
            self._fail(exchange)

    def _fail(self, exchange: Exchange) -> None:
        logger.exception("request %s failed", exchange.request.request_id)
        exchange.fail(InternalError("internal error; the server's log has the details"))

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            try:
                connection.flush()
            except Exception:  # one connection's trouble must not hold up the others
                logger.exception("flushing a connection failed")
                connection.cut()

    def _tick(self) -> None:
        self.now = now = time.monotonic()
        self._date = date_line(time.time())
        if self._tls is not None:
            self._tls.look(now)
        for connection in list(self._connections):
            if connection.read_deadline <= now or connection.write_deadline <= now:
                connection.on_tick(now)
        self._ticker = self._loop.call_later(self._tick_s, self._tick)


def _bound_socket(family: int, address: tuple[str | int, ...], reuse_port: bool) -> socket.socket:
    """A socket bound to `address`."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _set_options(sock: socket.socket) -> None:
    """Those that accepted connections inherit."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _USER_TIMEOUT_MS // 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
