"""Time as a dependency. Pure cores never ask the operating system what time it is.

`now()` is monotonic seconds with an arbitrary zero: for durations and deadlines inside a process.
`epoch()` is seconds since 1970: for anything that leaves the process.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float: ...

    def epoch(self) -> float: ...


class RealClock:
    """The operating system's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def epoch(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves only when told to. `now()` and `epoch()` share one timeline."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def epoch(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward; time never runs backwards."""
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} s")
        self._now += seconds
