"""Time that threads spent waiting for a processor, from files like those of Linux."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.runtime.cpu_wait import CpuWait, of_process


class Threads:
    """A `/proc/self/task` of our own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def waited(self, thread: str, seconds: float) -> None:
        task = self.folder / thread
        task.mkdir(exist_ok=True)
        (task / "schedstat").write_text(f"123456 {round(seconds * 1e9)} 17\n")


def test_the_thread_that_waited_longest_since_the_mark_counts(tmp_path: Path) -> None:
    threads, wait = Threads(tmp_path), CpuWait(tmp_path)
    threads.waited("1", 100.0)
    threads.waited("2", 5.0)
    wait.mark()
    threads.waited("1", 100.1)
    threads.waited("2", 6.5)
    threads.waited("3", 50.0)
    (tmp_path / "4").mkdir()
    assert wait.since_mark_ms() == pytest.approx(1500.0), "a new thread and one that is ending count for nothing"
    wait.mark()
    assert wait.since_mark_ms() == 0.0


def test_where_nobody_counts_nothing_is_said(tmp_path: Path) -> None:
    wait = CpuWait(tmp_path / "missing")
    wait.mark()
    assert wait.since_mark_ms() == 0.0


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this kernel does not count it")
def test_the_kernel_is_understood() -> None:
    wait = of_process(os.getpid())
    assert wait._waited_ns()
    wait.mark()
    assert 0.0 <= wait.since_mark_ms() < 60_000.0


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    wait = of_process(2**31 - 1)
    wait.mark()
    assert wait.since_mark_ms() == 0.0


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this kernel does not count it")
def test_a_stopped_process_waits_for_no_processor() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        os.kill(busy.pid, signal.SIGSTOP)
        os.waitpid(busy.pid, os.WUNTRACED)
        wait = of_process(busy.pid)
        wait.mark()
        time.sleep(0.3)
        assert wait.since_mark_ms() == 0.0
    finally:
        busy.kill()
        busy.stdout.close()
        busy.wait()
