"""Wake-ups from the kernel when something happens in a folder: files renamed, removed, or closed after writing.

A process that dies closes its files, so the end of an owner is heard as well. Only a hint: network file systems stay
silent, and where inotify is missing (`open` returns None) the caller polls alone.
"""

import ctypes
import os
from pathlib import Path

_CLOSE_WRITE = 0x008
_MOVED_FROM = 0x040
_MOVED_TO = 0x080
_DELETE = 0x200
_DELETE_SELF = 0x400
_MOVE_SELF = 0x800
_EVENTS = _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _DELETE | _DELETE_SELF | _MOVE_SELF
_READ_BYTES = 64 * 1024


class Inotify:
    """One inotify descriptor."""

    def __init__(self, libc: ctypes.CDLL, fd: int) -> None:
        self._libc = libc
        self.fd = fd

    @classmethod
    def open(cls) -> "Inotify | None":
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            return None
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        return cls(libc, fd) if fd >= 0 else None

    def follow(self, folder: Path) -> None:
        """Follow the folder that is now at this path; asking again for the same one changes nothing."""
        self._libc.inotify_add_watch(self.fd, os.fsencode(folder), _EVENTS)

    def drain(self) -> None:
        try:
            while len(os.read(self.fd, _READ_BYTES)) == _READ_BYTES:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self.fd)
