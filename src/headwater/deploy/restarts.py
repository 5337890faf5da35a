"""When a process that died is started again: exponential back-off, and an end to it. Pure: time comes in.

A process that stayed ready for `stable_s` has proven itself, so its next failure counts as the first again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    max_restarts: int = 5
    """Failures in a row that are forgiven; one more and the process is given up."""
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    stable_s: float = 60.0


class RestartPolicy:
    """The history of one process."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failures in a row, the last one included."""
        return self._failures

    def after_exit(self, ready_s: float) -> float | None:
        """Delay until the next start after a life of which `ready_s` were spent ready; None: give up."""
        if ready_s >= self._limits.stable_s:
            self._failures = 0
        self._failures += 1
        if self._failures > self._limits.max_restarts:
            return None
        doubled = self._limits.first_delay_s * 2.0 ** min(self._failures - 1, 32)
        return min(doubled, self._limits.longest_delay_s)
