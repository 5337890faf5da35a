"""A server to attack: `headwater serve` in a process of its own, or one that runs already."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Server:
    url: str
    supervisor_pid: int = 0

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    def alive(self) -> bool:
        try:
            connection = http.client.HTTPConnection(*self.address, timeout=10)
            connection.request("GET", "/ready")
            status = connection.getresponse().status
        except OSError:
            return False
        finally:
            connection.close()
        return status == 200

    def frontends(self) -> list[int]:
        """Process ids."""
        children = Path(f"/proc/{self.supervisor_pid}/task/{self.supervisor_pid}/children").read_text().split()
        return [int(pid) for pid in children if b"frontend" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def rss_bytes(self) -> int:
        """Of the frontends."""
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.frontends())
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving(url: str | None, *flags: str) -> Iterator[Server]:
    """Without a URL: a mocker with no time of its own, ready."""
    if url is not None:
        yield Server(url.rstrip("/"))
        return
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", "--engine", "mocker"]
    command += ["--mocker-speedup", "0", *flags]
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env={**kept, "XDG_RUNTIME_DIR": folder})
        try:
            yield Server(_url(process, Path(folder), log), process.pid)
        finally:
            process.terminate()
            process.wait(60)


def _url(process: subprocess.Popen[bytes], folder: Path, log: Path) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        for record in folder.glob("headwater-*/serve-*/cluster.json"):
            with contextlib.suppress(ValueError, KeyError, OSError):
                url = str(json.loads(record.read_bytes())["url"])
                if Server(url).alive():
                    return url
        time.sleep(0.1)
    raise RuntimeError(f"not ready in {_START_TIMEOUT_S:g} s: {log.read_text()}")
