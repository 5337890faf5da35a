"""vLLM's processes end with the worker above them, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

WORKER = """
import subprocess, sys, time
from headwater.engines.vllm.guard import Guard
guard = Guard()
guard.start()
child = subprocess.Popen([sys.executable, "-c", "import subprocess; subprocess.run(['sh', '-c', "
                          "'sleep 600 & echo $!; wait'])"], stdout=subprocess.PIPE, start_new_session=True)
below = child.stdout.readline().decode().strip()
guard.settle()
print(child.pid, below, guard._process.pid, flush=True)
if sys.argv[1] == "closes":
    time.sleep(0.5)
    guard.close()
time.sleep(600)
"""

SHARING = """
import subprocess, sys, time
from headwater.engines.vllm.guard import Guard
guard = Guard()
guard.start()
child = subprocess.Popen([sys.executable, "-c", "import time; from multiprocessing.shared_memory import SharedMemory; "
                          "print(SharedMemory(create=True, size=4096).name, flush=True); time.sleep(600)"],
                         stdout=subprocess.PIPE, text=True, start_new_session=True)
name = child.stdout.readline()
guard.settle()
print(name, flush=True)
time.sleep(600)
"""


def started(way: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """The processes: one of vLLM's, one below one below it, the guard."""
    command = [sys.executable, "-c", WORKER, way]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert worker.stdout is not None
    return worker, [psutil.Process(int(word)) for word in worker.stdout.readline().split()]


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_killed_worker_takes_them_along() -> None:
    """Killed with all of its session, to which the guard does not belong."""
    worker, (child, below, guard) = started("is killed")
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    deadline = time.monotonic() + 20
    while not all(gone(process) for process in (child, below, guard)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert worker.stdout is not None
    worker.stdout.close()


def test_shared_memory_of_those_it_kills_is_removed() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", SHARING], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with worker:
        assert worker.stdout is not None
        path = Path("/dev/shm", worker.stdout.readline().strip())
        assert path.exists()
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        deadline = time.monotonic() + 20
        while path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_guard_that_is_closed_kills_nobody() -> None:
    worker, (child, below, guard) = started("closes")
    deadline = time.monotonic() + 20
    while not gone(guard):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not gone(child)
    assert not gone(below)
    for process in (worker, child, below):
        process.kill()
    worker.wait()
    assert worker.stdout is not None
    worker.stdout.close()
