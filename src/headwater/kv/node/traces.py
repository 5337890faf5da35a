"""What a store that cannot be opened would leave behind: folders and files that were not there before.

Only what is new is taken away, and nothing of a disk tier that another process owns by now.
"""

import contextlib
from pathlib import Path

from headwater.kv.stores.disk_files import names_in, remove_files


class Traces:
    """Looked for before anything is made; see the module docstring."""

    def __init__(self, socket: Path, disk: Path | None) -> None:
        self._disk = disk
        self._names = names_in(disk) if disk is not None else frozenset[str]()
        self._folders = sorted({*_missing(socket.parent), *_missing(disk)}, key=lambda folder: -len(folder.parts))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._disk is not None:
                remove_files(self._disk, spared=self._names)
        for folder in self._folders:
            with contextlib.suppress(OSError):  # others may have put something there
                folder.rmdir()


def _missing(folder: Path | None) -> list[Path]:
    """The folder, and those above it, as far as they are not there."""
    return [] if folder is None else [one for one in (folder, *folder.parents) if not one.exists()]
