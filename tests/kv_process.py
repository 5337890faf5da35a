"""`headwater kv serve` as a process of its own, and a client of it."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from headwater.kv.node.client import StoreClient


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


@contextlib.contextmanager
def store_socket() -> Iterator[Path]:
    """Of a store in a folder of its own, whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder, store_process(Path(folder) / "kv.sock"):
        yield Path(folder) / "kv.sock"


@contextlib.asynccontextmanager
async def client_of(path: Path) -> AsyncIterator[StoreClient]:
    """Connected."""
    client = StoreClient(path, "test")
    await client.start(patience_s=20.0)
    try:
        assert not client.problem
        yield client
    finally:
        await client.close()
