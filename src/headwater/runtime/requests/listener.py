"""A worker's end of all its connections, over any transport.

A peer is known from its `Hello` until it leaves, falls silent, stops reading or sends something that is not a frame.
One that was given up and speaks again by the same connection, since the network was cut for a while, is told why and
has to connect anew. Garbage is counted and its sender refused; nothing a peer sends can raise here.
"""

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec

from headwater.errors import HeadwaterError, Overloaded, ProtocolError, WorkerLost
from headwater.protocol import PROTOCOL_VERSION
from headwater.protocol.frames import FrontendFrame, Hello, Ping, Pong, Refused, Welcome, WorkerFrame
from headwater.protocol.request import ErrorInfo
from headwater.runtime.requests.base import OnFrontendFrame, OnPeerGone
from headwater.runtime.requests.transport import Acceptor, PeerGone, QueueFull
from headwater.runtime.wire import (
    MAX_NAME_CHARS,
    Limits,
    check_size,
    explain_incompatible,
    join_frames,
    split_batches,
)

_log = logging.getLogger(__name__)

COMPLAINT_INTERVAL_S = 1.0
"""A hostile peer must not fill the log."""


@dataclass(slots=True)
class ListenerStats:
    """Counted since start."""

    garbage: int = 0
    refused: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Peer:
    frontend_id: str
    outbox: list[bytes] = field(default_factory=list[bytes])
    heard: bool = True
    silent_s: float = 0.0


class Listener:
    """Implements `RequestListener`."""

    def __init__(self, acceptor: Acceptor, limits: Limits) -> None:
        self._acceptor = acceptor
        self._limits = limits
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[FrontendFrame])
        self._peers: dict[bytes, _Peer] = {}
        self._given_up: dict[bytes, str] = {}
        """Why; as long as the connection stands."""
        self._flush_scheduled = False
        self._closed = False
        self._tick_handle: asyncio.TimerHandle | None = None
        self._next_complaint = 0.0
        self.stats = ListenerStats()

    @property
    def peers(self) -> list[str]:
        """Ids of the frontends connected now."""
        return [peer.frontend_id for peer in self._peers.values()]

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def frontend_id(self, peer: bytes) -> str:
        known = self._peers.get(peer)
        return known.frontend_id if known is not None else ""

    async def listen(self, worker_id: str, on_frame: OnFrontendFrame, on_gone: OnPeerGone) -> str:
        self._loop = asyncio.get_running_loop()
        self._worker_id = worker_id
        self._on_frame = on_frame
        self._on_gone = on_gone
        address = self._acceptor.open(self._on_message, self._on_lost)
        self._tick_handle = self._loop.call_later(self._limits.heartbeat_s, self._tick)
        return address

    def send(self, peer: bytes, frame: WorkerFrame) -> None:
        known = self._peers.get(peer)
        if known is None or self._closed:
            return
        known.outbox.append(check_size(self._encoder.encode(frame)))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    async def close(self) -> None:
        if self._closed:
            return
        self._flush()
        self._closed = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._acceptor.close()
        self._peers.clear()

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._closed:
            return
        for peer, known in list(self._peers.items()):
            if known.outbox:
                frames, known.outbox = known.outbox, []
                for batch in split_batches(frames):
                    self._transmit(peer, join_frames(batch))
        self._acceptor.flushed()

    def _transmit(self, peer: bytes, message: bytes) -> None:
        try:
            self._acceptor.transmit(peer, message)
        except QueueFull:
            self._give_up(peer, "did not read")
        except PeerGone:
            self._forget(peer)

    def _on_message(self, peer: bytes, message: bytes) -> None:
        known = self._peers.get(peer)
        if known is not None:
            known.heard = True
        elif peer in self._given_up:
            self._tell_refusal(
                peer, WorkerLost(f"this frontend {self._given_up[peer]} and was given up: connect again")
            )
            return
        try:
            frames = self._decoder.decode(message)
        except msgspec.DecodeError as error:
            self.stats.garbage += 1
            self._refuse(peer, ProtocolError(f"a message cannot be understood: {error}"))
            return
        for frame in frames:
            if isinstance(frame, Hello):
                self._welcome(peer, frame)
            elif peer not in self._peers:
                self._refuse(peer, ProtocolError("the first frame of a connection must be hello"))
                return
            elif isinstance(frame, Ping):
                self.send(peer, Pong(frame.nonce))
            else:
                self._on_frame(peer, frame)

    def _welcome(self, peer: bytes, hello: Hello) -> None:
        reason = explain_incompatible(hello.version)
        if reason is not None:
            self._refuse(peer, ProtocolError(reason))
        elif peer in self._peers or not 1 <= len(hello.frontend_id) <= MAX_NAME_CHARS:
            self._refuse(peer, ProtocolError("hello is said once, with an id of 1 to 128 characters"))
        elif len(self._peers) >= self._limits.max_peers:
            self._refuse(peer, Overloaded(f"{len(self._peers)} frontends are connected already"))
        else:
            self._peers[peer] = _Peer(hello.frontend_id)
            self.send(peer, Welcome(self._worker_id, PROTOCOL_VERSION))

    def _refuse(self, peer: bytes, error: HeadwaterError) -> None:
        self.stats.refused += 1
        if self._loop.time() >= self._next_complaint:
            self._next_complaint = self._loop.time() + COMPLAINT_INTERVAL_S
            _log.warning("refusing frontend %s: %s (%d refused so far)", self._name(peer), error, self.stats.refused)
        self._forget(peer)
        self._tell_refusal(peer, error)

    def _tell_refusal(self, peer: bytes, error: HeadwaterError) -> None:
        refusal = Refused(ErrorInfo(error.code, error.message, error.http_status, error.retryable))
        self._transmit(peer, join_frames([self._encoder.encode(refusal)]))
        self._acceptor.flushed()

    def _give_up(self, peer: bytes, why: str) -> None:
        if peer in self._peers:
            _log.warning("frontend %s %s: giving it up", self._name(peer), why)
            self._given_up[peer] = why
            self._forget(peer)

    def _on_lost(self, peer: bytes) -> None:
        """The connection is gone."""
        self._given_up.pop(peer, None)
        self._forget(peer)

    def _forget(self, peer: bytes) -> None:
        if self._peers.pop(peer, None) is not None:
            self.stats.lost += 1
            self._on_gone(peer)

    def _tick(self) -> None:
        for peer, known in list(self._peers.items()):
            known.silent_s = 0.0 if known.heard else known.silent_s + self._limits.heartbeat_s
            known.heard = False
            if known.silent_s >= self._limits.patience_s:
                self._give_up(peer, f"was silent for {known.silent_s:g} s")
        self._tick_handle = self._loop.call_later(self._limits.heartbeat_s, self._tick)

    def _name(self, peer: bytes) -> str:
        known = self._peers.get(peer)
        return repr(known.frontend_id) if known is not None else peer.hex()
