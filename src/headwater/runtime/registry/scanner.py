"""Turns looks at a folder into events: who came, changed, went; and who lives although the record was wiped.

One descriptor per living instance stays open: through it the lease can be tested even when the name is gone, which
tells a worker that left (no lock) from a store that was wiped under a living worker (locked).
"""

import logging
import os
from dataclasses import dataclass

from headwater.errors import ConfigError
from headwater.protocol.cluster import Instance
from headwater.runtime.registry.base import InstanceGone, InstancePut, RegistryEvent
from headwater.runtime.registry.folder import Folder, Record, is_locked
from headwater.runtime.registry.records import check_worker_id, decode_instance

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seen:
    fd: int
    inode: int
    instance: Instance


class Scanner:
    """The last picture of one folder. Used on one thread."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._seen: dict[str, _Seen] = {}
        self._reported: dict[str, int] = {}
        """Inode of the unreadable record last reported, by name."""
        self.dead = False
        """Whether the last look found files without a living owner."""
        self.orphans: list[str] = []
        """Living workers whose record is gone."""

    @property
    def instances(self) -> list[Instance]:
        return [seen.instance for seen in self._seen.values()]

    def look(self) -> list[RegistryEvent]:
        """What changed since the last look. `OSError` leaves the picture as it was."""
        listing = self._folder.listing()
        self.dead = False
        self.orphans = []
        self._reported = {name: inode for name, inode in self._reported.items() if name in listing}
        names = [*self._seen, *(name for name in listing if name not in self._seen)]
        return [event for name in names if (event := self._look_at(name, listing.get(name))) is not None]

    def close(self) -> None:
        for seen in self._seen.values():
            os.close(seen.fd)
        self._seen.clear()

    def _look_at(self, worker_id: str, inode: int | None) -> RegistryEvent | None:
        """The lock is tested before the name is looked up: an owner that renews its record takes the name first."""
        seen = self._seen.get(worker_id)
        alive = seen is not None and is_locked(seen.fd)
        if seen is not None and alive and seen.inode == inode:
            return None
        found = self._load(worker_id)
        if found is not None:
            self._forget(worker_id)
            self._seen[worker_id] = found
            return InstancePut(found.instance) if seen is None or seen.instance != found.instance else None
        if seen is None:
            return None
        if alive:
            self.orphans.append(worker_id)
            return None
        self._forget(worker_id)
        return InstanceGone(worker_id)

    def _load(self, worker_id: str) -> _Seen | None:
        """The record now under this name, if its owner lives and it can be understood."""
        record = self._open_living(worker_id)
        if record is None:
            return None
        instance = self._decode(worker_id, record)
        if instance is None:
            os.close(record.fd)
            return None
        return _Seen(record.fd, record.inode, instance)

    def _open_living(self, worker_id: str) -> Record | None:
        """A record without a lock is dead only if it still has the name: a busy owner may have renewed it since."""
        while (record := self._folder.open_record(worker_id)) is not None:
            if is_locked(record.fd):
                return record
            current = self._folder.names(worker_id, record.fd)
            os.close(record.fd)
            if current:
                self.dead = True
                break
        return None

    def _decode(self, worker_id: str, record: Record) -> Instance | None:
        try:
            check_worker_id(worker_id)
            return decode_instance(record.data, worker_id)
        except (ValueError, ConfigError) as error:
            if self._reported.get(worker_id) != record.inode:
                self._reported[worker_id] = record.inode
                _log.warning("ignoring registry record %s: %s", self._folder.instances / worker_id, error)
            return None

    def _forget(self, worker_id: str) -> None:
        if (seen := self._seen.pop(worker_id, None)) is not None:
            os.close(seen.fd)
