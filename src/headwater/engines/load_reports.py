"""When an engine that plans its own steps tells of its load: soon after a change, not too often, and when idle."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headwater.clock import Clock
from headwater.protocol.events import LoadReport, StepTiming

REPORT_INTERVAL_S = 0.02
"""Least time between two load reports of a busy engine."""
HEARTBEAT_S = 1.0
_MAX_TIMINGS = 64


@dataclass(slots=True)
class Totals:
    """Since start."""

    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class LoadReports:
    """Lives on the event loop. `load`: the state of now; `tell`: whoever is to hear of it."""

    def __init__(self, clock: Clock, load: Callable[[], LoadReport], tell: Callable[[LoadReport], None]) -> None:
        self._clock = clock
        self._load = load
        self._tell = tell
        self._timings: list[StepTiming] = []
        """Not told yet."""
        self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """From now on there is a heartbeat."""
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def note_step(self, timing: StepTiming) -> None:
        self._timings.append(timing)
        del self._timings[:-_MAX_TIMINGS]

    def note_changed(self, *, idle: bool) -> None:
        """Load may have changed. That nothing is open any more is told at once."""
        if idle or self._clock.now() >= self._next:
            self._report()

    def _report(self) -> None:
        self._next = self._clock.now() + REPORT_INTERVAL_S
        timings, self._timings = self._timings, []
        self._tell(msgspec.structs.replace(self._load(), timings=timings))

    def _beat(self) -> None:
        self._report()
        self.begin()
