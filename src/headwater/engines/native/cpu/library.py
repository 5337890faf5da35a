"""Find or build the kernel library and load it.

Order: the library built with the package, one in the user's cache folder, one compiled into that folder now. A file
is loaded only from a place that other users cannot write to.
"""

import ctypes
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path

from headwater.engines.native.cpu.build import BUILD_PREFIX, BuildError, build_library, library_name

logger = logging.getLogger(__name__)


class KernelsUnavailable(Exception):
    """There is no usable library and none can be built; the message says why."""


def load_library(package_folder: Path, cache_folder: Path) -> ctypes.CDLL:
    """Load the library that matches the sources. Raises `KernelsUnavailable`."""
    name = library_name()
    prebuilt, cached = package_folder / name, cache_folder / "kernels" / name
    for path in (prebuilt, cached):
        if path.is_file() and (library := _open(path)):
            return library
    return _build(cached)


def _build(target: Path) -> ctypes.CDLL:
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _private(target.parent):
            raise KernelsUnavailable(f"other users can write to {target.parent}: refusing to build kernels there")
        with (target.parent / ".building").open("w") as lock:
            # Workers that start together wait for the one that compiles; the compiler bounds the wait.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_file() and (library := _open(target)):
                return library
            for left in target.parent.glob(f"{BUILD_PREFIX}*"):  # by one that was killed
                shutil.rmtree(left, ignore_errors=True)
            logger.info("compiling the CPU kernels into %s", target.parent)
            build_library(target)
            if library := _open(target):
                return library
            raise KernelsUnavailable(f"the kernels built at {target} cannot be loaded")
    except (BuildError, OSError) as error:
        raise KernelsUnavailable(f"cannot build the CPU kernels: {error}") from error


def _open(path: Path) -> ctypes.CDLL | None:
    if not _private(path):
        logger.warning("ignoring %s: it or a folder above it can be written by other users", path)
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("cannot load %s: %s", path, error)
        return None


def _private(path: Path) -> bool:
    """Whether only root, this user, or the owner of this package can put another file there."""
    owners = {0, os.geteuid(), Path(__file__).stat().st_uid}
    path = path.resolve()
    for part in (path, *path.parents):
        status = part.stat()
        shared = status.st_mode & stat.S_IWOTH and not (part != path and status.st_mode & stat.S_ISVTX)
        if shared or (part == path and status.st_uid not in owners):
            return False
    return True
