"""Processes under measurement: CPU time and memory from /proc, ports, ends."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Process = subprocess.Popen[bytes]


def cpu_s(pid: int) -> float:
    """User and system time of a process, threads that have ended included; in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


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
