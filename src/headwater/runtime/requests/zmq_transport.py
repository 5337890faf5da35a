"""The request plane over ZeroMQ: a DEALER per worker on the frontend's side, one ROUTER on the worker's.

Monitors tell of broken connections at once, heartbeats of those that fell silent. A ROUTER does not say which
connection a message came by, except through its descriptor: that ties a peer to the monitor's news. Names of peers are
never given twice, descriptors are: a peer that was lost is remembered for a while, so that what is still read from it
is not taken for the word of the one that has its descriptor now.
"""

import errno
from collections import deque

import zmq

from headwater.runtime.endpoints import Endpoints, unlink_ipc
from headwater.runtime.requests.transport import (
    OnLost,
    OnMessage,
    OnPeerLost,
    OnPeerMessage,
    PeerGone,
    QueueFull,
)
from headwater.runtime.wire import Limits
from headwater.runtime.zeromq import (
    DEALER,
    NEVER_RECONNECT_MS,
    NOBLOCK,
    ROUTER,
    SNDMORE,
    Monitor,
    Pump,
    ZmqContext,
    bind,
    connect,
    receive_parts,
)

_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_LOST = int(
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REASONS = {
    _DISCONNECTED: "the worker closed the connection, died, or did not answer in time",
    int(zmq.EVENT_CONNECT_RETRIED): "nobody listens there",
}
_SRCFD = int(zmq.SRCFD)
_UNREAD_MESSAGES = 64
"""Of one frontend at a worker: messages may be large, and what is not read in time waits at the sender."""

_FORMER_PEERS = 64


class ZmqDialer:
    """Implements `Dialer`."""

    def __init__(self, context: ZmqContext, address: str, limits: Limits) -> None:
        self._context = context
        self._limits = limits
        self.address = address

    def open(self, on_message: OnMessage, on_lost: OnLost) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._socket = self._context.socket(DEALER, self._limits)
        self._socket.set(int(zmq.RECONNECT_IVL), NEVER_RECONNECT_MS)
        self._monitor = Monitor(self._context, self._socket, _LOST, self._on_event)
        self._pump = Pump(self._socket, self._receive)
        connect(self._context, self._socket, self.address)

    def transmit(self, message: bytes) -> None:
        try:
            self._socket.send(message, NOBLOCK)
        except zmq.Again:
            raise QueueFull from None
        self._pump.check()

    def close(self) -> None:
        self._pump.stop()
        self._monitor.close()
        self._context.close(self._socket)

    def _receive(self) -> None:
        message = self._socket.recv(NOBLOCK)
        self._on_message(message)

    def _on_event(self, event: int, _: int) -> None:
        self._pump.drain_all()
        self._on_lost(_REASONS.get(event, "the connection could not be set up"))


class ZmqAcceptor:
    """Implements `Acceptor`."""

    def __init__(self, context: ZmqContext, endpoints: Endpoints, limits: Limits) -> None:
        self._context = context
        self._endpoints = endpoints
        self._limits = limits
        self._live: set[int] = set()
        """Descriptors of the connections that are open."""
        self._peer_by_fd: dict[int, bytes] = {}
        self._known: set[bytes] = set()
        self._former: deque[bytes] = deque(maxlen=_FORMER_PEERS)

    def open(self, on_message: OnPeerMessage, on_lost: OnPeerLost) -> str:
        self._on_message = on_message
        self._on_lost = on_lost
        self._socket = self._context.socket(ROUTER, self._limits)
        self._socket.set(int(zmq.ROUTER_MANDATORY), 1)
        self._socket.set(int(zmq.RCVHWM), min(_UNREAD_MESSAGES, self._limits.queue_messages))
        self._monitor = Monitor(self._context, self._socket, _ACCEPTED | _DISCONNECTED, self._on_event)
        self._pump = Pump(self._socket, self._receive)
        self.address = bind(self._context, self._socket, self._endpoints.new("requests"))
        return self.address

    def transmit(self, peer: bytes, message: bytes) -> None:
        try:
            self._socket.send(peer, SNDMORE | NOBLOCK)
            self._socket.send(message, NOBLOCK)
        except zmq.Again:
            raise QueueFull from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise PeerGone from None

    def flushed(self) -> None:
        self._pump.check()

    def close(self) -> None:
        self._pump.stop()
        self._monitor.close()
        self._context.close(self._socket, linger_s=self._limits.linger_s)
        unlink_ipc(self.address)

    def _receive(self) -> None:
        peer = self._socket.recv(NOBLOCK)
        frame = self._socket.recv(NOBLOCK, False)
        if frame.more:
            receive_parts(self._socket)
            message = b""
        else:
            message = frame.bytes
        if peer in self._known or (peer not in self._former and self._admit(peer, int(frame.get(_SRCFD)))):
            self._on_message(peer, message)

    def _admit(self, peer: bytes, fd: int) -> bool:
        """Tie a new peer to its connection. Late messages of a connection that is gone are dropped."""
        self._monitor.drain_all()
        if fd not in self._live:
            return False
        self._lose(fd)
        self._peer_by_fd[fd] = peer
        self._known.add(peer)
        return True

    def _on_event(self, event: int, fd: int) -> None:
        self._lose(fd)
        if event == _ACCEPTED:
            self._live.add(fd)
        else:
            self._live.discard(fd)

    def _lose(self, fd: int) -> None:
        peer = self._peer_by_fd.pop(fd, None)
        if peer is not None:
            self._known.discard(peer)
            self._former.append(peer)
            self._on_lost(peer)
