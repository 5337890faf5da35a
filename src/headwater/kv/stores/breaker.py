"""A circuit breaker: stops asking what keeps failing, and lets single trials find out when it works again.

    closed ── `threshold` failures in a row, or a hopeless one ──> open ── pause over ──> trial ──> closed | open

Pauses double up to a bound and are jittered, so that many nodes do not come back at one instant. Pure: time and chance
are given.
"""

from collections.abc import Callable

from headwater.clock import Clock


class Breaker:
    """See the module docstring."""

    def __init__(
        self,
        clock: Clock,
        chance: Callable[[], float],
        *,
        threshold: int = 4,
        pause_s: float = 1.0,
        most_pause_s: float = 60.0,
    ) -> None:
        """`chance` draws from [0, 1)."""
        self._clock = clock
        self._chance = chance
        self._threshold = threshold
        self._first_pause_s = pause_s
        self._most_pause_s = most_pause_s
        self._failures = 0
        self._next_pause_s = pause_s
        self._open_until: float | None = None
        self._trying = False
        self.reason = ""
        """Of the last failure."""
        self.num_openings = 0

    @property
    def closed(self) -> bool:
        return self._open_until is None

    def allow(self) -> bool:
        """Whether to ask now. While it is open one caller at a time is let through after the pause: it must report."""
        if self._open_until is None:
            return True
        if self._trying or self._clock.now() < self._open_until:
            return False
        self._trying = True
        return True

    def retry_after_s(self) -> float:
        if self._open_until is None:
            return 0.0
        return max(0.0, self._open_until - self._clock.now())

    def succeed(self) -> None:
        self._failures = 0
        self._next_pause_s = self._first_pause_s
        self._open_until = None
        self._trying = False

    def fail(self, reason: str, *, hopeless: bool = False) -> bool:
        """Whether this opened it. `hopeless`: the same again would fail the same way (credentials, a wrong name)."""
        self.reason = reason
        self._failures += 1
        trial, self._trying = self._trying, False
        if not (trial or hopeless or self._failures >= self._threshold):
            return False
        if self._open_until is not None and not trial:
            return False
        opened = self._open_until is None
        if hopeless:
            self._next_pause_s = max(self._next_pause_s, self._most_pause_s / 4)
        self._open_until = self._clock.now() + self._next_pause_s * (0.5 + self._chance() / 2)
        self._next_pause_s = min(self._next_pause_s * 2, self._most_pause_s)
        self.num_openings += opened
        return opened

    def abandon(self) -> None:
        """A trial was called off before it could tell."""
        self._trying = False
