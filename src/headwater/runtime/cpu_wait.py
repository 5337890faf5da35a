"""For how long the threads of a process could have run, and the kernel gave them no processor. Linux counts that.

Elsewhere, and of processes that cannot be looked at, it is 0. A thread counts from when it is first seen.
"""

import contextlib
from pathlib import Path

_OWN_TASKS = Path("/proc/self/task")


class CpuWait:
    """How long the threads of this process waited for a processor."""

    def __init__(self, tasks: Path = _OWN_TASKS) -> None:
        self._tasks = tasks
        self._marks: dict[str, int] = {}

    def mark(self) -> None:
        """Count from now on."""
        self._marks = self._waited_ns()

    def since_mark_ms(self) -> float:
        """Of the thread that waited longest."""
        waited = self._waited_ns()
        return max([waited[name] - marked for name, marked in self._marks.items() if name in waited], default=0) / 1e6

    def _waited_ns(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for task in self._tasks.iterdir():
                with contextlib.suppress(OSError, IndexError, ValueError):  # a thread that ends meanwhile
                    found[task.name] = int((task / "schedstat").read_text().split()[1])
        return found


def of_process(pid: int) -> CpuWait:
    """Of a process on this host."""
    return CpuWait(Path(f"/proc/{pid}/task"))
