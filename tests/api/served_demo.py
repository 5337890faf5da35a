"""A real cluster in child processes: `headwater serve` with the demo model."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 100.0


@contextlib.contextmanager
def demo_cluster(folder: Path, *flags: str) -> Iterator[str]:
    """The base URL of a running cluster, without a trailing slash."""
    log = folder / "serve.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", *flags]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, stdout=output, stderr=output, env={**kept, "XDG_RUNTIME_DIR": str(folder)}
        ) as process,
    ):
        try:
            yield _url_once_ready(process, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _url_once_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        found = re.search(r"curl -N (https?://[\w.:\[\]]+)/v1", log.read_text())
        if found:
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"not ready in {START_TIMEOUT_S:g} s: {log.read_text()}")


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


def call(url: str, body: bytes | dict[str, Any] | None = None) -> Reply:
    """GET, or POST when there is a body."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return Reply(answer.status, dict(answer.headers.items()), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, dict(error.headers.items()), error.read())
