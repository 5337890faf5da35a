"""ZeroMQ on an asyncio loop through the raw descriptor.

`zmq.asyncio` costs three times as much per message. The price of doing without it: the descriptor is edge triggered,
so a `Pump` always drains until the socket would block, and whoever sends calls `check` afterwards, because sending
may swallow the edge. Flags are plain integers and the sockets are the backend's own for the same reason of cost.
"""

import asyncio
import struct
import threading
from collections.abc import Callable

import zmq
import zmq.backend

from headwater.errors import ConfigError
from headwater.runtime.cluster_keys import split_key
from headwater.runtime.curve import ZAP_ENDPOINT, Membership, Options
from headwater.runtime.wire import MAX_MESSAGE_BYTES, Limits

RawSocket = zmq.backend.Socket

NOBLOCK = 1
SNDMORE = 2
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_FD = int(zmq.FD)
_RCVMORE = int(zmq.RCVMORE)
_MAX_PER_TURN = 128
"""Messages taken from one socket before other work gets its turn."""
_MAX_SOCKETS = 16384
_TERM_TIMEOUT_S = 5.0
NEVER_RECONNECT_MS = 24 * 3600 * 1000
"""libzmq drops unread messages when reconnecting is switched off (-1); a day away it keeps them."""

DEALER = int(zmq.DEALER)
ROUTER = int(zmq.ROUTER)
PUB = int(zmq.PUB)
SUB = int(zmq.SUB)


class ZmqContext:
    """The ZeroMQ context of a process; owns its sockets. With a membership, all of them speak CURVE."""

    def __init__(self, membership: Membership | None = None) -> None:
        self.membership = membership
        self._door: tuple[RawSocket, Pump] | None = None
        self._context = zmq.backend.Context(1)
        self._context.set(int(zmq.MAX_SOCKETS), _MAX_SOCKETS)
        self._sockets: set[RawSocket] = set()

    def socket(self, kind: int, limits: Limits, max_message_bytes: int = MAX_MESSAGE_BYTES) -> RawSocket:
        socket = RawSocket(self._context, kind)
        self._sockets.add(socket)
        options = {
            zmq.SNDHWM: limits.queue_messages,
            zmq.RCVHWM: limits.queue_messages,
            zmq.MAXMSGSIZE: max_message_bytes,
            zmq.HEARTBEAT_IVL: round(limits.heartbeat_s * 1000),
            zmq.HEARTBEAT_TIMEOUT: round(limits.silence_s * 1000),
            zmq.HEARTBEAT_TTL: round(limits.silence_s * 1000),
            zmq.HANDSHAKE_IVL: round(limits.silence_s * 1000),
        }
        for option, value in options.items():
            socket.set(int(option), value)
        if self.membership is not None and self._door is None:
            self._open_door(self.membership)
        return socket

    def _open_door(self, membership: Membership) -> None:
        """Answer ZeroMQ's questions about whom to let in."""
        door = RawSocket(self._context, ROUTER)
        door.bind(ZAP_ENDPOINT)

        def answer() -> None:
            peer, *parts = receive_parts(door)
            reply = [peer, b"", *membership.answer(parts[1:])]
            for number, part in enumerate(reply):
                door.send(part, NOBLOCK | (SNDMORE if number < len(reply) - 1 else 0))
            porter.check()

        porter = Pump(door, answer)
        self._door = (door, porter)

    def close(self, socket: RawSocket, *, linger_s: float = 0.0) -> None:
        self._sockets.discard(socket)
        socket.close(round(linger_s * 1000))

    async def term(self) -> None:
        """Close what is open and wait for lingering messages."""
        if self._door is not None:
            door, porter = self._door
            porter.stop()
            door.close(0)
        for socket in list(self._sockets):
            self.close(socket)
        done = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def work() -> None:
            self._context.term()
            loop.call_soon_threadsafe(done.set_result, None)

        threading.Thread(target=work, name="headwater-zmq-term", daemon=True).start()
        await asyncio.wait_for(done, _TERM_TIMEOUT_S)


