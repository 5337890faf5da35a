"""Folders that are this user's alone: where sockets, locks and what is half made live. Refuses one others may use."""

import os
import stat
import tempfile
from pathlib import Path

from headwater.errors import ConfigError


def default_run_folder() -> Path:
    """This user's folder for sockets."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"headwater-{os.geteuid()}"


def ensure_private(folder: Path) -> None:
    """Make the folder, or check that it is a real one, ours and closed to others. Parents that are missing are made
    closed to others as well."""
    try:
        for made in (*reversed([parent for parent in folder.parents if not parent.exists()]), folder):
            made.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"folder {folder} cannot be made: {error.strerror or error}",
            hint="sockets and locks lie below XDG_RUNTIME_DIR, else TMPDIR: one of them has to name a folder of yours",
        ) from error
    found = os.lstat(folder)
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"folder {folder} has owner {found.st_uid} and mode {mode:04o}",
            hint=f"it must be a folder of user {os.geteuid()} and closed to others: chmod 700 {folder}",
        )
