"""Follows one KV event feed: in order, without gaps, across restarts of the engine.

A number that is skipped makes us ask the replay socket for what is missing, while what comes is kept; what cannot be
replayed (no such socket, no answer, buffer rolled over) is made up for by forgetting all and going on. A number that
comes again with a later time is a new life of the engine. Nothing here knows what the batches mean.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from headwater.engines.kv_feed.wire import ForeignBatch, decode_batch
from headwater.errors import ConfigError, ProtocolError
from headwater.runtime.wire import Limits
from headwater.runtime.zeromq import DEALER, NOBLOCK, SNDMORE, SUB, Pump, RawSocket, ZmqContext, receive_parts

_log = logging.getLogger(__name__)

_NUMBER_BYTES = 8
_END = b"\xff" * _NUMBER_BYTES
_REPLAY_TIMEOUT_S = 5.0
_MAX_KEPT = 10_000
"""Batches kept while earlier ones are asked for."""
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_SUBSCRIBE = int(zmq.SUBSCRIBE)
_IPV6 = int(zmq.IPV6)
_WILDCARDS = ("://*:", "://0.0.0.0:", "://[::]:")


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """Where one rank publishes."""

    endpoint: str
    topic: str = ""
    replay_endpoint: str | None = None
    dials: bool = False
    """The publisher may be the one that dials: we listen there, unless somebody does already."""

    @classmethod
    def published(cls, endpoint: str, topic: str, replay_endpoint: str | None, host: str) -> "FeedAddress":
        """From what an engine on `host` was configured with: it listens at wildcards, and dials what has a host."""
        dials = endpoint.startswith("tcp://") and not any(wildcard in endpoint for wildcard in _WILDCARDS)
        return cls(_dialled(endpoint, host), topic, _dialled(replay_endpoint, host) if replay_endpoint else None, dials)


class FeedSink(Protocol):
    def on_batch(self, batch: ForeignBatch) -> None: ...

    def on_lost(self, reason: str) -> None:
        """What was known is void; the next batch begins anew."""
        ...


class FeedOrder:
    """Puts batches in order. Pure: `ask` sends for a replay."""

    def __init__(self, sink: FeedSink, ask: Callable[[int], bool]) -> None:
        self.num_gaps = 0
        self.num_lost = 0
        self._sink = sink
        self._ask = ask
        self._next: int | None = None
        self._latest = 0.0
        self._asking = False
        self._asked_from = 0
        self._kept: dict[int, ForeignBatch] = {}

    def begin(self) -> None:
        """Ask for all that was before us."""
        self._request(0)

    def on_live(self, number: int, batch: ForeignBatch) -> None:
        if self._next is not None and number < self._next:
            if batch.timestamp <= self._latest:
                return  # seen in a replay
            self._lose("the engine was started anew")
            self._kept.clear()
            self._next = 0
        if self._next is None and not self._asking:
            self._next = number
        if number == self._next and not self._asking:
            self._take(number, batch)
            return
        if len(self._kept) < _MAX_KEPT:
            self._kept[number] = batch
        if not self._asking:
            self.num_gaps += 1
            if not self._request(self._next or 0):
                self._catch_up(asking=False)

    def on_replayed(self, number: int, batch: ForeignBatch) -> None:
        if not self._asking:
            return
        if self._next is None or number == self._next:
            self._take(number, batch)
        elif number > self._next:
            self._kept.setdefault(number, batch)

    def on_replay_end(self, *, answered: bool = True) -> None:
        """All was sent that there is, or no answer will come."""
        if not self._asking:
            return
        self._asking = False
        if self._next is None and answered:
            self._next = 0  # nothing was published before us
        self._catch_up(asking=answered)

    def _request(self, start: int) -> bool:
        self._asked_from = start
        self._asking = self._ask(start)
        return self._asking

    def _catch_up(self, *, asking: bool) -> None:
        """Go on with what was kept; what is missing in it is asked for once."""
        while self._kept:
            first = min(self._kept)
            if self._next is not None and first > self._next:
                if asking and self._asked_from != self._next and self._request(self._next):
                    return
                self._lose(f"{first - self._next} batches cannot be had again")
            batch = self._kept.pop(first)
            if self._next is None or first >= self._next:
                self._take(first, batch)

    def _take(self, number: int, batch: ForeignBatch) -> None:
        self._next = number + 1
        self._latest = batch.timestamp
        self._sink.on_batch(batch)

    def _lose(self, reason: str) -> None:
        self.num_lost += 1
        self._sink.on_lost(reason)


class Feed:
    """One feed, followed from construction to `close`."""

    def __init__(self, context: ZmqContext, address: FeedAddress, sink: FeedSink) -> None:
        self._context = context
        self._address = address
        self._order = FeedOrder(sink, self._ask)
        self._timer: asyncio.TimerHandle | None = None
        limits = Limits()
        self._sub = context.socket(SUB, limits, _MAX_MESSAGE_BYTES)
        self._sub.set(_SUBSCRIBE, address.topic.encode())
        if not (address.dials and _listen(self._sub, address.endpoint)):
            _connect(self._sub, address.endpoint)
        self._dealer = None
        if address.replay_endpoint is not None:
            self._dealer = context.socket(DEALER, limits, _MAX_MESSAGE_BYTES)
            _connect(self._dealer, address.replay_endpoint)
            self._replies = Pump(self._dealer, self._receive_replay)
        self._pump = Pump(self._sub, self._receive_live)
        self._order.begin()

    @property
    def order(self) -> FeedOrder:
        return self._order

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._pump.stop()
        self._context.close(self._sub)
        if self._dealer is not None:
            self._replies.stop()
            self._context.close(self._dealer)

    def _ask(self, start: int) -> bool:
        if self._dealer is None:
            return False
        self._dealer.send(b"", SNDMORE | NOBLOCK)
        self._dealer.send(start.to_bytes(_NUMBER_BYTES, "big"), NOBLOCK)
        self._replies.check()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(
            _REPLAY_TIMEOUT_S, lambda: self._order.on_replay_end(answered=False)
        )
        return True

    def _receive_live(self) -> None:
        parts = receive_parts(self._sub)
        if len(parts) == 3:
            self._hand_on(parts[1], parts[2], self._order.on_live)

    def _receive_replay(self) -> None:
        assert self._dealer is not None
        parts = receive_parts(self._dealer)[-2:]
        if len(parts) == 2 and parts[0] == _END:
            if self._timer is not None:
                self._timer.cancel()
            self._order.on_replay_end()
        elif len(parts) == 2:
            self._hand_on(parts[0], parts[1], self._order.on_replayed)

    def _hand_on(self, number: bytes, payload: bytes, take: Callable[[int, ForeignBatch], None]) -> None:
        try:
            batch = decode_batch(payload)
        except ProtocolError as error:
            _log.warning("%s: %s", self._address.endpoint, error)
            return
        take(int.from_bytes(number, "big"), batch)


def _connect(socket: RawSocket, endpoint: str) -> None:
    """In the clear: an engine's feed has no keys of ours."""
    try:
        socket.set(_IPV6, int(endpoint.startswith("tcp://[")))
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"the KV events at {endpoint!r} cannot be dialled: {error}") from error


def _listen(socket: RawSocket, endpoint: str) -> bool:
    """False when the address is taken, by the publisher itself, or is not of this host."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        return False
    return True


def _dialled(endpoint: str, host: str) -> str:
    host = f"[{host}]" if ":" in host else host
    for wildcard in _WILDCARDS:
        endpoint = endpoint.replace(wildcard, f"://{host}:")
    return endpoint
