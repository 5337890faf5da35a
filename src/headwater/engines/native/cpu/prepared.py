"""Prepared weights of a checkpoint: found in a folder, or converted into it once by whoever comes first.

One copy in the page cache serves all workers of a host. A file is written under a lock and renamed into place when
complete; whatever does not fit exactly is rebuilt. Where the folder cannot be written, the same bytes live in memory
of this process alone.
"""

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from headwater.engines.base import Progress, ProgressSink
from headwater.engines.native.base import Checkpoint
from headwater.engines.native.cpu.layout import model_plan
from headwater.engines.native.cpu.panel_file import PanelFile, UnfitFile, map_panels, mark_checked, write_panels
from headwater.engines.native.cpu.panels import LAYOUT_VERSION
from headwater.errors import InternalError, ModelError

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 1800.0


def prepare(checkpoint: Checkpoint, folder: Path, progress: ProgressSink) -> PanelFile:
    """Map the prepared weights of `checkpoint`, building them first where needed."""
    path = folder / _file_name(checkpoint.fingerprint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _map(path, checkpoint, progress) or _build(path, checkpoint, progress)
    except OSError as error:
        logger.warning("cannot keep prepared weights in %s (%s): this process holds its own copy", folder, error)
    plans = model_plan(checkpoint.config)
    with os.fdopen(os.memfd_create("headwater-weights"), "w+b") as file:
        write_panels(file, plans, checkpoint, progress)
        return map_panels(file, plans, checkpoint, progress)


def _file_name(fingerprint: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{8,128}", fingerprint):
        raise InternalError(f"checkpoint fingerprint {fingerprint!r} is not a hex digest")
    return f"{fingerprint[:40]}-v{LAYOUT_VERSION}.panels"


def _map(path: Path, checkpoint: Checkpoint, progress: ProgressSink) -> PanelFile | None:
    try:
        with path.open("rb") as file:
            weights = map_panels(file, model_plan(checkpoint.config), checkpoint, progress)
    except FileNotFoundError:
        return None
    except UnfitFile as error:
        logger.warning("rebuilding %s: %s", path, error)
        return None
    with contextlib.suppress(OSError):  # a folder that is only readable serves as well
        mark_checked(path)
    return weights


def _build(path: Path, checkpoint: Checkpoint, progress: ProgressSink) -> PanelFile:
    plans = model_plan(checkpoint.config)
    with _lock(path.with_name(path.name + ".lock"), progress):
        if weights := _map(path, checkpoint, progress):
            return weights
        temporary = path.with_name(path.name + ".partial")  # the lock makes it ours, also when left by a crash
        try:
            with temporary.open("w+b") as file:
                write_panels(file, plans, checkpoint, progress)
                weights = map_panels(file, plans, checkpoint, progress)
            temporary.replace(path)
            _remove_others(path)
        finally:
            temporary.unlink(missing_ok=True)
        return weights


def _remove_others(path: Path) -> None:
    """Files of the same checkpoint in another layout; who has one mapped keeps it."""
    for other in path.parent.glob(f"{path.name.split('-')[0]}-v*.panels"):
        if other != path:
            other.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path, progress: ProgressSink) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s") from None
                progress(Progress("convert", detail="another worker is preparing the weights"))
                time.sleep(0.2)
        yield
