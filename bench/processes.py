"""Processes under measurement: CPU time and memory from /proc, ports, ends."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator

from headwater.bench.process_cpu import process_usage

Process = subprocess.Popen[bytes]


def cpu_s(pid: int) -> float:
    """User and system time of a process, threads that have ended included; in hundredths of a second."""
    return process_usage(pid).cpu_s


def rss_mb(pid: int) -> float:
    return process_usage(pid).rss_bytes / 1e6


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(commands: list[list[str]], environment: dict[str, str], log: str | None) -> Iterator[list[Process]]:
    """The processes, started together in this order; ended in the opposite order."""
    with open(log or os.devnull, "ab") as sink:
        children = [subprocess.Popen(words, env=environment, stdout=sink, stderr=sink) for words in commands]
        try:
            yield children
        finally:
            for child in reversed(children):
                child.send_signal(signal.SIGTERM)
            for child in reversed(children):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(10)
                child.kill()
                child.wait()
