"""Control sessions: one for each direction in which transfers begin. They carry everything but the bytes.

A session that is silent for longer than its peer's heartbeat allows is broken off; whatever hangs on it fails with
`PeerLost`, on both sides. All state is touched by the reactor alone, unless it says otherwise.
"""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol

import msgspec

from headwater.errors import LinkUnavailable, PeerLost, ProtocolError, TransferError
from headwater.transfer.base import Backend, Grant, RemoteRegion
from headwater.transfer.blocks import Blocks
from headwater.transfer.card import AgentCard, RegionCard
from headwater.transfer.connection import Connection
from headwater.transfer.outcome import Notice, Stop
from headwater.transfer.regions import Hold, Region, RegionTable
from headwater.transfer.wire import (
    CONTROLS,
    Attach,
    Attached,
    Control,
    Done,
    Failed,
    Inspect,
    Inspected,
    Ping,
    Refused,
    Revoke,
    Revoked,
    Sums,
    SumsOf,
    error_of,
    refusal,
)

_Reply = RemoteRegion | Inspected | SumsOf
_LOOK_S = 0.2
_MAX_SERVING = 64


class Outbound:
    """To a peer whose memory we read and write."""

    def __init__(self, peer: AgentCard, on_lost: Callable[["Outbound", TransferError], None]) -> None:
        self.peer = peer
        self.connection: Connection | None = None
        self._on_lost = on_lost
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[_Reply]] = {}
        self._stops: set[Stop] = set()
        self._remotes: list[RemoteRegion] = []
        self._error: TransferError | None = None

    # Any thread

    def guard(self, stop: Stop) -> None:
        """Fail `stop` when the session is lost; at once if it already is."""
        with self._lock:
            self._stops.add(stop)
            if self._error is not None:
                stop.fail(self._error)

    def release(self, stop: Stop) -> None:
        with self._lock:
            self._stops.discard(stop)

    def attach(self, region: int, backend: str, offer: bytes, stop: Stop) -> RemoteRegion:
        """Ask the owner for a region."""
        reply = self._ask(lambda request: Attach(request, region, backend, offer), stop)
        if not isinstance(reply, RemoteRegion) or reply.card.id != region:
            raise TransferError("the peer answered something else than was asked")
        return reply

    def inspect(self, region: int, stop: Stop) -> RegionCard:
        """What the owner says of a region."""
        reply = self._ask(lambda request: Inspect(request, region), stop)
        if not isinstance(reply, Inspected):
            raise TransferError("the peer answered something else than was asked")
        return reply.card

    def sums(self, blocks: Blocks, stop: Stop) -> bytes:
        """Checksums of the owner's blocks, as it sees them."""
        reply = self._ask(lambda request: Sums(request, blocks), stop)
        if not isinstance(reply, SumsOf):
            raise TransferError("the peer answered something else than was asked")
        return reply.sums

    def send(self, message: Control) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message)
        if self.connection is not None:
            self.connection.send(message)

    @property
    def lost(self) -> TransferError | None:
        return self._error

    def is_up(self) -> bool:
        """Looks at the connection itself: who tries again at once after a failure must not meet the same one again,
        because the reactor has yet to see it."""
        if self._error is None and self.connection is not None and not self.connection.is_up():
            self.on_broken(self.connection, PeerLost("the peer closed the connection"))
        return self._error is None

    def _ask(self, make: Callable[[int], Control], stop: Stop) -> _Reply:
        future: Future[_Reply] = Future()
        with self._lock:
            request = next(self._requests)
            self._pending[request] = future
        try:
            self.send(make(request))
            return self._await(future, stop)
        finally:
            with self._lock:
                self._pending.pop(request, None)

    def _await(self, future: Future[_Reply], stop: Stop) -> _Reply:
        while True:
            stop.check()
            try:
                return future.result(min(_LOOK_S, stop.remaining_s))
            except FutureTimeout:
                continue

    # Reactor

    def on_frame(self, connection: Connection, body: bytes) -> None:
        message = _decode(body)
        if isinstance(message, Attached | Inspected | SumsOf | Refused):
            self._replied(connection, message)
        elif isinstance(message, Revoke):
            self._revoke(message.region)
        elif not isinstance(message, Ping):
            raise ProtocolError(f"{type(message).__name__} from the side that was connected to")

    def on_broken(self, connection: Connection, error: TransferError) -> None:
        self.end(error)
        self._on_lost(self, error)

    def end(self, error: TransferError) -> None:
        """Fail everything that hangs on it. Idempotent."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            pending, stops, remotes = list(self._pending.values()), list(self._stops), list(self._remotes)
            self._pending.clear()  # whoever takes one out answers it, here or in the reactor
        for stop in stops:
            stop.fail(error)
        for future in pending:
            future.set_exception(error)
        if self.connection is not None:
            self.connection.close()
        for remote in remotes:
            remote.hold.revoke(lambda remote=remote: _release(remote))  # type: ignore[misc]

    def _replied(self, connection: Connection, message: Attached | Inspected | SumsOf | Refused) -> None:
        reply = self._attached(connection, message) if isinstance(message, Attached) else message
        with self._lock:
            future = self._pending.pop(message.request, None)
        if future is None:
            return
        if isinstance(reply, Refused):
            future.set_exception(error_of(reply))
        else:
            future.set_result(reply)

    def _attached(self, connection: Connection, message: Attached) -> RemoteRegion:
        """Known from now on, so that a `Revoke` that follows finds it."""
        fd = connection.take_descriptor() if message.has_descriptor else -1
        hold = Hold(f"region {message.card.id} of {self.peer.name}")
        remote = RemoteRegion(message.card, hold, message.address, fd, message.offer)
        with self._lock:
            self._remotes = [known for known in self._remotes if not known.hold.revoked]
            self._remotes.append(remote)
        return remote

    def _revoke(self, region: int) -> None:
        with self._lock:
            remotes = [remote for remote in self._remotes if remote.card.id == region and not remote.hold.revoked]
            self._remotes = [remote for remote in self._remotes if remote.card.id != region]
        left = len(remotes)
        lock = threading.Lock()

        def freed(remote: RemoteRegion | None) -> None:
            nonlocal left
            if remote is not None:
                _release(remote)
            with lock:
                left -= remote is not None
                last = not left
            if last and self.connection is not None:
                self.connection.send(Revoked(region))

        for remote in remotes:
            remote.hold.revoke(lambda remote=remote: freed(remote))  # type: ignore[misc]
        if not remotes:
            freed(None)


class Owner(Protocol):
    """What an inbound session serves from."""

    @property
    def regions(self) -> RegionTable: ...

    def backend(self, name: str) -> Backend | None: ...

    def deliver(self, notice: Notice) -> None: ...

    def in_background(self, work: Callable[[], None]) -> None:
        """In a thread that never waits for a peer."""

    def soon(self, work: Callable[[], None]) -> None:
        """In the reactor."""

    def sums(self, blocks: Blocks) -> bytes: ...


class Inbound:
    """From a peer that reads and writes our memory."""

    def __init__(self, peer: AgentCard, owner: Owner, on_lost: Callable[["Inbound", TransferError], None]) -> None:
        self.peer = peer
        self.connection: Connection | None = None
        self._owner = owner
        self._on_lost = on_lost
        self._revocations: dict[int, list[Callable[[], None]]] = {}
        self._serving = threading.BoundedSemaphore(_MAX_SERVING)

    def on_frame(self, connection: Connection, body: bytes) -> None:
        message = _decode(body)
        match message:
            case Attach():
                self._attach(connection, message)
            case Inspect():
                self._inspect(connection, message)
            case Done():
                self._owner.deliver(self._notice(message.tag, message.payload, message.num_bytes, None))
            case Failed():
                self._owner.deliver(self._notice(message.tag, b"", 0, error_of(message)))
            case Sums():
                self._sum(connection, message)
            case Revoked():
                for freed in self._revocations.pop(message.region, []):
                    freed()
            case Ping():
                pass
            case _:
                raise ProtocolError(f"{type(message).__name__} from the side that connected")

    def on_broken(self, connection: Connection, error: TransferError) -> None:
        self.end(error)
        self._on_lost(self, error)

    def revoke(self, region: Region, freed: Callable[[], None]) -> None:
        """Take a region back from this peer; `freed` is called when it has let go."""
        if self.connection is None or self.connection.closed:
            freed()
            return
        self._revocations.setdefault(region.card.id, []).append(freed)
        self.connection.send(Revoke(region.card.id))

    def end(self, error: TransferError) -> None:
        """A peer that is gone holds nothing."""
        if self.connection is not None:
            self.connection.close()
        for region in self._owner.regions.all():
            region.attached.discard(self)
        revocations, self._revocations = self._revocations, {}
        for waiting in revocations.values():
            for freed in waiting:
                freed()

    def _notice(self, tag: bytes, payload: bytes, num_bytes: int, error: TransferError | None) -> Notice:
        return Notice(self.peer.name, self.peer.generation, tag, payload, num_bytes, error)

    def _attach(self, connection: Connection, message: Attach) -> None:
        def work() -> None:
            try:
                region = self._owner.regions.find(message.region)
                grant = self._granted(region, message, same_host=connection.takes_descriptors)
            except TransferError as error:
                connection.send(refusal(error, message.request))
            else:
                # In the reactor, where regions are also taken back: the peer hears of both in the right order.
                self._owner.soon(lambda: self._give(connection, message, region, grant))

        self._serve(connection, message.request, work)

    def _give(self, connection: Connection, message: Attach, region: Region, grant: Grant) -> None:
        try:
            region.hold.check()
        except TransferError as error:
            connection.send(refusal(error, message.request))
            return
        region.attached.add(self)
        has_fd = grant.fd >= 0
        connection.send(Attached(message.request, region.card, grant.address, has_fd, grant.offer), grant.fd)

    def _serve(self, connection: Connection, request: int, work: Callable[[], None]) -> None:
        """Off the reactor, a bounded number at once."""

        def counted() -> None:
            try:
                work()
            finally:
                self._serving.release()

        if not self._serving.acquire(blocking=False):
            connection.send(refusal(TransferError("too many requests at once"), request))
            return
        self._owner.in_background(counted)

    def _inspect(self, connection: Connection, message: Inspect) -> None:
        try:
            region = self._owner.regions.find(message.region)
        except TransferError as error:
            connection.send(refusal(error, message.request))
            return
        connection.send(Inspected(message.request, region.card))

    def _granted(self, region: Region, message: Attach, *, same_host: bool) -> Grant:
        backend = self._owner.backend(message.backend)
        if backend is None:
            raise LinkUnavailable(f"{message.backend} is not used here")
        grant = backend.grant(region, message.offer)
        if grant.fd >= 0 and not same_host:
            raise LinkUnavailable("descriptors travel only between processes of one host")
        return grant

    def _sum(self, connection: Connection, message: Sums) -> None:
        def work() -> None:
            try:
                connection.send(SumsOf(message.request, self._owner.sums(message.blocks)))
            except TransferError as error:
                connection.send(refusal(error, message.request))

        self._serve(connection, message.request, work)


def _decode(body: bytes) -> Control:
    try:
        return CONTROLS.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(str(error)) from None


def _release(remote: RemoteRegion) -> None:
    if remote.buffer is not None:
        remote.buffer.release()
    elif remote.fd >= 0:
        os.close(remote.fd)
        remote.fd = -1
