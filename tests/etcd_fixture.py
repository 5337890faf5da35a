"""etcd for tests: a real server that can be stopped, started, frozen and wiped."""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest


def need_etcd() -> None:
    """Skip where there is no etcd, but never in CI, which installs it."""
    if shutil.which("etcd") is None and not os.environ.get("CI"):
        pytest.skip("etcd is not installed (Debian: etcd-server)")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


class EtcdServer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        peer = f"http://127.0.0.1:{self._peer_port}"
        flags = {
            "--data-dir": str(self.folder / "data"),
            "--listen-client-urls": self.url,
            "--advertise-client-urls": self.url,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": f"default={peer}",
            "--heartbeat-interval": "50",
            "--election-timeout": "300",
        }
        words = ["etcd", *(word for pair in flags.items() for word in pair)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not self._healthy():
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "etcd did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        """As a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """While it is stopped."""
        shutil.rmtree(self.folder / "data")

    def let_in_only(self, user: str, password: str, prefix: str) -> None:
        """From now on, and to these keys alone; whoever administers etcd has another name."""
        first = prefix.encode()
        keys = {"key": _base64(first), "range_end": _base64(first[:-1] + bytes((first[-1] + 1,)))}
        for method, body in (
            ("user/add", {"name": "root", "password": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("role/add", {"name": "theirs"}),
            ("role/grant", {"name": "theirs", "perm": {"permType": "READWRITE", **keys}}),
            ("user/add", {"name": user, "password": password}),
            ("user/grant", {"user": user, "role": "theirs"}),
            ("enable", {}),
        ):
            urllib.request.urlopen(f"{self.url}/v3/auth/{method}", json.dumps(body).encode(), timeout=5).close()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return b"true" in answer.read()
        except OSError:
            return False


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
