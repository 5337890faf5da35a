"""One connection of a client to its node's store: requests and answers by serial number, events in between."""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from headwater.errors import ProtocolError, StoreClosed, StoreError
from headwater.kv.node import wire

A = TypeVar("A", bound=wire.Answer)

_READ_BYTES = 64 << 10


@dataclass(slots=True)
class Greeted:
    """A connection after its greeting."""

    socket: socket.socket
    fd: int
    """Of the node's memory."""
    welcome: wire.Welcome
    rest: list[bytes] = field(default_factory=list[bytes])
    """Frames that came right behind."""


def greet(path: Path, hello: wire.Hello, timeout_s: float) -> Greeted:
    """Connect and exchange greetings; blocks. Raises `OSError` or `StoreError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(wire.encode(hello))
        return _greeting(connection)
    except BaseException:
        connection.close()
        raise


def _greeting(connection: socket.socket) -> Greeted:
    data, fds, _, _ = socket.recv_fds(connection, _READ_BYTES, 1)
    try:
        if len(fds) != 1:
            raise StoreError("the store gave no memory: it speaks another version, or is not a store")
        frames = wire.Frames()
        read = frames.feed(data)
        if not read or not isinstance(welcome := wire.decode_answer(read[0]), wire.Welcome):
            raise StoreError("the store did not greet")
        connection.setblocking(False)
        return Greeted(connection, fds[0], welcome, read[1:])
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


class Connection(asyncio.Protocol):
    """See the module docstring."""

    def __init__(self, greeted: Greeted, on_events: Callable[[wire.Events], None]) -> None:
        self.ended = asyncio.Event()
        self._greeted = greeted
        self._on_events = on_events
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None
        self._asked: dict[int, asyncio.Future[wire.Answer]] = {}
        self._serial = 0

    def start(self) -> None:
        for frame in self._greeted.rest:
            self._take(wire.decode_answer(frame))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._take(wire.decode_answer(frame))
        except ProtocolError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(StoreClosed("the store's connection was broken"))
        self.ended.set()

    def tell(self, message: wire.Request) -> None:
        """Send without waiting for the answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._serial += 1
            self._transport.write(wire.encode(msgspec.structs.replace(message, serial=self._serial)))

    async def ask(self, message: wire.Request, kind: type[A], timeout_s: float) -> A:
        """Raises `StoreError` when the answer is an error, does not come in time, or cannot come."""
        if self.ended.is_set():
            raise StoreClosed("the store's connection was broken")
        answer: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self.tell(message)
        serial = self._serial
        self._asked[serial] = answer
        try:
            async with asyncio.timeout(timeout_s):
                got = await answer
        except TimeoutError:
            self._give_up(serial, answer)
            raise StoreError(f"the store did not answer within {timeout_s:.0f} s") from None
        except asyncio.CancelledError:
            self._give_up(serial, answer)
            raise
        if isinstance(got, kind):
            return got
        if isinstance(got, wire.Failed):
            raise StoreError(got.message)
        raise StoreError(f"the store answered {type(got).__name__} where {kind.__name__} was asked for")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _give_up(self, serial: int, answer: "asyncio.Future[wire.Answer]") -> None:
        """What was answered is given back; what still comes finds nobody, and is too."""
        self._asked.pop(serial, None)
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self._undo(answer.result())

    def _take(self, answer: wire.Answer) -> None:
        if isinstance(answer, wire.Events):
            self._on_events(answer)
            return
        asked = self._asked.pop(answer.serial, None)
        if asked is not None and not asked.done():
            asked.set_result(answer)
        else:
            self._undo(answer)

    def _undo(self, answer: wire.Answer) -> None:
        """Give back what came for somebody who is not there any more."""
        if isinstance(answer, wire.Leased):
            self.tell(wire.Release(0, answer.ticket, []))
        elif isinstance(answer, wire.Reserved):
            self.tell(wire.Commit(0, answer.ticket, {}))
