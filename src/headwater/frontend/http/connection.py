"""One client connection: bytes in, exchanges in order, bytes out.

Requests are answered in the order they came; one runs at a time, a bounded number wait. Reading goes on while one
runs, so that a vanished client is noticed at once; one that has only stopped sending is told from it by
`headwater.frontend.http.half_closed`. After a refusal, or a request that closes the connection, input is thrown away.
Invariants: what is gathered for a client that does not read is bounded by `stream_buffer_bytes`, and every state in
which the client owes something has a deadline.

    read deadline     nothing running, between messages   keep-alive (at first: header) timeout
                      a head is arriving                  header timeout, from its first byte
                      a body is arriving                  body timeout, renewed while it moves fast enough
                      refused, answer handed over         linger timeout
    write deadline    the transport's buffer is full      write timeout, renewed while the client takes something
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

from headwater.frontend.http.base import HttpRequest
from headwater.frontend.http.exchange import FINISHED, STREAMING, Exchange
from headwater.frontend.http.half_closed import HalfClosed
from headwater.frontend.http.head import BadHead
from headwater.frontend.http.reader import BODY, HEAD, IDLE, RequestReader
from headwater.frontend.http.replies import CONTINUE, edge_reply

if TYPE_CHECKING:
    from headwater.frontend.http.server import HttpServer

_WRITE_HIGH_WATER = 64 * 1024
_NEVER = float("inf")


class Connection(asyncio.Protocol):
    __slots__ = (
        "_active",
        "_client",
        "_deaf",
        "_dirty",
        "_discarded_bytes",
        "_half_closed",
        "_held_bytes",
        "_message",
        "_read_paused",
        "_reader",
        "_refused",
        "_server",
        "_stalled_bytes",
        "_transport",
        "_waiting",
        "_waiting_bytes",
        "_window_bytes",
        "_write_paused",
        "read_deadline",
        "write_deadline",
    )

    _transport: asyncio.Transport

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._client = ""
        self._reader = RequestReader(server.limits, self._on_request)
        self._active: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._waiting_bytes = 0
        self._held_bytes = 0
        """Of a body that is not complete."""
        self._message = 0
        self._window_bytes = 0
        """Bytes of the present body that had come when its deadline was last renewed."""
        self._discarded_bytes = 0
        self._stalled_bytes = 0
        self._deaf = False
        self._refused = False
        self._dirty = False
        self._half_closed: HalfClosed | None = None
        self._read_paused = False
        self._write_paused = False
        self.read_deadline = server.now + server.limits.header_timeout_s
        self.write_deadline = _NEVER

    # -- transport callbacks ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_WRITE_HIGH_WATER)
        peer = transport.get_extra_info("peername")
        self._client = peer[0] if isinstance(peer, tuple) else ""
        verdict = self._server.admit(self)
        if verdict is not None:
            self._refuse(verdict)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        if self._half_closed is not None:
            self._half_closed.close()
        self._hold(0)
        self._server.forget(self)
        self._lose_exchanges()
        self._reader.close()

    def eof_received(self) -> bool:
        """The client sends nothing more: what it has asked for in whole is answered, as long as it stays. With TLS the
        library closes both sides at once."""
        last = self._waiting[-1] if self._waiting else self._active
        if last is None or self._transport.get_extra_info("ssl_object") is not None:
            if last is not None:
                self._transport.abort()
            self._lose_exchanges()
            return False
        self._deaf = True
        last.keep_alive = False
        self.read_deadline = _NEVER
        self._hold(0)
        self._half_closed = HalfClosed(self._transport, self._probe, self.cut)
        return True

    def _probe(self) -> bytes:
        """While the buffer is full there is enough on its way."""
        return self._active.probe() if self._active is not None and not self._write_paused else b""

    def pause_writing(self) -> None:
        self._write_paused = True
        self._stalled_bytes = self._transport.get_write_buffer_size()
        self.write_deadline = self._server.now + self._server.limits.write_timeout_s

    def resume_writing(self) -> None:
        self._write_paused = False
        self.write_deadline = _NEVER
        self.flush()
        self._advance()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._discard(len(data))
            return
        try:
            self._reader.feed(data)
            self._after_read()
        except BadHead as refusal:
            if not self._deaf:  # else: data after a request that closes the connection
                self._refuse(refusal)
        self._advance()

    # -- what exchanges and the server ask ----------------------------------------------------------------------

    def wake(self) -> None:
        if not self._dirty:
            self._dirty = True
            self._server.wake(self)

    def head_lines(self, request: HttpRequest) -> bytes:
        return self._server.head_lines(request)

    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def cut(self) -> None:
        """Drop the connection; whoever waits for it hears of it now."""
        self._transport.abort()
        self._lose_exchanges()

    def flush(self) -> None:
        """Hand over what the running exchange has gathered; once per turn of the loop."""
        self._dirty = False
        exchange = self._active
        if exchange is None:
            return
        if self._write_paused:
            if exchange.state == STREAMING and exchange.pending_bytes > self._server.limits.stream_buffer_bytes:
                self._server.log_cut(exchange.request, "the client reads too slowly")
                self.cut()
            return
        data = exchange.take()
        if data:
            self._transport.write(data)
        if exchange.state == FINISHED:
            self._complete(exchange)

    def drain(self) -> None:
        """Close as soon as nothing is owed; the next answer says so. What is on its way is still answered."""
        last = self._waiting[-1] if self._waiting else self._active
        if last is not None:
            self._deaf = True
            last.keep_alive = False
        elif self._reader.phase == IDLE:
            self.read_deadline = min(self.read_deadline, self._server.now + self._server.limits.drain_idle_s)

    def on_tick(self, now: float) -> None:
        """Look at the deadlines."""
        if now >= self.write_deadline:
            self._on_write_deadline(now)
        elif now >= self.read_deadline:
            self._on_read_deadline(now)

    # -- reading ------------------------------------------------------------------------------------------------

    def _on_request(self, request: HttpRequest, keep_alive: bool, http10: bool) -> None:
        limit = self._server.limits.max_pipelined
        if len(self._waiting) >= limit:
            raise BadHead(429, f"more than {limit} requests are pipelined")
        request.client = self._client
        self._server.name(request)
        self._waiting.append(Exchange(self, request, keep_alive=keep_alive, http10=http10))
        self._waiting_bytes += len(request.body)
        if not keep_alive:
            self._deaf = True

    def _after_read(self) -> None:
        """Set the deadline for what is still missing, and hold back a client that is ahead of us."""
        reader, server = self._reader, self._server
        limits = server.limits
        if reader.messages != self._message:
            self._message = reader.messages
            self._window_bytes = -1
            self.read_deadline = server.now + limits.header_timeout_s if reader.phase == HEAD else _NEVER
        if reader.phase == BODY:
            if self._window_bytes < 0:
                self._window_bytes = 0
                self.read_deadline = server.now + limits.body_timeout_s
            self._continue()
            self._hold(reader.body_bytes)
        elif reader.phase == IDLE:
            if self._waiting:
                self.read_deadline = _NEVER
            self._hold(0)
        if not self._read_paused and self._is_ahead():
            self._read_paused = True
            self.read_deadline = _NEVER
            self._transport.pause_reading()

    def _is_ahead(self) -> bool:
        limits = self._server.limits
        return len(self._waiting) >= limits.max_pipelined or self._waiting_bytes > limits.max_body_bytes

    def _continue(self) -> None:
        """Ask for the body that the client holds back, when it is its turn."""
        if self._reader.expects_continue and self._active is None and not self._waiting:
            self._reader.expects_continue = False
            self._transport.write(CONTINUE)

    def _hold(self, body_bytes: int) -> None:
        """Account for a body that is not complete."""
        added = body_bytes - self._held_bytes
        if added == 0:
            return
        self._held_bytes = body_bytes
        if not self._server.hold(added):
            raise BadHead(503, "too many requests are being received at once")

    def _discard(self, arrived: int) -> None:
        self._discarded_bytes += arrived
        if self._discarded_bytes > 4 * self._server.limits.max_body_bytes:
            self.cut()

    def _refuse(self, refusal: BadHead) -> None:
        """Answer in turn, and end the connection."""
        self._deaf = True
        self._refused = True
        self.read_deadline = _NEVER
        self._hold(0)
        request = self._reader.unfinished()
        request.client = self._client
        self._server.name(request)
        exchange = Exchange(self, request, keep_alive=False, http10=False)
        exchange.refusal = edge_reply(refusal.status, refusal.message)
        self._waiting.append(exchange)
        self._advance()

    # -- running and writing ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin the next exchange if there is one and it is its turn."""
        if self._active is not None or not self._waiting or self._write_paused or self._transport.is_closing():
            return
        exchange = self._active = self._waiting.popleft()
        self._waiting_bytes -= len(exchange.request.body)
        if self._read_paused and not self._is_ahead():
            self._read_on()
        self._server.run(exchange)

    def _read_on(self) -> None:
        self._read_paused = False
        self._transport.resume_reading()
        if self._reader.phase != IDLE and not self._deaf:
            self._window_bytes = self._reader.body_bytes
            self.read_deadline = self._server.now + self._server.limits.body_timeout_s

    def _complete(self, exchange: Exchange) -> None:
        self._active = None
        self._server.answered(exchange, complete=True)
        if not exchange.keep_alive:
            self._close_politely()
        elif self._waiting:
            self._advance()
        elif self._reader.phase == IDLE:
            self.read_deadline = self._server.now + self._server.limits.keepalive_timeout_s
        else:
            self._continue()

    def _close_politely(self) -> None:
        """Close; after a refusal only when the client had time to read why, because unread input resets it."""
        if not self._refused or self._half_closed is not None:
            self._transport.close()
            return
        self.read_deadline = self._server.now + self._server.limits.linger_timeout_s
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _lose_exchanges(self) -> None:
        lost = [self._active, *self._waiting] if self._active is not None else list(self._waiting)
        self._active = None
        self._waiting.clear()
        for exchange in lost:
            exchange.gone()
            self._server.answered(exchange, complete=False)

    # -- deadlines ----------------------------------------------------------------------------------------------

    def _on_write_deadline(self, now: float) -> None:
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._stalled_bytes:
            self._stalled_bytes = unsent
            self.write_deadline = now + self._server.limits.write_timeout_s
            return
        if self._active is not None:
            self._server.log_cut(self._active.request, "the client stopped reading")
        self.cut()

    def _on_read_deadline(self, now: float) -> None:
        limits = self._server.limits
        reader = self._reader
        if self._deaf:
            self._transport.abort()
        elif reader.phase == IDLE:
            self._transport.close()
        elif reader.phase == HEAD:
            self._refuse(BadHead(408, f"the head did not arrive within {limits.header_timeout_s:g} s"))
        elif reader.expects_continue or self._body_moves():
            self._window_bytes = reader.body_bytes
            self.read_deadline = now + limits.body_timeout_s
        else:
            self._refuse(BadHead(408, f"the body did not move on within {limits.body_timeout_s:g} s"))

    def _body_moves(self) -> bool:
        limits = self._server.limits
        needed = limits.min_body_bytes_per_s * limits.body_timeout_s
        return self._reader.body_bytes - self._window_bytes >= needed
