"""A non-blocking socket that carries frames, and file descriptors between processes of one host."""

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from headwater.errors import PeerLost, ProtocolError, TransferError
from headwater.transfer.reactor import READ, WRITE, Reactor
from headwater.transfer.sealing import Opener, SealedSocket, Sealer, StreamSocket
from headwater.transfer.wire import MAX_FRAME_BYTES, Message, frame, length_of

_READ_BYTES = 256 << 10
_MAX_QUEUED_BYTES = 16 << 20
_MAX_FDS = 8


class Handler(Protocol):
    """Who the frames are for. Called in the reactor."""

    def on_frame(self, connection: "Connection", body: bytes) -> None:
        """May raise `ProtocolError` or `TransferError`: the connection is then broken off."""

    def on_broken(self, connection: "Connection", error: TransferError) -> None:
        """Called once, unless we closed it."""


class Connection:
    """`send`, `is_up` and `close` from any thread; all else in the reactor."""

    def __init__(self, reactor: Reactor, sock: socket.socket, handler: Handler, *, now: Callable[[], float]) -> None:
        sock.setblocking(False)
        self.handler = handler
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.takes_descriptors = False
        self.last_heard = self.last_sent = now()
        self.closed = False
        self.family = sock.family
        self._now = now
        self._reactor = reactor
        self._sock = sock
        self._lock = threading.Lock()
        self._hang_up = select.poll()
        self._hang_up.register(sock, select.POLLRDHUP)
        self._queue: deque[tuple[memoryview, int]] = deque()
        self._queued_bytes = 0
        self._received = bytearray()
        self._sealing: tuple[Sealer, Opener] | None = None
        self._fds: deque[int] = deque()

    def open(self) -> None:
        self._reactor.watch(self._sock, READ, self._on_events)

    def send(self, message: Message, fd: int = -1) -> None:
        """Never blocks. What goes to a closed connection is dropped: its handler was told."""
        plain = frame(message)
        with self._lock:
            if self.closed:
                return
            data = memoryview(plain if self._sealing is None else self._sealing[0].seal_all(plain))
            self.last_sent = self._now()
            self._queue.append((data, os.dup(fd) if fd >= 0 else -1))
            self._queued_bytes += len(data)
            if len(self._queue) == 1:
                self._flush()
            if self._queue:
                self._reactor.call(self._rewatch)
            overflow = self._queued_bytes > _MAX_QUEUED_BYTES
        if overflow:
            self._reactor.call(lambda: self._break(PeerLost("the peer does not read what it is sent")))

    def is_up(self) -> bool:
        """False as soon as the other side ended it, before the reactor has seen that."""
        with self._lock:
            return not self.closed and not self._hang_up.poll(0)

    def seal(self, sealer: Sealer, opener: Opener) -> None:
        """From now on, in both directions. In the reactor, or before `open`."""
        if self._received:
            raise ProtocolError("more came than was asked for")
        with self._lock:
            self._sealing = sealer, opener

    def take_descriptor(self) -> int:
        """The next that came; the caller owns it."""
        if not self._fds:
            raise ProtocolError("a descriptor was announced and none came")
        return self._fds.popleft()

    def detach(self) -> StreamSocket:
        """Give the socket up, for blocking use by a thread."""
        if self._received or self._queue or (self._sealing is not None and not self._sealing[1].is_empty):
            raise ProtocolError("more came than was asked for")
        with self._lock:
            self.closed = True
        self._reactor.unwatch(self._sock)
        return self._sock if self._sealing is None else SealedSocket(self._sock, *self._sealing)

    def close(self) -> None:
        """Idempotent, from any thread."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if not self._reactor.call(self._finish):
            self._finish()

    def break_off(self, error: TransferError) -> None:
        self._break(error)

    def _finish(self) -> None:
        self._reactor.unwatch(self._sock)
        self._sock.close()
        for fd in [*self._fds, *(fd for _, fd in self._queue if fd >= 0)]:
            os.close(fd)
        self._fds.clear()
        self._queue.clear()

    def _break(self, error: TransferError) -> None:
        if not self.closed:
            self.close()
            self.handler.on_broken(self, error)

    def _on_events(self, events: int) -> None:
        try:
            if events & WRITE:
                with self._lock:
                    self._flush()
                self._rewatch()
            if events & READ and not self.closed:
                self._read()
        except OSError as error:
            self._break(PeerLost(f"the connection broke: {error.strerror or error}"))
        except ProtocolError as error:
            self._break(PeerLost(f"the peer broke the protocol: {error}"))
        except TransferError as error:
            self._break(error)

    def _rewatch(self) -> None:
        if not self.closed:
            self._reactor.change(self._sock, READ | WRITE if self._queue else READ, self._on_events)

    def _flush(self) -> None:
        """With the lock held. A broken socket is left to the reader, which sees it too."""
        try:
            while self._queue:
                data, fd = self._queue[0]
                sent = socket.send_fds(self._sock, [data], [fd]) if fd >= 0 else self._sock.send(data)
                if fd >= 0:
                    os.close(fd)
                self._queued_bytes -= sent
                if sent < len(data):
                    self._queue[0] = (data[sent:], -1)
                    return
                self._queue.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._queue.clear()
            self._queued_bytes = 0

    def _read(self) -> None:
        data = self._receive()
        if data is None:
            return
        if not data:
            raise PeerLost("the peer closed the connection")
        self.last_heard = self._now()
        self._take(data)
        while len(self._received) >= 4 and not self.closed:
            length = length_of(self._received[:4], self.max_frame_bytes)
            if len(self._received) < 4 + length:
                return
            body = bytes(memoryview(self._received)[4 : 4 + length])
            del self._received[: 4 + length]
            self.handler.on_frame(self, body)

    def _take(self, data: bytes) -> None:
        if self._sealing is None:
            self._received += data
            return
        for plain in self._sealing[1].open_all(data):
            self._received += plain

    def _receive(self) -> bytes | None:
        with contextlib.suppress(BlockingIOError):
            if not self.takes_descriptors:
                return self._sock.recv(_READ_BYTES)
            data, fds, flags, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
            self._fds.extend(fds)
            if flags & socket.MSG_CTRUNC or len(self._fds) > _MAX_FDS:
                raise ProtocolError("too many descriptors")
            return data
        return None
