"""API keys: `Authorization: Bearer KEY`, compared in constant time.

Without configured keys everybody may ask. With keys, all routes want one except health, liveness, readiness, version
and the documentation pages; `/metrics` wants one too, since it names models and tells the load.
"""

import hashlib
import hmac
from collections.abc import Sequence

from headwater.errors import Unauthorized
from headwater.frontend.http.base import HttpRequest


class ApiKeys:
    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, request: HttpRequest) -> str:
        """The name of the key, `key-1` for the first one; empty when none is asked for. Raises `Unauthorized`."""
        if not self._digests:
            return ""
        scheme, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        if not given or scheme.lower() != b"bearer":
            raise Unauthorized("no API key was given; send it as `Authorization: Bearer KEY`")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise Unauthorized("the API key is not one of those that are accepted")
        return f"key-{matches.index(True) + 1}"


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing tells nothing."""
    return hashlib.sha256(key).digest()
