"""`headwater kv serve` as a process of its own."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def store_process(path: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "headwater", "kv", "serve", "--socket", str(path), "--host", "32MiB"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while not path.exists():
                assert process.poll() is None, f"ended with {process.returncode}"
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield process
        finally:
            process.kill()
