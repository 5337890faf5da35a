"""Processes under measurement: CPU time and memory from /proc, ports, ends; an etcd that can be away for a while."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

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


class Etcd:
    """One of its own, from the PATH."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.port, free_port()))
        self._words = ["etcd", "--data-dir", str(folder), "--initial-cluster", f"default={peer}"]
        self._words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        self._words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._process: Process | None = None

    def start(self) -> None:
        """Until it is healthy."""
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise SystemExit("etcd did not start")
            time.sleep(0.05)

    def kill(self) -> None:
        """As a crash would. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _healthy(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer,
        ):
            return b"true" in answer.read()
        return False