class Pump:
    """Calls `receive` (which takes one message or raises `zmq.Again`) for every message of a socket."""

    def __init__(self, socket: RawSocket, receive: Callable[[], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.get(_FD))
        self._stopped = False
        self._loop.add_reader(self._fd, self.drain)
        self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Take what is there; beyond a turn's share, go on in the next one."""
        more = True
        try:
            for _ in range(_MAX_PER_TURN):
                if self._stopped:
                    return
                self._receive()
        except zmq.Again:
            more = False
        finally:
            if more and not self._stopped:
                self._loop.call_soon(self.drain)

    def drain_all(self) -> None:
        """Take everything that is there now."""
        try:
            while not self._stopped:
                self._receive()
        except zmq.Again:
            return

    def check(self) -> None:
        """To be called after sending."""
        if not self._stopped and int(self._socket.get(_EVENTS)) & _POLLIN:
            self._loop.call_soon(self.drain)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._loop.remove_reader(self._fd)


class Monitor:
    """Reports what happens to the connections of one socket: (event, value), value being a descriptor or an error."""

    def __init__(self, context: ZmqContext, socket: RawSocket, events: int, report: Callable[[int, int], None]) -> None:
        self._context = context
        self._watched = socket
        self._report = report
        address = f"inproc://monitor-{id(self):x}"
        socket.monitor(address, events)
        self._socket = context.socket(int(zmq.PAIR), Limits())
        self._socket.connect(address)
        self._pump = Pump(self._socket, self._receive)

    def drain_all(self) -> None:
        self._pump.drain_all()

    def close(self) -> None:
        self._pump.stop()
        self._watched.monitor(None, 0)
        self._context.close(self._socket)

    def _receive(self) -> None:
        head, *_ = receive_parts(self._socket)
        event, value = struct.unpack("=hi", head)
        self._report(event, value)


def receive_parts(socket: RawSocket) -> list[bytes]:
    """One message of any number of parts. Raises `zmq.Again`."""
    parts = [socket.recv(NOBLOCK)]
    while socket.get(_RCVMORE):
        parts.append(socket.recv(NOBLOCK))
    return parts


def bind(context: ZmqContext, socket: RawSocket, endpoint: str) -> str:
    """Returns the address it led to. A socket that cannot be bound is closed."""
    membership = context.membership
    try:
        if membership is not None:
            _set(socket, membership.listening())
        _allow_ipv6(socket, endpoint)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        context.close(socket)
        raise ConfigError(f"cannot listen on {endpoint}: {error}") from error
    bound = socket.get(int(zmq.LAST_ENDPOINT))
    assert isinstance(bound, bytes)
    bound_endpoint = bound.rstrip(b"\0").decode()
    return bound_endpoint if membership is None else membership.address(bound_endpoint)


def connect(context: ZmqContext, socket: RawSocket, address: str) -> None:
    """Begin to connect. Raises `ConfigError` for what is no address, or leads to no member of the cluster."""
    if context.membership is not None:
        endpoint, options = context.membership.dialling(address)
        _set(socket, options)
    else:
        endpoint, public = split_key(address)
        if public is not None:
            raise ConfigError(f"{endpoint!r} is for members of a cluster", hint="--cluster-key names the file of keys")
    try:
        _allow_ipv6(socket, endpoint)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{endpoint!r} cannot be dialled: {error}") from error


def _set(socket: RawSocket, options: Options) -> None:
    for option, value in options.items():
        socket.set(option, value)


def _allow_ipv6(socket: RawSocket, endpoint: str) -> None:
    """Only where it is needed: it would turn IPv4 addresses into mapped ones."""
    socket.set(int(zmq.IPV6), int(endpoint.startswith("tcp://[")))
