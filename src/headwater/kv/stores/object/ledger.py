"""What this node keeps in the bucket: the basis of its cap, of eviction and of expiry. Pure.

It is saved as one object under the owner's name, so that a restarted node knows what it owns and for whom, without
listing anything. Objects written after the last saving and before a crash belong to nobody; they go when they expire.
Fields that came to the saved form later are optional, and passed over by processes that do not know them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from struct import Struct
from typing import Annotated, NamedTuple

import msgspec

from headwater.kv.block import Label
from headwater.kv.shares import Limits, Shares

_ENTRY = Struct("<16sQ")
_VERSION = 1


class Owned(NamedTuple):
    folder: str
    num_bytes: int
    written_at: int
    """Seconds since 1970."""


class _Folder(msgspec.Struct, frozen=True, array_like=True):
    object_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    entries: bytes
    tenant: Label | None = None
    """None: not known to whoever saved it."""


class _Saved(msgspec.Struct, frozen=True):
    version: int
    folders: dict[str, _Folder]
    limits: Limits = {}


class Ledger:
    """Objects of each group of tenants in order of use, the least recently used first. They count in `shares`."""

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = shares or Shares()
        self._queues: dict[int, OrderedDict[bytes, Owned]] = {}
        self._groups: dict[bytes, int] = {}
        self._tenants: dict[str, str] = {}
        """By folder."""
        self._gone: set[bytes] = set()
        self.used_bytes = 0
        self.num_changes = 0
        """Since it was last saved."""

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, name: bytes) -> bool:
        return name in self._groups

    def get(self, name: bytes) -> Owned | None:
        group = self._groups.get(name)
        return self._queues[group][name] if group is not None else None

    def add(self, name: bytes, owned: Owned, tenant: str = "") -> None:
        if name in self._groups:
            return
        self._tenants[owned.folder] = tenant
        self._enter(name, owned)
        self._gone.discard(name)
        self.num_changes += 1

    def remove(self, name: bytes) -> bool:
        group = self._groups.pop(name, None)
        if group is None:
            return False
        owned = self._queues[group].pop(name)
        self._gone.add(name)
        self.used_bytes -= owned.num_bytes
        self._shares.charge(group, -owned.num_bytes)
        self.num_changes += 1
        return True

    def touch(self, name: bytes) -> None:
        group = self._groups.get(name)
        if group is not None:
            self._queues[group].move_to_end(name)

    def oldest(self, group: int) -> Iterable[tuple[bytes, Owned]]:
        """All of a group, the least recently used first. Nothing may be added or removed meanwhile."""
        return self._queues.get(group, {}).items()

    def written_before(self, epoch: float) -> list[tuple[bytes, Owned]]:
        return [(name, owned) for name, owned in self._all() if owned.written_at < epoch]

    def _all(self) -> Iterator[tuple[bytes, Owned]]:
        return chain.from_iterable(queue.items() for queue in self._queues.values())

    def unnamed(self) -> list[str]:
        """Folders of which nobody has said whose they are: they count as the others'."""
        folders = dict.fromkeys(owned.folder for _, owned in self._all())
        return [folder for folder in folders if folder not in self._tenants]

    def name(self, folder: str, tenant: str) -> None:
        """Say it. `regroup` goes by it."""
        self._tenants[folder] = tenant
        self.num_changes += 1

    def regroup(self) -> None:
        """Charge objects to the groups that their tenants belong to now, those that move as the least recently used."""
        groups = {folder: self._shares.group_of(tenant) for folder, tenant in self._tenants.items()}
        for name, owned in reversed(list(self._all())):
            before = self._groups[name]
            group = groups.get(owned.folder, before)
            if group != before:
                self._shares.charge(before, -owned.num_bytes)
                del self._queues[before][name]
                self._charge(name, owned, group)
                self._queues[group].move_to_end(name, last=False)

    def _enter(self, name: bytes, owned: Owned) -> None:
        self._charge(name, owned, self._shares.group_of(self._tenants.get(owned.folder, "")))
        self.used_bytes += owned.num_bytes

    def _charge(self, name: bytes, owned: Owned, group: int) -> None:
        self._queues.setdefault(group, OrderedDict())[name] = owned
        self._groups[name] = group
        self._shares.charge(group, owned.num_bytes)

    # Saving

    def encode(self) -> bytes:
        packed: dict[str, tuple[int, bytearray]] = {}
        for name, owned in self._all():
            _, entries = packed.setdefault(owned.folder, (owned.num_bytes, bytearray()))
            entries += _ENTRY.pack(name, owned.written_at)
        folders = {
            folder: _Folder(size, bytes(entries), self._tenants.get(folder))
            for folder, (size, entries) in packed.items()
        }
        return msgspec.msgpack.encode(_Saved(_VERSION, folders, self._shares.limits()))

    def saved(self, num_changes: int) -> None:
        """What was encoded when there were so many changes is safe now."""
        self.num_changes -= num_changes
        if not self.num_changes:
            self._gone.clear()

    def merge(self, data: bytes | memoryview, *, limits: bool = True) -> int:
        """Add what a saved ledger has and we did not give up since, as used before ours; how many. Raises
        `msgspec.MsgspecError`. `limits`: whether those in it count as well."""
        saved = msgspec.msgpack.decode(data, type=_Saved)
        if saved.version != _VERSION:
            raise msgspec.ValidationError(f"a ledger of version {saved.version}; this side writes {_VERSION}")
        for tenant, fraction in saved.limits.items() if limits else ():
            self._shares.limit(tenant, fraction)
        before = len(self._groups)
        ours, self._queues = self._queues, {}
        for folder, found in saved.folders.items():
            if found.tenant is not None:
                self._tenants[folder] = found.tenant
            whole = len(found.entries) // _ENTRY.size * _ENTRY.size
            for name, written_at in _ENTRY.iter_unpack(found.entries[:whole]):
                if name not in self._groups and name not in self._gone:
                    self._enter(name, Owned(folder, found.object_bytes, written_at))
        for group, queue in ours.items():
            self._queues.setdefault(group, OrderedDict()).update(queue)
        return len(self._groups) - before
