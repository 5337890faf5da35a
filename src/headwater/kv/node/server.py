"""Offers a node's store to the processes of the node, over a Unix socket in a folder closed to other users.

One connection is one holder: when it ends, the reservations and leases of its worker end with it, which the kernel
sees to whatever happened to the worker. Every connection has a bound of requests under way and of unsent bytes.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

from headwater.clock import Clock
from headwater.errors import ConfigError, HeadwaterError, InternalError, Overloaded, ProtocolError
from headwater.kv.node import wire
from headwater.kv.node.requests import Requests
from headwater.kv.node.store import NodeStore
from headwater.kv.stores.base import TierEvent

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 256
_MAX_UNDER_WAY = 64
_MAX_UNSENT_BYTES = 16 << 20
_ACCEPT_PAUSE_S = 0.5
_EVENTS_S = 0.05
_EVENTS_PER_FRAME = 256
_MAX_BACKLOG = 4096


class Server:
    """See the module docstring."""

    def __init__(self, store: NodeStore, path: Path, clock: Clock) -> None:
        self.store, self.path = store, path
        self.requests = Requests(store, clock, self._names)
        self._listener: socket.socket | None = None
        self._connections: dict[int, _Connection] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._next_holder = 1

    def start(self) -> None:
        """Raises `ConfigError` when the address is taken."""
        self._listener = _listen(self.path)
        self._tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._tell())]

    async def close(self) -> None:
        """Idempotent; ends all connections. The store is not closed."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections.values()):
            await connection.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)

    def _names(self) -> list[str]:
        return [connection.name for connection in self._connections.values() if connection.name]

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.error("the store cannot take a connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._connections) >= _MAX_CONNECTIONS or not _allowed(client):
                client.close()
                continue
            await self._serve(client)

    async def _serve(self, client: socket.socket) -> None:
        holder = self._next_holder
        self._next_holder += 1
        connection = _Connection(holder, client, self)
        self._connections[holder] = connection
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client)

    def forget(self, holder: int) -> None:
        self._connections.pop(holder, None)
        self.requests.drop(holder)

    async def _tell(self) -> None:
        """Pass events on, several to a frame."""
        while True:
            await asyncio.sleep(_EVENTS_S)
            self.flush_events()

    def flush_events(self) -> None:
        events = [event for tier in self.store.tiers for event in tier.drain_events()]
        for start in range(0, len(events), _EVENTS_PER_FRAME):
            frame = wire.encode(wire.Events(0, events[start : start + _EVENTS_PER_FRAME]))
            for connection in list(self._connections.values()):
                connection.pass_on(frame)


class _Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, holder: int, client: socket.socket, server: Server) -> None:
        self.holder, self.name = holder, ""
        self._following = False
        self._backlog: list[bytes] | None = None
        """Events that wait until it has been told what was there before."""
        self._server = server
        self._client = client
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_MAX_UNSENT_BYTES // 4)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._take(wire.decode_request(frame))
        except ProtocolError as error:
            logger.warning("client %s of the store: %s", self.name or "(unknown)", error.message)
            self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._under_way:
            task.cancel()
        self._server.forget(self.holder)
        self._ended.set()

    def send(self, frame: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            logger.warning("client %s of the store does not read: ending its connection", self.name)
            self._abort()
            return
        self._transport.write(frame)

    def pass_on(self, frame: bytes) -> None:
        """Events, for those who follow."""
        if self._backlog is not None:
            self._backlog.append(frame)
            if len(self._backlog) > _MAX_BACKLOG:
                logger.warning("client %s of the store follows too slowly: ending its connection", self.name)
                self._abort()
        elif self._following:
            self.send(frame)

    async def close(self) -> None:
        self._abort()
        await self._ended.wait()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _catch_up(self, residency: Iterator[list[TierEvent]]) -> None:
        """What was there first, then what happened since."""
        for events in residency:
            self.send(wire.encode(wire.Events(0, events)))
            await self._writable.wait()
            await asyncio.sleep(0)
        backlog, self._backlog = self._backlog or [], None
        for frame in backlog:
            self.send(frame)

    def _take(self, request: wire.Request) -> None:
        if isinstance(request, wire.Hello):
            self._greet(request)
        elif not self.name:
            raise ProtocolError("the first message was no greeting")
        elif isinstance(request, wire.Used):
            self._server.requests.used(request)
        elif self._answered_now(request):
            return
        elif len(self._under_way) >= _MAX_UNDER_WAY:
            self._fail(request.serial, Overloaded(f"{_MAX_UNDER_WAY} requests of this client are under way"))
        else:
            self._begin(self._answer(request))

    def _answered_now(self, request: wire.Request) -> bool:
        try:
            answer = self._server.requests.answer_now(self.holder, request)
        except HeadwaterError as error:
            self._fail(request.serial, error)
            return True
        if answer is not None:
            self.send(wire.encode(answer))
        return answer is not None

    async def _answer(self, request: wire.Request) -> None:
        try:
            self.send(wire.encode(await self._server.requests.answer(self.holder, request)))
        except HeadwaterError as error:
            self._fail(request.serial, error)
        except Exception as error:
            logger.exception("a request to the store failed")
            self._fail(request.serial, InternalError(f"{type(error).__name__}: {error}"))

    def _greet(self, hello: wire.Hello) -> None:
        """The answer carries the descriptor of the pool, so it is sent around the transport, before anything else."""
        if self.name or hello.version != wire.VERSION:
            raise ProtocolError(f"version {hello.version} where {wire.VERSION} is spoken, or greeted twice")
        self.name = hello.name or f"client {self.holder}"
        host = self._server.store.host
        welcome = wire.Welcome(hello.serial, wire.VERSION, host.pool.layout, host.options.rules.ttl_s)
        try:
            socket.send_fds(self._client, [wire.encode(welcome)], [host.pool.fd])
        except OSError as error:
            raise ProtocolError(f"the greeting could not be sent: {error}") from None
        if hello.follow:
            self._following, self._backlog = True, []
            self._server.flush_events()
            self._begin(self._catch_up(self._server.requests.residency()))

    def _fail(self, serial: int, error: HeadwaterError) -> None:
        self.send(wire.encode(wire.Failed(serial, error.code, error.message)))

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        else:
            self._client.close()
            self._ended.set()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_free(path)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error.strerror or error}") from None
    except ConfigError:
        listener.close()
        raise
    return listener


def check_free(path: Path) -> None:
    """Raises `ConfigError` when a store listens there."""
    if answers(path):
        raise ConfigError(
            f"another store serves {path} already",
            hint="`headwater kv stat` shows it; --socket, for `headwater serve` --kv-socket, names another place",
        )


def answers(path: Path) -> bool:
    """Whether anybody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        return True
    return False


def _allowed(client: socket.socket) -> bool:
    """Only this user and root."""
    _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return uid in (0, os.geteuid())
