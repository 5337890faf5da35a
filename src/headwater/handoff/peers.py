"""The decode worker's connections to prefill workers, opened when they are first needed.

A connection is used for all hand-offs with that worker. When it breaks, all of them hear of it, and the next one opens
a new connection.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from headwater.errors import HeadwaterError, ProtocolError, Unavailable
from headwater.protocol.frames import (
    BlocksReady,
    FrontendFrame,
    PrefillWaits,
    ReleaseBlocks,
    StepFrame,
    Submit,
    WorkerFrame,
)
from headwater.protocol.request import EngineRequest, RemotePrefill, SequenceOutput
from headwater.runtime.requests.base import WorkerLink

CONNECT_TIMEOUT_S = 2.0
_IDLE_S = 300.0

OpenLink = Callable[[str], WorkerLink]
"""From a request address to a link that is not connected yet."""


class PeerOwner(Protocol):
    """Hears from prefill workers, by stream."""

    def on_waits(self, waits: PrefillWaits) -> None: ...

    def on_ready(self, ready: BlocksReady) -> None: ...

    def on_output(self, output: SequenceOutput) -> None: ...

    def on_lost(self, stream: int, error: HeadwaterError) -> None: ...

    def on_left(self, worker_id: str) -> None:
        """Nothing is connected to that worker any more."""
        ...


class _Peer:
    """One connection and the streams on it."""

    def __init__(self, worker_id: str, link: WorkerLink, owner: PeerOwner) -> None:
        self.streams: set[int] = set()
        self.lost = False
        self.idle: asyncio.TimerHandle | None = None
        self.worker_id = worker_id
        self._link = link
        self._owner = owner
        self._waiting: list[FrontendFrame] | None = []
        """What is to be sent once the connection stands."""
        self._task = asyncio.get_running_loop().create_task(self._connect(), name=f"connection to {worker_id}")

    def send(self, frame: FrontendFrame) -> None:
        if self._waiting is None:
            self._link.send(frame)
        else:
            self._waiting.append(frame)

    async def close(self) -> None:
        self.lost = True
        if self.idle is not None:
            self.idle.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._link.close()

    async def _connect(self) -> None:
        try:
            worker_id = await self._link.connect(self._on_frame, self._on_broken, CONNECT_TIMEOUT_S)
            if worker_id != self.worker_id:
                raise ProtocolError(f"worker {worker_id} answers where {self.worker_id} was expected")
        except HeadwaterError as error:
            self._on_broken(error)
            return
        frames, self._waiting = self._waiting or [], None
        for frame in frames:
            self._link.send(frame)

    def _on_frame(self, frame: WorkerFrame) -> None:
        if isinstance(frame, BlocksReady):
            if frame.stream in self.streams:
                self._owner.on_ready(frame)
        elif isinstance(frame, PrefillWaits):
            if frame.stream in self.streams:
                self._owner.on_waits(frame)
        elif isinstance(frame, StepFrame):
            for output in frame.outputs:
                if output.stream in self.streams:
                    self._owner.on_output(output)

    def _on_broken(self, error: HeadwaterError) -> None:
        self.lost = True
        self._waiting = []
        for stream in list(self.streams):
            self._owner.on_lost(stream, error)


class PrefillPeers:
    """Connections by worker."""

    def __init__(self, open_link: OpenLink, owner: PeerOwner) -> None:
        self._open_link = open_link
        self._owner = owner
        self._peers: dict[str, _Peer] = {}
        self._by_stream: dict[int, _Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def ask(self, where: RemotePrefill, request: EngineRequest) -> None:
        """Send a request; the streams of a connection that breaks are told so."""
        peer = self._peers.get(where.worker_id)
        if peer is None or peer.lost:
            if peer is not None:
                self._drop(peer)
            peer = _Peer(where.worker_id, self._open_link(where.address), self._owner)
            self._peers[where.worker_id] = peer
        if peer.idle is not None:
            peer.idle.cancel()
            peer.idle = None
        peer.streams.add(request.stream)
        self._by_stream[request.stream] = peer
        peer.send(Submit([request]))

    def release(self, stream: int) -> None:
        """Nothing more is wanted of this stream."""
        peer = self._by_stream.pop(stream, None)
        if peer is None:
            return
        peer.streams.discard(stream)
        if not peer.lost:
            with contextlib.suppress(Unavailable):  # it does not know the frame, so it has no blocks of ours
                peer.send(ReleaseBlocks([stream]))
        if not peer.streams:
            loop = asyncio.get_running_loop()
            peer.idle = loop.call_later(0.0 if peer.lost else _IDLE_S, self._forget, peer)

    async def close(self) -> None:
        peers, self._peers = list(self._peers.values()), {}
        self._by_stream.clear()
        await asyncio.gather(*[peer.close() for peer in peers], *self._closing)

    def _forget(self, peer: _Peer) -> None:
        if self._peers.get(peer.worker_id) is peer:  # else a new connection has taken its place, and it is dropped
            del self._peers[peer.worker_id]
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._owner.on_left(peer.worker_id)
        task = asyncio.get_running_loop().create_task(peer.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
