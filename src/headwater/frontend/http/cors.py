"""Cross-origin requests from browsers: which origins may, and what they are told."""

import re
from collections.abc import Mapping

from headwater.frontend.http.base import Headers

_HEADER_LIST = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")


class Cors:
    """Answers for the allowed origins; `*` allows any."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, origin: bytes) -> bytes:
        """Header lines for an answer to `origin`; empty when it is not allowed."""
        if self._any:
            return b"access-control-allow-origin: *\r\naccess-control-expose-headers: x-request-id\r\n"
        if origin not in self._origins:
            return b"vary: origin\r\n"
        return (
            b"access-control-allow-origin: %b\r\nvary: origin\r\naccess-control-expose-headers: x-request-id\r\n"
            % origin
        )

    def preflight(self, headers: Mapping[bytes, bytes]) -> Headers:
        """Headers that answer a preflight request."""
        wanted = headers.get(b"access-control-request-headers", b"")
        allowed = wanted if _HEADER_LIST.fullmatch(wanted) else b"authorization, content-type"
        return (
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", allowed),
            (b"access-control-max-age", b"600"),
        )
