"""Tells the cluster that a silent engine is not stuck but waits for a processor.

While work is open and the engine's own loop says nothing, the worker says now and then for how long the threads of its
process could have run and were not let (`LoadReport.starved_ms`). A process that is stopped, or waits for something
that never comes, has nothing of the kind to say. Only Linux counts that time; elsewhere nothing is told.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 0.25
_LEAST_MS = 50.0
"""Less than that in a silence is not worth a message."""
_TASKS = Path("/proc/self/task")


class CpuWait:
    """How long the threads of this process waited for a processor."""

    def __init__(self, tasks: Path = _TASKS) -> None:
        self._tasks = tasks
        self._marks: dict[str, int] = {}

    def mark(self) -> None:
        """Count from now on."""
        self._marks = self._waited_ns()

    def since_mark_ms(self) -> float:
        """Of the thread that waited longest."""
        waited = self._waited_ns()
        return (
            max([waited[thread] - marked for thread, marked in self._marks.items() if thread in waited], default=0)
            / 1e6
        )

    def _waited_ns(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for task in self._tasks.iterdir():
                with contextlib.suppress(OSError, IndexError, ValueError):  # a thread that ends meanwhile
                    found[task.name] = int((task / "schedstat").read_text().split()[1])
        return found


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
