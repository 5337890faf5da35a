"""The event plane over ZeroMQ: PUB for batches, ROUTER for questions; one SUB per subscriber, a DEALER while asking.

An address names both sockets: `<pub endpoint>#<router endpoint>`. A broadcast begins with a digest of the address, so
that one SUB socket can tell its publishers apart. Who reads too slowly loses batches beyond the high-water mark.
"""

import errno
import logging
from hashlib import blake2b

import zmq

from headwater.errors import ConfigError
from headwater.runtime.cluster_keys import split_key
from headwater.runtime.endpoints import Endpoints, unlink_ipc
from headwater.runtime.events.transport import OnAsk, OnMessage
from headwater.runtime.events.wire import MAX_EVENT_MESSAGE_BYTES
from headwater.runtime.wire import Limits
from headwater.runtime.zeromq import (
    DEALER,
    NOBLOCK,
    PUB,
    ROUTER,
    SNDMORE,
    SUB,
    Pump,
    RawSocket,
    ZmqContext,
    bind,
    connect,
    receive_parts,
)

_log = logging.getLogger(__name__)

_TOPIC_BYTES = 8


class ZmqBroadcaster:
    """Implements `Broadcaster`."""

    def __init__(self, context: ZmqContext, endpoints: Endpoints, limits: Limits) -> None:
        self._context = context
        self._endpoints = endpoints
        self._limits = limits

    def open(self, on_ask: OnAsk) -> str:
        self._on_ask = on_ask
        self._pub = self._context.socket(PUB, self._limits, MAX_EVENT_MESSAGE_BYTES)
        pub_endpoint = bind(self._context, self._pub, self._endpoints.new("events"))
        self._router = self._context.socket(ROUTER, self._limits, MAX_EVENT_MESSAGE_BYTES)
        self._bound = (pub_endpoint, bind(self._context, self._router, self._endpoints.new("replay")))
        self._pump = Pump(self._router, self._receive)
        self.address = "#".join(self._bound)
        self._topic = _topic(self.address)
        return self.address

    def broadcast(self, message: bytes) -> None:
        self._pub.send(self._topic + message, NOBLOCK)

    def answer(self, peer: bytes, message: bytes) -> None:
        try:
            self._router.send(peer, SNDMORE | NOBLOCK)
            self._router.send(message, NOBLOCK)
        except zmq.Again:
            _log.debug("a subscriber does not read its answers")
        self._pump.check()

    def close(self) -> None:
        self._pump.stop()
        for socket, endpoint in zip((self._pub, self._router), self._bound, strict=True):
            self._context.close(socket, linger_s=self._limits.linger_s)
            unlink_ipc(endpoint)

    def _receive(self) -> None:
        peer, *parts = receive_parts(self._router)
        if len(parts) == 1:
            self._on_ask(peer, parts[0])


class ZmqTuner:
    """The SUB socket of one subscriber."""

    def __init__(self, context: ZmqContext, limits: Limits) -> None:
        self.context = context
        self.limits = limits
        self._sub: RawSocket | None = None
        self._pump: Pump | None = None
        self._listeners: dict[bytes, OnMessage] = {}
        self.foreign = 0
        """Broadcasts that no subscription wanted."""

    def receiver(self, address: str) -> "ZmqReceiver":
        return ZmqReceiver(self, address)

    def listen(self, address: str, endpoint: str, on_broadcast: OnMessage) -> None:
        if self._sub is None:
            self._sub = self.context.socket(SUB, self.limits, MAX_EVENT_MESSAGE_BYTES)
            self._sub.set(int(zmq.SUBSCRIBE), b"")
            self._pump = Pump(self._sub, self._receive)
        connect(self.context, self._sub, endpoint)
        self._listeners[_topic(address)] = on_broadcast

    def leave(self, address: str, endpoint: str) -> None:
        if self._listeners.pop(_topic(address), None) is not None and self._sub is not None:
            try:
                self._sub.disconnect(split_key(endpoint)[0])
            except zmq.ZMQError as error:
                if error.errno != errno.ENOENT:
                    raise

    def close(self) -> None:
        if self._sub is not None and self._pump is not None:
            self._pump.stop()
            self.context.close(self._sub)
            self._sub = None

    def _receive(self) -> None:
        assert self._sub is not None
        message = self._sub.recv(NOBLOCK)
        on_broadcast = self._listeners.get(message[:_TOPIC_BYTES])
        if on_broadcast is None:
            self.foreign += 1
        else:
            on_broadcast(message[_TOPIC_BYTES:])


class ZmqReceiver:
    """Implements `Receiver`."""

    def __init__(self, tuner: ZmqTuner, address: str) -> None:
        self._tuner = tuner
        self._address = address
        self._publisher, found, self._router = address.partition("#")
        if not found:
            raise ConfigError(f"event address {address!r} does not name two endpoints")
        self._dealer: RawSocket | None = None
        self._pump: Pump | None = None

    def open(self, on_broadcast: OnMessage, on_answer: OnMessage) -> None:
        self._on_answer = on_answer
        self._tuner.listen(self._address, self._publisher, on_broadcast)

    def ask(self, question: bytes) -> None:
        if self._dealer is None:
            self._dealer = self._tuner.context.socket(DEALER, self._tuner.limits, MAX_EVENT_MESSAGE_BYTES)
            connect(self._tuner.context, self._dealer, self._router)
            self._pump = Pump(self._dealer, self._receive)
        assert self._pump is not None
        try:
            self._dealer.send(question, NOBLOCK)
        except zmq.Again:
            _log.debug("%s does not take questions", self._address)
        self._pump.check()

    def rest(self) -> None:
        if self._dealer is not None and self._pump is not None:
            self._pump.stop()
            self._tuner.context.close(self._dealer)
            self._dealer = None

    def close(self) -> None:
        self.rest()
        self._tuner.leave(self._address, self._publisher)

    def _receive(self) -> None:
        assert self._dealer is not None
        parts = receive_parts(self._dealer)
        if len(parts) == 1:
            self._on_answer(parts[0])


def _topic(address: str) -> bytes:
    return blake2b(address.encode(), digest_size=_TOPIC_BYTES).digest()
