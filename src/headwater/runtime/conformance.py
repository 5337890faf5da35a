"""What the conformance suites of the runtime contracts share: a loop per check, and nothing left behind."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import uvloop

CHECK_TIMEOUT_S = 60.0
CHECK = "check"
"""Attribute of a check that holds it as a coroutine function, for those who have a loop already."""
_SETTLE_S = 10.0

Self = TypeVar("Self")
P = ParamSpec("P")


def on_loop(
    check: Callable[Concatenate[Self, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[Self, P], None]:
    """Run an asynchronous check on a loop of its own; fail if it leaves tasks, threads or descriptors."""

    def run(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        run_leak_checked(check(self, *args, **kwargs))

    run.__name__, run.__qualname__, run.__doc__ = check.__name__, check.__qualname__, check.__doc__
    setattr(run, CHECK, check)
    return run


def run_leak_checked(check: Coroutine[Any, Any, None]) -> None:
    """Run to the end, on the kind of loop that serves, and compare what the process holds before and after."""
    _run(asyncio.sleep(0))  # the first loop of a process opens descriptors that stay
    before = _held()
    _run(_without_leftover_tasks(check))
    gc.collect()  # what an exception's traceback still names is not left behind
    deadline = time.monotonic() + _SETTLE_S
    while (left := _held() - before) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not left, f"left behind: {sorted(left)}"


def _run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def _without_leftover_tasks(check: Coroutine[Any, Any, None]) -> None:
    await asyncio.wait_for(check, CHECK_TIMEOUT_S)
    for _ in range(3):
        await asyncio.sleep(0)
    leftover = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leftover, f"tasks left running: {leftover}"


def _held() -> set[str]:
    """Threads and open descriptors of this process."""
    threads = {f"thread {thread.name} {thread.ident}" for thread in threading.enumerate()}
    return threads | {f"descriptor {name}" for name in os.listdir("/proc/self/fd")[:-1]}


async def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.002)
