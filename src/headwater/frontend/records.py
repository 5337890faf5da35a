"""What is known of each HTTP request while it is open: for the log line, the metrics and whoever debugs.

The application opens a record when a request begins and takes it back when the answer is over; the dispatcher fills
it in between. Both find it by the request id, which is made unique among the open ones.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from headwater.frontend.http.base import HttpRequest
from headwater.frontend.tenants.meter import Visit

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_NO_TRACE = b"0" * 32


@dataclass(slots=True)
class RequestRecord:
    request_id: str
    route: str
    received: float
    """Monotonic seconds, as are all times here."""
    trace_id: str = ""
    generates: bool = False
    tenant: str = ""
    """Whom it is done for."""
    key_id: str = ""
    kv_group: str = ""
    kv_share: float = 1.0
    visit: Visit | None = None
    """Its part of the tenant's account, if it generates."""
    num_sequences: int = 0
    model: str = ""
    worker_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float = 0.0
    error_code: str = ""
    """Of the first sequence that failed; the status may be 200 when the answer had begun."""
    open_sequences: int = 0
    """They may go on after the connection is gone, for a client that comes back."""
    on_idle: Callable[[], None] | None = None

    def when_idle(self, act: Callable[[], None]) -> None:
        """Now, or when the last sequence has ended."""
        if self.open_sequences:
            self.on_idle = act
        else:
            act()

    def sequence_ended(self) -> None:
        """After all about it was filled in."""
        if not self.open_sequences and self.on_idle is not None:
            act, self.on_idle = self.on_idle, None
            act()


class OpenRequests:
    """Records by request id."""

    def __init__(self) -> None:
        self._open: dict[str, RequestRecord] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, request: HttpRequest, route: str) -> RequestRecord:
        """Open a record; a request id that is in use gets a suffix."""
        request_id = request.request_id
        number = 2
        while request_id in self._open:
            request_id = f"{request.request_id}~{number}"
            number += 1
        request.request_id = request_id
        record = self._open[request_id] = RequestRecord(request_id, route, request.received)
        given = request.headers.get(b"traceparent")
        if given is not None:
            record.trace_id = trace_id(given)
        return record

    def get(self, request_id: str) -> RequestRecord | None:
        return self._open.get(request_id)

    def end(self, request_id: str) -> RequestRecord | None:
        return self._open.pop(request_id, None)


def trace_id(traceparent: bytes) -> str:
    """The trace id of a W3C traceparent header, empty when it is not a valid one."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or match[1] == _NO_TRACE or traceparent.startswith(b"ff"):
        return ""
    return match[1].decode("ascii")
