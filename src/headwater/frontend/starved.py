"""Workers of this host that are silent because they get no processor: seen from outside, as they may be too starved to
say so themselves (`LoadReport.starved_ms`). Looked at from the first half of their patience on.
"""

import os
import socket
from collections.abc import Callable

from headwater.frontend.connection import WorkerConnection
from headwater.frontend.vigil import Vigil
from headwater.runtime.cpu_wait import CpuWait, of_process


class StarvedHere:
    def __init__(
        self,
        connection_of: Callable[[str], WorkerConnection | None],
        wait_of: Callable[[int], CpuWait] = of_process,
    ) -> None:
        """`wait_of`: of the process with that id."""
        self._connection_of = connection_of
        self._wait_of = wait_of
        self._host = socket.gethostname()
        self._looked: dict[str, tuple[float, CpuWait]] = {}
        """By worker: since when it has been silent, and what it waited since it was first looked at."""

    def look(self, vigil: Vigil, now: float) -> None:
        """Excuse those that could not help it."""
        suspects = dict(vigil.suspects(now))
        self._looked = {name: kept for name, kept in self._looked.items() if kept[0] == suspects.get(name)}
        for worker_id, silent_since in suspects.items():
            known = self._looked.get(worker_id)
            if known is not None:
                vigil.excuse(worker_id, known[1].since_mark_ms() / 1e3)
            elif (pid := self._pid_here(worker_id)) is not None:
                wait = self._wait_of(pid)
                wait.mark()
                self._looked[worker_id] = silent_since, wait

    def _pid_here(self, worker_id: str) -> int | None:
        """None for a worker elsewhere, and for one in our own process."""
        connection = self._connection_of(worker_id)
        if connection is None or connection.instance.host != self._host:
            return None
        pid = connection.instance.pid
        return pid if pid > 0 and pid != os.getpid() else None
