"""The port between the HTTP edge and the application.

A handler gets a complete request (body within the limit, already read) and answers through a `Responder`. Writes of
one event-loop turn are joined and leave in one send; the edge frames them (chunked, or Content-Length).
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headwater.frontend.tenants.principal import NOBODY, Principal

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(slots=True)
class HttpRequest:
    method: str
    path: str
    """Decoded path without the query."""
    query: str
    headers: Mapping[bytes, bytes]
    """Lower-case names; repeated headers joined with `, `."""
    body: bytes
    client: str
    """Address of the peer."""
    path_params: dict[str, str] = field(default_factory=dict[str, str])
    request_id: str = ""
    """The client's `x-request-id` where it is acceptable, else a fresh one; the answer carries it."""
    principal: Principal = NOBODY
    """Who asks; filled in by the application."""
    received: float = 0.0
    """Monotonic seconds when the request was complete."""
    forwarded: bool = False
    """By another frontend of this host, for a client that came back there."""


class Responder(Protocol):
    """The answer to one request. Everything is non-blocking; after a disconnect all calls are no-ops."""

    @property
    def disconnected(self) -> bool: ...

    @property
    def pending_bytes(self) -> int:
        """Bytes accepted here and not yet taken by the socket."""
        ...

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Called once, at once, when the client goes away before `finish` (or has gone already)."""
        ...

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""
        ...

    def start(self, status: int, headers: Headers) -> None:
        """Begin a streamed answer."""
        ...

    def write(self, data: bytes) -> None:
        """Queue a piece; pieces of one loop turn leave together."""
        ...

    def finish(self) -> None: ...

    def abort(self) -> None:
        """Drop the connection: the client reads too slowly, or the answer cannot be completed honestly."""
        ...


Handler = Callable[[HttpRequest, Responder], Awaitable[None] | None]
"""Plain functions run on the loop; coroutines become tasks that are cancelled when the server stops hard."""

OnAnswered = Callable[[HttpRequest, int, bool], None]
"""(request, status, complete): once per request, when the last byte was handed over or the client is gone.

Status 0 means that the client left before an answer began.
"""
