"""What a worker with a silent engine says of itself: only that it got no processor, and only while there is work."""

import asyncio
from pathlib import Path

import pytest
from test_runtime_cpu_wait import Threads

from headwater.runtime.cpu_wait import CpuWait
from headwater.worker import pulse
from headwater.worker.pulse import Pulse


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
        work.append(1)
        beat.begin()
        await asyncio.sleep(0.05)
        assert told == [], "what was before the work came is over"
        beat.close()
        beat.close()

    asyncio.run(life())
