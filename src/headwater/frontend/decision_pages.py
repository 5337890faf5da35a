"""`GET /debug/decisions`: the last routing decisions, or those of one request.

?request_id=ID   that request's, one per prompt, with all that is known
?limit=N         how many (default 50)
?candidates=N    how many candidates of each, the cheapest first (default 16)
"""

from urllib.parse import parse_qs

import msgspec

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.frontend.http.base import HttpRequest, Responder
from headwater.frontend.http.replies import JSON, reply_for
from headwater.frontend.routes import Route
from headwater.router.decisions import DecisionLog

_DEFAULT_LIMIT = 50
_DEFAULT_CANDIDATES = 16
_MOST = 2048
_MOST_LISTED = 20_000
"""Candidates in one answer: making it must not hold up tokens."""


class DecisionPages:
    def __init__(self, log: DecisionLog, frontend_id: str) -> None:
        self._log = log
        self._frontend_id = frontend_id

    def routes(self) -> list[Route]:
        return [Route("GET", "/debug/decisions", self._serve)]

    def _serve(self, request: HttpRequest, responder: Responder) -> None:
        try:
            document = self._document(parse_qs(request.query, keep_blank_values=True))
        except HeadwaterError as error:
            reply_for(error).send_to(responder)
            return
        responder.send(200, (JSON, (b"cache-control", b"no-store")), msgspec.json.encode(document))

    def _document(self, query: dict[str, list[str]]) -> dict[str, object]:
        candidates = _number(query, "candidates", _DEFAULT_CANDIDATES)
        limit = min(_number(query, "limit", _DEFAULT_LIMIT), max(1, _MOST_LISTED // max(1, candidates)))
        found = self._log.find(query["request_id"][-1]) if "request_id" in query else list(self._log)
        return {
            "frontend_id": self._frontend_id,
            "kept": len(self._log),
            "decisions": [record.describe(candidates) for record in found[:limit]],
        }


def _number(query: dict[str, list[str]], name: str, default: int) -> int:
    given = query.get(name)
    if given is None:
        return default
    text = given[-1]
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise InvalidRequest(f"{name} is {text[:40]!r}, expected a number from 0 to {_MOST:,}", param=name)
    return min(int(text), _MOST)
