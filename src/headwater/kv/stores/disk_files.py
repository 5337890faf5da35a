"""The files of a disk tier: a folder with

    lock       held while the tier is open: one process at a time
    manifest   version, sizes, families and limits of tenants, replaced as a whole
    records    the block table, mapped
    blocks     payloads

All space is taken when the tier is opened, so a full disk is found then and never later. Nothing here trusts what it
reads: sizes are checked, and a manifest that cannot be understood means an empty tier.
"""

import fcntl
import logging
import mmap
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headwater.config.units import about_bytes
from headwater.errors import ConfigError, TierUnavailable
from headwater.kv.block import Family
from headwater.kv.shares import Limits
from headwater.kv.space import PAGE_BYTES, chunk_bytes_for
from headwater.kv.table import RECORD_BYTES

logger = logging.getLogger(__name__)

LOCK = "lock"
VERSION = 2
_NAMES = frozenset({LOCK, "manifest", "manifest.new", "records", "blocks"})
_MAX_MANIFEST_BYTES = 16 << 20
_MAX_CHUNKS = 1 << 20
"""A manifest that asks for more is damaged: each takes memory."""
_MANIFEST_ALLOWANCE = 64 << 10
"""Of the cap, set aside for the manifest and file system overhead."""


def names_in(folder: Path) -> frozenset[str]:
    """Of the files of a tier, those that are there."""
    return frozenset(name for name in _NAMES if (folder / name).exists())


def remove_files(folder: Path, *, spared: Collection[str]) -> None:
    """Of a tier that was not opened for good; nothing if a process has it open. Raises `OSError`."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in _NAMES.difference(spared):
            (folder / name).unlink(missing_ok=True)
    finally:
        os.close(fd)


class Manifest(msgspec.Struct, frozen=True):
    version: int
    chunk_bytes: int
    families: list[Family]
    limits: Limits = {}


@dataclass(frozen=True, slots=True)
class DiskSizes:
    """How a cap is divided."""

    num_records: int
    records_bytes: int
    data_bytes: int
    chunk_bytes: int

    @classmethod
    def of(cls, cap_bytes: int, num_records: int, chunk_bytes: int = 0) -> "DiskSizes":
        """`chunk_bytes`: of a former life, kept if it still fits."""
        records_bytes = -(-num_records * RECORD_BYTES // PAGE_BYTES) * PAGE_BYTES
        room = cap_bytes - records_bytes - _MANIFEST_ALLOWANCE
        if room < PAGE_BYTES:
            raise ConfigError(f"a disk tier of {cap_bytes} bytes has no room for blocks", hint="give it more")
        kept = 0 < chunk_bytes <= room and chunk_bytes % PAGE_BYTES == 0 and room // chunk_bytes <= _MAX_CHUNKS
        if not kept:
            chunk_bytes = chunk_bytes_for(room)
        return cls(num_records, records_bytes, room // chunk_bytes * chunk_bytes, chunk_bytes)


class DiskFiles:
    """Open and owned by this process. Raises `ConfigError` for what the operator must put right."""

    def __init__(self, folder: Path, cap_bytes: int, num_records: int, *, direct: bool) -> None:
        self.folder = folder
        self._fds: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock()
            self._refuse_foreign()
            self._close_to_others()
            self._check_free(cap_bytes)
            self.manifest = self._read_manifest()
            self.sizes = DiskSizes.of(cap_bytes, num_records, self.manifest.chunk_bytes)
            if self.manifest.chunk_bytes != self.sizes.chunk_bytes:
                (folder / "records").unlink(missing_ok=True)
                self.write_manifest([], self.manifest.limits)
            records = self._allocate("records", self.sizes.records_bytes)
            self.fd = self._allocate("blocks", self.sizes.data_bytes)
            self.direct_fd = self._open("blocks", os.O_RDWR | os.O_DIRECT) if direct else -1
            self.records = mmap.mmap(records, self.sizes.records_bytes)
        except OSError as error:
            self._close_all()
            raise ConfigError(
                f"the disk tier at {folder} cannot be opened: {error.strerror or error}",
                hint="it needs a folder that belongs to this user",
            ) from None
        except ConfigError:
            self._close_all()
            raise

    def write_manifest(self, families: list[Family], limits: Limits) -> None:
        """Replace it in one step: after a crash it is the old one or the new one. Raises `TierUnavailable`."""
        manifest = Manifest(VERSION, self.sizes.chunk_bytes, families, limits)
        path = self.folder / "manifest.new"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(manifest))
            path.replace(self.folder / "manifest")
        except OSError as error:
            raise TierUnavailable(f"cannot write {path}: {error.strerror}") from None
        self.manifest = manifest

    def used_bytes(self) -> int:
        """What the file system has given to the folder."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.iterdir() if path.name in _NAMES)

    def close(self) -> None:
        self.records.close()
        self._close_all()

    def _lock(self) -> None:
        fd = self._open(LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(fd), os.stat(self.folder / LOCK)):
                raise BlockingIOError  # whoever made it has just taken it away again
        except (BlockingIOError, FileNotFoundError):
            raise ConfigError(
                f"the disk tier at {self.folder} is in use by another process",
                hint="one process per node owns it: see `headwater kv serve`",
            ) from None

    def _refuse_foreign(self) -> None:
        foreign = sorted({entry.name for entry in self.folder.iterdir()} - _NAMES)
        if foreign:
            raise ConfigError(
                f"{self.folder} holds other files ({', '.join(foreign[:3])}): give the tier its own folder"
            )

    def _close_to_others(self) -> None:
        """Prompts can be had from KV blocks; a restored or copied folder may have been more open."""
        for entry in self.folder.iterdir():
            if not entry.is_symlink():
                entry.chmod(0o600)

    def _check_free(self, cap_bytes: int) -> None:
        status = os.statvfs(self.folder)
        available = status.f_bavail * status.f_frsize + self.used_bytes()
        if cap_bytes > available:
            raise ConfigError(
                f"the disk tier at {self.folder} may take {about_bytes(cap_bytes)}: {about_bytes(available)} are free",
                hint="give it less, or make room",
            )

    def _read_manifest(self) -> Manifest:
        path = self.folder / "manifest"
        nothing = Manifest(VERSION, 0, [])
        if not path.exists():
            return nothing
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                raise msgspec.DecodeError("too large")
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except msgspec.DecodeError as error:
            logger.warning("the manifest of the disk tier at %s is damaged (%s): it starts empty", self.folder, error)
            return nothing
        if manifest.version != VERSION:
            logger.warning("the disk tier at %s is of version %d: it starts empty", self.folder, manifest.version)
            return nothing
        return manifest

    def _allocate(self, name: str, num_bytes: int) -> int:
        fd = self._open(name, os.O_RDWR | os.O_CREAT)
        if os.fstat(fd).st_size != num_bytes:
            os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
        return fd

    def _open(self, name: str, flags: int) -> int:
        fd = os.open(self.folder / name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._fds.append(fd)
        return fd

    def _close_all(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
