"""Tells the cluster that a silent engine is not stuck but waits for a processor.

While work is open and the engine's own loop says nothing, the worker says now and then for how long the threads of its
process could have run and were not let (`LoadReport.starved_ms`). A process that is stopped, or waits for something
that never comes, has nothing of the kind to say.
"""

import asyncio
from collections.abc import Callable

from headwater.runtime.cpu_wait import CpuWait

INTERVAL_S = 0.25
_LEAST_MS = 50.0
"""Less than that in a silence is not worth a message."""


class Pulse:
    """`begin` when work comes, `heard` when the engine's loop says something, `close` at the end."""

    def __init__(
        self, busy: Callable[[], bool], tell: Callable[[float], None], cpu_wait: CpuWait | None = None
    ) -> None:
        self._busy = busy
        self._tell = tell
        self._cpu_wait = cpu_wait or CpuWait()
        self._marked = False
        """Whether time is counted, in a silence."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self._timer is None:
            self._marked = False
            self._wait()

    def heard(self) -> None:
        self._marked = False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._busy():
            return
        if not self._marked:
            self._cpu_wait.mark()
            self._marked = True
        elif (starved_ms := self._cpu_wait.since_mark_ms()) >= _LEAST_MS:
            self._tell(starved_ms)
        self._wait()
