"""What a process has started ends with it, also when it is killed."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

PLANNING = """
import os, signal
from headwater.frontend.planning import Planning

if __name__ == "__main__":
    planning = Planning.__new__(Planning)
    planning._executor = None
    planning._process().submit(os.getpid).result()
    signal.pause()
"""
SIMULATING = """
from headwater.cli.main import main

if __name__ == "__main__":
    main(["simulate", "--mix", "rag", "--jobs", "2", "--policy", "delay", "--policy", "round_robin"])
"""
STORING = """
import signal
from headwater.kv.node.benchmark import store_process

if __name__ == "__main__":
    with store_process(64 << 20, 4096):
        signal.pause()
"""


@pytest.mark.parametrize(
    ("script", "num_children"),
    [
        pytest.param(PLANNING, 2, id="the planner of a frontend"),  # and multiprocessing's own tracker
        pytest.param(SIMULATING, 3, id="simulations side by side"),
        pytest.param(STORING, 1, id="the store of a benchmark"),
    ],
)
def test_children_of_a_killed_process_end(script: str, num_children: int, tmp_path: Path) -> None:
    path = tmp_path / "parent.py"
    path.write_text(script)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, path], stdout=subprocess.DEVNULL, env=environment) as parent:
        try:
            handles = [os.pidfd_open(pid) for pid in children_of(parent.pid, num_children)]
        finally:
            parent.kill()
    for handle in handles:
        assert select.select([handle], [], [], 20)[0], "it lives on"
        os.close(handle)


def children_of(pid: int, count: int) -> list[int]:
    """Once they are all there."""
    for _ in range(600):
        found = [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{len(found)} children instead of {count}")
