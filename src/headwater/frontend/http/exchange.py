"""One request and its answer.

State table (`Exchange` is the `Responder` that handlers get):

    NEW        nothing said yet          send -> FINISHED, start -> STREAMING
    STREAMING  head said, body flows     write, finish -> FINISHED
    FINISHED   all said                  nothing more is accepted
    GONE       client left, or cut off   everything is a no-op

What handlers say is only gathered here; the connection takes it once per turn of the event loop.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from headwater.errors import HeadwaterError, InternalError
from headwater.frontend.http.base import Headers, HttpRequest
from headwater.frontend.http.replies import CONTINUE, Reply, reply_for, status_line

logger = logging.getLogger(__name__)

NEW, STREAMING, FINISHED, GONE = range(4)

_NO_BODY = frozenset((204, 304))


class Wire(Protocol):
    """What an exchange needs of its connection."""

    def wake(self) -> None:
        """Take what was gathered at the end of this turn."""
        ...

    def head_lines(self, request: HttpRequest) -> bytes:
        """Lines that every answer carries: date, request id, CORS."""
        ...

    def unsent_bytes(self) -> int: ...

    def cut(self) -> None:
        """Drop the connection without ceremony."""
        ...


class Exchange:
    __slots__ = (
        "_callbacks",
        "_chunked",
        "_head",
        "_http10",
        "_padded",
        "_parts",
        "_size",
        "_suppress_body",
        "_terminated",
        "_wire",
        "keep_alive",
        "refusal",
        "request",
        "state",
        "status",
    )

    def __init__(self, wire: Wire, request: HttpRequest, *, keep_alive: bool, http10: bool) -> None:
        self._wire = wire
        self.request = request
        self.keep_alive = keep_alive
        self.refusal: Reply | None = None
        """The edge's own answer, instead of a handler's."""
        self.state = NEW
        self.status = 0
        self._http10 = http10
        self._suppress_body = request.method == "HEAD"
        self._chunked = False
        self._terminated = False
        self._padded = False
        self._head = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._callbacks: list[Callable[[], None]] = []

    @property
    def disconnected(self) -> bool:
        return self.state == GONE

    @property
    def pending_bytes(self) -> int:
        return self._size + self._wire.unsent_bytes()

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        if self.state == GONE:
            callback()
        elif self.state != FINISHED:
            self._callbacks.append(callback)

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        if self.state != NEW:
            self._refuse_unless_gone("send")
            return
        self.status = status
        framing = b"" if status in _NO_BODY else b"content-length: %d\r\n" % len(body)
        self._head = self._build_head(status, headers, framing)
        if body and framing and not self._suppress_body:
            self._parts.append(body)
            self._size = len(body)
        self._finished()

    def start(self, status: int, headers: Headers) -> None:
        if self.state != NEW:
            self._refuse_unless_gone("start")
            return
        self.status = status
        self.state = STREAMING
        self._chunked = not self._http10
        if self._http10:
            self.keep_alive = False
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        self._head = self._build_head(status, headers, framing)
        self._wire.wake()

    def write(self, data: bytes) -> None:
        if self.state != STREAMING:
            self._refuse_unless_gone("write")
            return
        if self._suppress_body or not data:
            return
        self._parts.append(data)
        self._size += len(data)
        self._wire.wake()

    def finish(self) -> None:
        if self.state != STREAMING:
            self._refuse_unless_gone("finish")
            return
        self._finished()

    def abort(self) -> None:
        if self.state == GONE:
            return
        self._callbacks.clear()
        self._wire.cut()

    def fail(self, error: HeadwaterError) -> None:
        """End with an error: as an answer when none has begun, else by dropping the connection."""
        if self.state == NEW:
            reply_for(error).send_to(self)
        elif self.state == STREAMING:
            self.abort()

    def take(self) -> bytes:
        """What was gathered since the last time, framed, in one piece."""
        parts = self._parts
        self._padded = False
        if self._chunked:
            if parts:
                parts.insert(0, b"%x\r\n" % self._size)
                parts.append(b"\r\n")
            if self.state == FINISHED and not self._terminated and not self._suppress_body:
                self._terminated = True
                parts.append(b"0\r\n\r\n")
        if self._head:
            parts.insert(0, self._head)
            self._head = b""
        data = b"".join(parts)
        parts.clear()
        self._size = 0
        return data

    def probe(self) -> bytes:
        """What can be sent now without changing the answer: an interim one before the head, and after it a zero that
        leads the size of the next chunk, once. Nothing where there is no such thing."""
        if self.state == NEW and not self._http10:
            return CONTINUE
        if self.state == STREAMING and self._chunked and not (self._head or self._suppress_body or self._padded):
            self._padded = True
            return b"0"
        return b""

    def gone(self) -> None:
        """The client left or was cut off: tell those who asked, once."""
        if self.state == GONE:
            return
        self.state = GONE
        self._parts.clear()
        self._size = 0
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            call_guarded(callback)

    def _finished(self) -> None:
        self.state = FINISHED
        self._callbacks.clear()
        self._wire.wake()

    def _build_head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        lines = [status_line(status), self._wire.head_lines(self.request)]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(framing)
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif self._http10:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _refuse_unless_gone(self, what: str) -> None:
        if self.state != GONE:
            raise InternalError(f"{what}() in state {('new', 'streaming', 'finished')[self.state]} of an answer")


def call_guarded(callback: Callable[[], None]) -> None:
    """Run someone else's callback: its failure must not take the connection's own work with it."""
    try:
        callback()
    except Exception:  # border to foreign code
        logger.exception("a disconnect callback failed")
