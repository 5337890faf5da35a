"""What a request head may look like, beyond what the parser already refuses.

Invariants: a head that passes has one reading only. Version 1.0 or 1.1; exactly one valid Host in 1.1; a body framed
by either one Content-Length or exactly `chunked`; a target in origin form (absolute form only if it agrees with
Host, `*` only for OPTIONS). Everything else raises `BadHead` and ends the connection, because the place where the
next message begins can no longer be trusted.
"""

import itertools
import json
import re
import secrets
from urllib.parse import unquote_to_bytes

_HOST = re.compile(rb"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(?::[0-9]{0,5})?")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_SHOWN_BYTES = 60
_CONTROL = re.compile("[\x00-\x1f\x7f]")

SINGLE_HEADERS = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization", b"expect", b"x-request-id")
)
"""Headers that may not be repeated: two values would be two readings."""


class BadHead(Exception):
    """The message is refused with `status`; the connection is closed after the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def quoted(value: bytes) -> str:
    """What a client has sent, cut to a length fit for a message."""
    text = json.dumps(value[:_SHOWN_BYTES].decode("latin-1"))
    return text if len(value) <= _SHOWN_BYTES else f'{text[:-1]}…" ({len(value):,} bytes)'


def check_framing(version: str, headers: dict[bytes, bytes]) -> int:
    """The length of the body in bytes; -1 when it is chunked."""
    if version not in ("1.1", "1.0"):
        raise BadHead(505, f"HTTP/{version} is not spoken here; use HTTP/1.1")
    encoding = headers.get(b"transfer-encoding")
    length = headers.get(b"content-length")
    if encoding is None:
        if length is None:
            return 0
        if not length.isdigit():
            raise BadHead(400, f"content-length is {quoted(length)}, expected a number of bytes")
        return int(length)
    if length is not None:
        raise BadHead(400, "both content-length and transfer-encoding are given, expected one of them")
    if version == "1.0":
        raise BadHead(400, "transfer-encoding is not known to HTTP/1.0, expected content-length")
    if encoding.lower() != b"chunked":
        raise BadHead(501, f"transfer-encoding is {quoted(encoding)}, expected chunked")
    return -1


def check_coding(headers: dict[bytes, bytes]) -> None:
    """Compressed bodies are not taken: a small one could unfold to anything."""
    coding = headers.get(b"content-encoding")
    if coding is not None and coding.lower() not in (b"", b"identity"):
        raise BadHead(415, f"content-encoding is {quoted(coding)}, expected a plain body")


def check_host(version: str, headers: dict[bytes, bytes]) -> None:
    host = headers.get(b"host")
    if host is None:
        if version == "1.1":
            raise BadHead(400, "the host header is missing")
        return
    if host and not _HOST.fullmatch(host):
        raise BadHead(400, f"the host header is {quoted(host)}, expected a host name with an optional port")


def split_target(method: str, target: bytes, host: bytes | None) -> tuple[str, str]:
    """Decoded path and raw query."""
    if not target.startswith(b"/"):
        if target == b"*" and method == "OPTIONS":
            return "*", ""
        target = _origin_form(target, host)
    target = target.partition(b"#")[0]
    path, _, query = target.partition(b"?")
    if b"%" not in path:
        return path.decode("ascii", "replace"), query.decode("ascii", "replace")
    try:
        decoded = unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        raise BadHead(400, "the path is not UTF-8") from None
    if _CONTROL.search(decoded):
        raise BadHead(400, "the path holds control characters")
    return decoded, query.decode("ascii", "replace")


def _origin_form(target: bytes, host: bytes | None) -> bytes:
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise BadHead(400, f"the request target is {quoted(target)}, expected one that begins with /")
    if host is None or match[1].lower() != host.lower():
        other = "missing" if host is None else quoted(host)
        raise BadHead(400, f"the request target names the host {quoted(match[1])}, the host header is {other}")
    return match[2] if match[2].startswith(b"/") else b"/" + match[2]


class RequestIds:
    """Unique names for requests: random per process, counted within it."""

    def __init__(self) -> None:
        self._prefix = f"req-{secrets.token_hex(8)}-"
        self._numbers = itertools.count(1)

    def accept(self, given: bytes | None) -> str:
        """The client's own id if it is fit for logs and headers, else a fresh one."""
        if given is not None and _REQUEST_ID.fullmatch(given):
            return given.decode("ascii")
        return f"{self._prefix}{next(self._numbers):x}"
