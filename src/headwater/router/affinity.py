"""Which worker a session was last sent to, so that its next turn may go there again.

What a session has cached is in the index anyway; this adds the turns whose blocks are not known yet, and workers that
tell nothing. Bounded: the least recently used sessions are forgotten first, and each after its time to live. A client
that says when its next turn will come (`keep_s`) extends that.
"""

from collections import OrderedDict
from typing import Literal

Stickiness = Literal["off", "soft", "hard"]
"""soft: the session's worker is its home, a small discount; hard: it goes there while the worker takes requests."""

_MAX_KEEP_S = 3600.0


class SessionAffinity:
    def __init__(self, stickiness: Stickiness = "soft", ttl_s: float = 300.0, max_sessions: int = 100_000) -> None:
        self.stickiness: Stickiness = stickiness
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def worker_of(self, session_id: str, now: float) -> str | None:
        found = self._sessions.get(session_id)
        if found is None:
            return None
        worker_id, until = found
        if now >= until:
            del self._sessions[session_id]
            return None
        return worker_id

    def bind(self, session_id: str, worker_id: str, now: float, keep_s: float = 0.0) -> None:
        """The session was sent to a worker; its next turn is expected within `keep_s`, if that is longer than usual."""
        if self.stickiness == "off":
            return
        self._sessions[session_id] = (worker_id, now + max(self._ttl_s, min(keep_s, _MAX_KEEP_S)))
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
