"""Bytes into complete requests, each within its limits.

A thin owner of the `httptools` parser (llhttp in its strict form: no folded lines, no bare CR or LF, no odd chunk
sizes). What the parser lets through is checked by `headwater.frontend.http.head`. A refusal is raised out of `feed`
as `BadHead`; the reader is of no use after it.

Offers to upgrade are ignored, as the specification allows. The parser takes such a message to end with its head and
would leave its body to be read as the next request; so the body is read by a fresh parser that is told the framing.

Phases: IDLE between messages, HEAD once a head has begun, BODY from the end of the head to the end of the message.
"""

from collections.abc import Callable

import httptools

from headwater.frontend.http.base import HttpRequest
from headwater.frontend.http.head import (
    SINGLE_HEADERS,
    BadHead,
    check_coding,
    check_framing,
    check_host,
    quoted,
    split_target,
)
from headwater.frontend.http.limits import HttpLimits

IDLE, HEAD, BODY = range(3)

_FREE_OVERHEAD_BYTES = 64 * 1024
_MAX_OVERHEAD_BYTES = 2 * 1024 * 1024

OnRequest = Callable[[HttpRequest, bool, bool], None]
"""(request, keep alive, spoken in HTTP/1.0). May raise `BadHead`."""


def _ignore(_request: HttpRequest, _keep_alive: bool, _http10: bool) -> None:
    """After `close`."""


class RequestReader:
    __slots__ = (
        "_body",
        "_body_follows",
        "_head_bytes",
        "_headers",
        "_http10",
        "_length",
        "_limits",
        "_method",
        "_on_request",
        "_parser",
        "_path",
        "_query",
        "_raw_bytes",
        "_refusal",
        "_target",
        "body_bytes",
        "expects_continue",
        "messages",
        "phase",
    )

    def __init__(self, limits: HttpLimits, on_request: OnRequest) -> None:
        self._limits = limits
        self._on_request = on_request
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: BadHead | None = None
        self._raw_bytes = 0
        self._body_follows = False
        """The head of an upgrade request has been read, its body not."""
        self.messages = 0
        """Messages begun so far."""
        self._clear()

    def feed(self, data: bytes) -> None:
        """Parse; calls `on_request` for every message completed. Raises `BadHead`."""
        self._raw_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            refusal = self._refusal or BadHead(400, f"this is not proper HTTP/1.1: {error}")
            raise refusal from None
        if self.phase != BODY:
            if self._raw_bytes > self._limits.max_head_bytes + len(data):
                raise BadHead(431, f"the head is longer than {self._limits.max_head_bytes} bytes")
        elif self._raw_bytes - self.body_bytes > _FREE_OVERHEAD_BYTES + min(8 * self.body_bytes, _MAX_OVERHEAD_BYTES):
            raise BadHead(400, "the body is sent with too much chunk framing or too many trailers")

    def close(self) -> None:
        """Let go of the connection and the parser, which hold this reader."""
        self._on_request = _ignore
        del self._parser

    def unfinished(self) -> HttpRequest:
        """What is known of the message that is being read: for logs and refusals."""
        return HttpRequest(self._method or "-", self._path or "-", "", self._headers, b"", "")

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self._body_follows:
                    self._restart_at_body()

    def _restart_at_body(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        framing = b"transfer-encoding: chunked" if self._length < 0 else b"content-length: %d" % self._length
        keep_alive = b"close" not in self._headers.get(b"connection", b"").lower()
        connection = b"keep-alive" if keep_alive else b"close"
        version = b"1.0" if self._http10 else b"1.1"
        self._parser.feed_data(b"POST / HTTP/%b\r\n%b\r\nconnection: %b\r\n\r\n" % (version, framing, connection))
        self._body_follows = False

    def _refuse(self, status: int, message: str) -> BadHead:
        """The parser replaces exceptions of its callbacks; keep ours."""
        self._refusal = BadHead(status, message)
        return self._refusal

    def _clear(self) -> None:
        self.phase = IDLE
        self._method = ""
        self._target = b""
        self._path = ""
        self._query = ""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._http10 = False
        self._length = 0
        self._body: list[bytes] = []
        self.body_bytes = 0
        self.expects_continue = False

    # -- parser callbacks ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._body_follows:
            return
        self.messages += 1
        self.phase = HEAD

    def on_url(self, piece: bytes) -> None:
        if self._body_follows:
            return
        self._target += piece
        if len(self._target) > self._limits.max_target_bytes:
            raise self._refuse(414, f"the request target is longer than {self._limits.max_target_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase != HEAD:
            return  # a trailer: counted with the chunk framing, and not believed
        headers, limits = self._headers, self._limits
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > limits.max_head_bytes or len(headers) >= limits.max_headers:
            raise self._refuse(
                431,
                f"the head is too large: at most {limits.max_headers} headers of {limits.max_head_bytes} bytes in all",
            )
        name = name.lower()
        if name not in headers:
            headers[name] = value
        elif name in SINGLE_HEADERS:
            raise self._refuse(400, f"the header {name.decode('latin-1')} is repeated, expected once")
        else:
            headers[name] += b", " + value

    def on_headers_complete(self) -> None:
        if self._body_follows:
            return
        version = self._parser.get_http_version()
        self._http10 = version == "1.0"
        self._method = self._parser.get_method().decode("ascii")
        self.phase = BODY
        try:
            self._check_head(version)
        except BadHead as refusal:
            self._refusal = refusal
            raise

    def _check_head(self, version: str) -> None:
        headers = self._headers
        length = self._length = check_framing(version, headers)
        check_host(version, headers)
        check_coding(headers)
        if self._method == "CONNECT":
            raise BadHead(405, "this is not a proxy")
        self._path, self._query = split_target(self._method, self._target, headers.get(b"host"))
        if length > self._limits.max_body_bytes:
            raise BadHead(413, f"the body has {length} bytes; at most {self._limits.max_body_bytes} are accepted")
        expect = headers.get(b"expect")
        if expect is not None and version == "1.1":
            if expect.lower() != b"100-continue":
                raise BadHead(417, f"expect is {quoted(expect)}, expected 100-continue")
            self.expects_continue = True

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)
        self.body_bytes += len(piece)
        self.expects_continue = False
        if self.body_bytes > self._limits.max_body_bytes:
            limit = self._limits.max_body_bytes
            raise self._refuse(413, f"the body is longer than the {limit} bytes that are accepted")

    def on_message_complete(self) -> None:
        if self._length and self._parser.should_upgrade():
            self._body_follows = True
            return
        body = self._body
        request = HttpRequest(
            method=self._method,
            path=self._path,
            query=self._query,
            headers=self._headers,
            body=body[0] if len(body) == 1 else b"".join(body),
            client="",
        )
        http10 = self._http10
        self._clear()
        self._raw_bytes = 0
        try:
            self._on_request(request, self._parser.should_keep_alive(), http10)
        except BadHead as refusal:
            self._refusal = refusal
            raise
