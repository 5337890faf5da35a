"""What a worker with a silent engine says of itself: only that it got no processor, and only while there is work."""

import asyncio
import os
from pathlib import Path

import pytest

from headwater.worker import pulse
from headwater.worker.pulse import CpuWait, Pulse


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
    wait = CpuWait()
    assert wait._waited_ns()
    wait.mark()
    assert 0.0 <= wait.since_mark_ms() < 60_000.0


def test_only_a_busy_worker_with_a_silent_engine_says_how_long_it_was_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "INTERVAL_S", 0.01)
    threads, told, work = Threads(tmp_path), list[float](), [1]

    async def life() -> None:
        beat = Pulse(lambda: bool(work), told.append, CpuWait(tmp_path))
        threads.waited("1", 1.0)
        beat.begin()
        await asyncio.sleep(0.05)
        assert told == [], "it was not held up"
        threads.waited("1", 3.0)
        await asyncio.sleep(0.05)
        assert set(told) == {2000.0}
        told.clear()
        beat.heard()
        await asyncio.sleep(0.05)
        assert told == [], "what was before the engine spoke is over"
        threads.waited("1", 3.5)
        await asyncio.sleep(0.05)
        assert set(told) == {500.0}
        work.clear()
        await asyncio.sleep(0.03)
        told.clear()
        threads.waited("1", 9.0)
        await asyncio.sleep(0.03)
        assert told == [], "nothing is open"
        beat.close()
        beat.close()

    asyncio.run(life())
