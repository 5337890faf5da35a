"""Ends vLLM's processes when the worker above them is killed: they would hold on to the device's memory, and the worker
that takes its place could not start.

vLLM's engine core does not notice that its parent is gone. A process of ours does, by a pipe that closes, and kills
what was below that parent, but for multiprocessing's trackers: they end when nobody is left that could make shared
memory, and then remove what there is of it. `python -m headwater.engines.vllm.guard PID`, with the pipe as its input.
"""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterable

import psutil

_SETTLED = b"settled\n"
_LOOKED = b"looked\n"
_LOOK_S = 0.5
_TRACKER = "multiprocessing.resource_tracker"


class Guard:
    """Started before vLLM is, and told when vLLM has all its processes. `close` when vLLM has ended by itself."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Over all processes that this one starts from now on, and all below them."""
        command = [sys.executable, "-m", __name__, str(os.getpid())]
        # In a session of its own: what ends the worker is not to end the guard.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._await_look()

    def settle(self) -> None:
        """No more are to come."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(_SETTLED)
                self._process.stdin.flush()
                self._await_look()

    def _await_look(self) -> None:
        """Until it has looked, or is gone."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.readline()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def below(pids: Iterable[int]) -> set[psutil.Process]:
    """All processes below these, themselves and this one left out."""
    found: set[psutil.Process] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(pid).children(recursive=True))
    return {process for process in found if process.pid != os.getpid()}


def main(parent: int) -> None:
    """A pid that was given to another process meanwhile is seen by its age."""
    guarded = below([parent])
    os.write(1, _LOOKED)
    while not select.select([0], [], [], _LOOK_S)[0]:
        guarded |= below([parent])
    while os.read(0, len(_SETTLED)):
        guarded |= below([parent])
        os.write(1, _LOOKED)
    known = {process for process in guarded if process.is_running()}
    for process in known | below(process.pid for process in known):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any(_TRACKER in word for word in process.cmdline()):
                process.kill()


if __name__ == "__main__":
    os.chdir("/")
    main(int(sys.argv[1]))
