"""What this node keeps in the bucket: the basis of its cap, of eviction and of expiry. Pure.

It is saved as one object under the owner's name, so that a restarted node knows what it owns without listing anything.
Objects written after the last saving and before a crash belong to nobody; they go when they expire.
"""

from collections import OrderedDict
from struct import Struct
from typing import NamedTuple

import msgspec

_ENTRY = Struct("<16sQ")
_VERSION = 1


class Owned(NamedTuple):
    folder: str
    num_bytes: int
    written_at: int
    """Seconds since 1970."""


class _Folder(msgspec.Struct, frozen=True, array_like=True):
    object_bytes: int
    entries: bytes


class _Saved(msgspec.Struct, frozen=True):
    version: int
    folders: dict[str, _Folder]


class Ledger:
    """Objects in order of use, the least recently used first."""

    def __init__(self) -> None:
        self._owned: OrderedDict[bytes, Owned] = OrderedDict()
        self._gone: set[bytes] = set()
        self.used_bytes = 0
        self.num_changes = 0
        """Since it was last saved."""

    def __len__(self) -> int:
        return len(self._owned)

    def __contains__(self, name: bytes) -> bool:
        return name in self._owned

    def get(self, name: bytes) -> Owned | None:
        return self._owned.get(name)

    def add(self, name: bytes, owned: Owned) -> None:
        if name in self._owned:
            return
        self._owned[name] = owned
        self._gone.discard(name)
        self.used_bytes += owned.num_bytes
        self.num_changes += 1

    def remove(self, name: bytes) -> bool:
        owned = self._owned.pop(name, None)
        if owned is None:
            return False
        self._gone.add(name)
        self.used_bytes -= owned.num_bytes
        self.num_changes += 1
        return True

    def touch(self, name: bytes) -> None:
        if name in self._owned:
            self._owned.move_to_end(name)

    def oldest(self) -> list[tuple[bytes, Owned]]:
        """All, the least recently used first."""
        return list(self._owned.items())

    def written_before(self, epoch: float) -> list[tuple[bytes, Owned]]:
        return [(name, owned) for name, owned in self._owned.items() if owned.written_at < epoch]

    # Saving

    def encode(self) -> bytes:
        packed: dict[str, tuple[int, bytearray]] = {}
        for name, owned in self._owned.items():
            _, entries = packed.setdefault(owned.folder, (owned.num_bytes, bytearray()))
            entries += _ENTRY.pack(name, owned.written_at)
        folders = {folder: _Folder(size, bytes(entries)) for folder, (size, entries) in packed.items()}
        return msgspec.msgpack.encode(_Saved(_VERSION, folders))

    def saved(self, num_changes: int) -> None:
        """What was encoded when there were so many changes is safe now."""
        self.num_changes -= num_changes
        if not self.num_changes:
            self._gone.clear()

    def merge(self, data: bytes | memoryview) -> int:
        """Add what a saved ledger has and we did not give up since; how many. Raises `msgspec.MsgspecError`."""
        saved = msgspec.msgpack.decode(data, type=_Saved)
        if saved.version != _VERSION:
            raise msgspec.ValidationError(f"a ledger of version {saved.version}; this side writes {_VERSION}")
        ours, self._owned = self._owned, OrderedDict()
        before = len(ours)
        for folder, found in saved.folders.items():
            whole = len(found.entries) // _ENTRY.size * _ENTRY.size
            for name, written_at in _ENTRY.iter_unpack(found.entries[:whole]):
                if name not in ours and name not in self._gone:
                    self._owned[name] = Owned(folder, found.object_bytes, written_at)
                    self.used_bytes += found.object_bytes
        self._owned.update(ours)
        return len(self._owned) - before
