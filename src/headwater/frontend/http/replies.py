"""Bytes of answers: status lines, the cached date, error bodies in OpenAI's shape."""

import math
import time
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from headwater.errors import (
    HeadwaterError,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    RequestError,
    Unauthorized,
    Unavailable,
)
from headwater.frontend.http.base import Headers, Responder

JSON = (b"content-type", b"application/json")

STATUS_LINES: dict[int, bytes] = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_EDGE_ERRORS: dict[int, type[HeadwaterError]] = {413: PayloadTooLarge, 429: RateLimited, 503: Overloaded}
"""What the edge refuses for the same reasons as what stands behind it."""

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def date_line(epoch: float) -> bytes:
    """`date: Thu, 01 Jan 1970 00:00:00 GMT`, whatever the locale."""
    t = time.gmtime(epoch)
    day, month = _DAYS[t.tm_wday], _MONTHS[t.tm_mon - 1]
    return (
        f"date: {day}, {t.tm_mday:02} {month} {t.tm_year:04} {t.tm_hour:02}:{t.tm_min:02}:{t.tm_sec:02} GMT\r\n"
    ).encode()


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer made before or instead of a handler's."""

    status: int
    headers: Headers
    body: bytes

    def send_to(self, responder: Responder) -> None:
        responder.send(self.status, self.headers, self.body)


def error_reply(status: int, message: str, *, code: str | None = None, param: str | None = None) -> Reply:
    """An answer in OpenAI's error shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
    return Reply(status, (JSON,), body)


def edge_reply(status: int, message: str) -> Reply:
    """The answer to a message that the edge refuses."""
    known = _EDGE_ERRORS.get(status)
    return reply_for(known(message)) if known is not None else error_reply(status, message, code="bad_request")


def reply_for(error: HeadwaterError) -> Reply:
    """The answer to a request that failed with `error`."""
    param = error.param if isinstance(error, RequestError) else None
    reply = error_reply(error.http_status, error.message, code=error.code, param=param)
    if isinstance(error, Unauthorized):
        return Reply(reply.status, (*reply.headers, (b"www-authenticate", b"Bearer")), reply.body)
    if not isinstance(error, Unavailable):
        return reply
    retry_after = b"%d" % max(1, math.ceil(error.retry_after_s))
    return Reply(reply.status, (*reply.headers, (b"retry-after", retry_after)), reply.body)
