"""Answers that a client may come back for after its connection broke.

A request with the header `Last-Event-ID` (`0` at first) gets numbered events (`id: 7`). When its connection breaks the
answer goes on, for so long; the same request with the same `x-request-id` and the last number seen gets the rest, and
one that is sent twice by mistake gets the same answer; another request under an id in use gets nothing of it. What is
kept is bounded: the newest events of each answer, all answers together, and the time. Answers without the header are
not kept and end with their connection. What is not kept here may be kept by another frontend of this host
(`headwater.frontend.neighbours`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.frontend.fault_metrics import FaultMetrics
from headwater.frontend.http.base import Handler, Headers, HttpRequest, Responder
from headwater.frontend.http.exchange import call_guarded
from headwater.frontend.http.replies import Reply, error_reply, reply_for
from headwater.frontend.neighbours import NOT_KEPT, Neighbours

_HEADER = b"last-event-id"
_MAX_DIGITS = 12
_LOOK_S = 0.1
Key = tuple[str, str, str]
"""Tenant, key and request id."""


@dataclass(frozen=True, slots=True)
class ResumptionLimits:
    keep_s: float = 30.0
    """Without a connection, running or complete; 0: nothing is kept."""
    answer_bytes: int = 256 * 1024
    """The newest events of one answer."""
    total_bytes: int = 64 * 1024 * 1024
    max_answers: int = 4096


class KeptAnswer:
    """Stands between who answers and the connection of the moment. Implements `Responder`."""

    def __init__(self, owner: "Resumption", key: Key, asked: bytes) -> None:
        """`asked`: what the request asks for, as `_asked_for` says it."""
        self._owner = owner
        self._key = key
        self.asked = asked
        self._current: Responder | None = None
        self._headers: tuple[int, Headers] | None = None
        self._whole: tuple[int, Headers, bytes] | None = None
        self._events: deque[tuple[int, bytes]] = deque()
        self._num_events = 0
        self._finished = False
        self._gone = False
        self._callbacks: list[Callable[[], None]] = []
        self._expiry: asyncio.TimerHandle | None = None
        self.size = 0

    @property
    def idle(self) -> bool:
        """Whether it could be forgotten without anybody noticing now."""
        return self._current is None and (self._finished or self._whole is not None)

    # -- Responder ----------------------------------------------------------------------------------------------

    @property
    def disconnected(self) -> bool:
        return self._gone

    @property
    def pending_bytes(self) -> int:
        return self._current.pending_bytes if self._current is not None else 0

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        if self._gone:
            callback()
        else:
            self._callbacks.append(callback)

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        if self._gone:
            return
        self._whole = (status, headers, body)
        self._grow(len(body))
        self._callbacks.clear()
        if self._current is not None:
            self._current.send(status, headers, body)
            self._let_go()
        self._owner.make_room()

    def start(self, status: int, headers: Headers) -> None:
        self._headers = (status, headers)
        if self._current is not None:
            self._current.start(status, headers)

    def write(self, data: bytes) -> None:
        if self._gone:
            return
        numbered = b"".join([self._number(event) for event in data.split(b"\n\n")[:-1]])
        if self._current is not None:
            self._current.write(numbered)
        self._owner.make_room()

    def finish(self) -> None:
        self._finished = True
        self._callbacks.clear()
        if self._current is not None:
            self._current.finish()
            self._let_go()

    def abort(self) -> None:
        current = self._current
        self.expire()
        if current is not None:
            current.abort()

    # -- connections --------------------------------------------------------------------------------------------

    def attach(self, responder: Responder, after: int) -> None:
        """Send what comes after an event, and what is still to come. Raises `InvalidRequest`."""
        first = self._num_events - len(self._events)
        if not first <= after <= self._num_events:
            raise InvalidRequest(
                f"events {first + 1} to {self._num_events} of this answer are kept, what follows {after} is not",
                param="Last-Event-ID",
            )
        old, self._current = self._current, responder
        if old is not None:
            old.abort()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        responder.on_disconnect(lambda: self._detached(responder))
        if self._whole is not None:
            responder.send(*self._whole)
            self._let_go()
            return
        if self._headers is not None:
            responder.start(*self._headers)
            responder.write(b"".join([event for number, event in self._events if number > after]))
        if self._finished:
            responder.finish()
            self._let_go()

    def _let_go(self) -> None:
        """The connection has been given all there is; kept for a while all the same, as it may not arrive."""
        self._current = None
        self._expire_later()

    def expire(self) -> None:
        """Nobody came back."""
        if self._gone:
            return
        self._gone = True
        self._current = None
        if self._expiry is not None:
            self._expiry.cancel()
        self._events.clear()
        self._grow(-self.size)
        self._owner.forget(self._key)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            call_guarded(callback)

    def _detached(self, responder: Responder) -> None:
        if self._current is responder:
            self._current = None
            self._expire_later()

    def _expire_later(self) -> None:
        if self._expiry is None and not self._gone:
            self._expiry = asyncio.get_running_loop().call_later(self._owner.limits.keep_s, self.expire)

    def _number(self, event: bytes) -> bytes:
        """Comments are for the connection alone."""
        if event.startswith(b":"):
            return event + b"\n\n"
        self._num_events += 1
        numbered = b"id: %d\n%b\n\n" % (self._num_events, event)
        self._events.append((self._num_events, numbered))
        self._grow(len(numbered))
        while self.size > self._owner.limits.answer_bytes and len(self._events) > 1:
            self._grow(-len(self._events.popleft()[1]))
        return numbered

    def _grow(self, num_bytes: int) -> None:
        self.size += num_bytes
        self._owner.total_bytes += num_bytes


class Resumption:
    """All kept answers of a frontend."""

    def __init__(self, limits: ResumptionLimits, metrics: FaultMetrics, neighbours: Neighbours | None = None) -> None:
        self.limits = limits
        self._neighbours = neighbours
        self._metrics = metrics
        self._kept: dict[Key, KeptAnswer] = {}
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def around(self, handler: Handler) -> Handler:
        """The handler of an endpoint whose answers may be kept."""

        def handle(request: HttpRequest, responder: Responder) -> Awaitable[None] | None:
            if _HEADER not in request.headers or not self.limits.keep_s:
                return handler(request, responder)
            try:
                if self._attach(request, responder):
                    return None
            except HeadwaterError as error:
                reply_for(error).send_to(responder)
                return None
            if self._neighbours is not None and not request.forwarded and b"x-request-id" in request.headers:
                return self._ask_neighbours(self._neighbours, request, responder, handler)
            return self._not_kept(request, responder, handler)

        return handle

    def comes_back(self, request: HttpRequest) -> bool:
        """Whether it asks for the rest of an answer, and starts nothing."""
        given = request.headers.get(_HEADER)
        if given is None or not self.limits.keep_s:
            return False
        return request.forwarded or given.strip(b"0") != b"" or _asked_key(request) in self._kept

    async def settle(self, ends_at: float) -> None:
        """Until nobody may come back any more: no longer than answers are kept, nor beyond that time of the loop."""
        loop = asyncio.get_running_loop()
        ends_at = min(ends_at, loop.time() + self.limits.keep_s)
        while self._kept and loop.time() < ends_at:  # noqa: ASYNC110 - they end in many ways
            await asyncio.sleep(_LOOK_S)

    async def _ask_neighbours(
        self, neighbours: Neighbours, request: HttpRequest, responder: Responder, handler: Handler
    ) -> None:
        if await neighbours.relay(request, responder) or self._attach(request, responder):
            return  # the same request may have come twice while they were asked
        answering = self._not_kept(request, responder, handler)
        if answering is not None:
            await answering

    def _attach(self, request: HttpRequest, responder: Responder) -> bool:
        """To the answer that is kept here, if it is. Raises `InvalidRequest`."""
        after = _event_number(request.headers[_HEADER])
        known = self._kept.get(_asked_key(request))
        if known is None:
            return False
        if known.asked != _asked_for(request):
            raise InvalidRequest(
                "this x-request-id names the answer to another request: come back with the same path and body, or ask"
                " under an id of its own",
                param="x-request-id",
            )
        known.attach(responder, after)
        self._metrics.resumed += 1
        return True

    def _not_kept(self, request: HttpRequest, responder: Responder, handler: Handler) -> Awaitable[None] | None:
        """The first request of an answer, or one that comes too late or to the wrong frontend."""
        if request.forwarded:
            error_reply(NOT_KEPT, "not kept here", code="answer_not_kept").send_to(responder)
        elif _event_number(request.headers[_HEADER]):
            _unknown(request).send_to(responder)
        else:
            return handler(request, self._keep(request, responder))
        return None

    def forget(self, key: Key) -> None:
        self._kept.pop(key, None)

    def make_room(self) -> None:
        """Keep within the bounds: those that are complete go first, the oldest of them."""
        while self._over():
            idle = next((answer for answer in self._kept.values() if answer.idle), None)
            if idle is None:
                return
            idle.expire()

    def close(self) -> None:
        for answer in list(self._kept.values()):
            answer.expire()

    def _over(self) -> bool:
        return len(self._kept) > self.limits.max_answers or self.total_bytes > self.limits.total_bytes

    def _keep(self, request: HttpRequest, responder: Responder) -> Responder:
        self.make_room()
        if len(self._kept) >= self.limits.max_answers:
            return responder
        key = _key(request, request.request_id)
        kept = self._kept[key] = KeptAnswer(self, key, _asked_for(request))
        kept.attach(responder, 0)
        return kept


def _event_number(given: bytes) -> int:
    if not given.isdigit() or len(given) > _MAX_DIGITS:
        raise InvalidRequest(
            f"Last-Event-ID is {given[:40].decode('latin-1')!r}, expected the number of an event, 0 at first",
            param="Last-Event-ID",
        )
    return int(given)


def _asked_key(request: HttpRequest) -> Key:
    return _key(request, request.headers.get(b"x-request-id", b"").decode("latin-1"))


def _key(request: HttpRequest, request_id: str) -> Key:
    return (request.principal.tenant, request.principal.key_id, request_id)


def _asked_for(request: HttpRequest) -> bytes:
    return blake2b(b"%b\0%b" % (request.path.encode(), request.body), digest_size=16).digest()


def _unknown(request: HttpRequest) -> Reply:
    given = request.headers.get(b"x-request-id", b"").decode("latin-1")[:100]
    return error_reply(404, f"no answer with x-request-id {given!r} is kept here", code="answer_not_kept")
