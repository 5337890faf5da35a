"""From an engine's own block hashes to our block ids, by hashing the token ids anew. Pure.

Our id of a block is chained from our id of its parent, so a block whose parent was never heard of cannot be named: it
is left out and counted. Engines may hold a block several times over; ours is stored with the first copy and removed
with the last. A cache salt of ours carries the namespace of the request, so that tenants stay apart and still find
their blocks; salts of other clients get a namespace of their own.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headwater.engines.kv_feed.owners import BlockOwners
from headwater.engines.kv_feed.wire import ForeignBatch, ForeignHash, ForeignMoved, ForeignRemoved, ForeignStored
from headwater.kv.connectors import naming
from headwater.kv.identity import chain_block_ids, namespace
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored, WorkerEvent
from headwater.types import BLOCK_ID_BYTES, BlockId, Tier


def salt_of(namespace_key: bytes, default: bytes) -> str | None:
    """The cache salt for a request with this namespace; None for the model's own."""
    return None if namespace_key in (b"", default) else naming.salt_of(namespace_key)


@dataclass(frozen=True, slots=True)
class _Known:
    """A block that the engine has told of."""

    block_id: BlockId
    namespace: bytes
    parent: BlockId | None = None


_Key = tuple[int, Tier, ForeignHash]


class FeedTranslator:
    """One engine, whatever its number of data-parallel ranks."""

    def __init__(self, fingerprint: str, kv_layout: str, block_size: int, owners: BlockOwners | None = None) -> None:
        """`owners`: whom to ask where an engine names no salts; without, such blocks are the model's own."""
        self._names_salts = False
        """Whether an event has: then one without is of a request without."""
        self.num_orphans = 0
        """Blocks left out because their parent, or whose they are, is not known."""
        self._owners = owners
        self._fingerprint = fingerprint
        self._kv_layout = kv_layout
        self._block_size = block_size
        self._default = namespace(fingerprint, kv_layout)
        self._known: dict[_Key, _Known] = {}
        self._copies: dict[_Key, int] = {}
        self._holders: dict[tuple[Tier, BlockId], int] = {}
        """Of one of our blocks: how many copies on how many ranks."""

    def apply(self, batch: ForeignBatch) -> list[WorkerEvent]:
        """The same batch in our terms."""
        told: list[WorkerEvent] = []
        for event in batch.events:
            match event:
                case ForeignStored(group=0):
                    self._store(batch.rank, event, told)
                case ForeignRemoved(group=0):
                    self._remove(batch.rank, event, told)
                case ForeignMoved():
                    self._move(batch.rank, event, told)
                case ForeignStored() | ForeignRemoved():
                    pass  # further groups of a hybrid model: the first one says what is cached
                case _:
                    self._clear(batch.rank, told)
        return told

    def clear(self) -> list[WorkerEvent]:
        """Forget everything, because what was missed cannot be made up for, or the engine is a new one."""
        self._known.clear()
        self._copies.clear()
        self._holders.clear()
        return [BlocksCleared()]

    def _store(self, rank: int, event: ForeignStored, told: list[WorkerEvent]) -> None:
        if event.block_size != self._block_size:
            return  # a partial block, or a group of another kind
        parent = self._parent(rank, event)
        if parent is None:
            self.num_orphans += len(event.hashes)
            return
        before = parent.block_id or None
        run = _Run(event.tier, before)
        ids = chain_block_ids(
            parent.namespace,
            array("I", event.token_ids).tobytes(),
            self._block_size,
            parent=parent.block_id or None,
            extra=_media(event.extra_keys),
        )
        for number, foreign in enumerate(event.hashes):
            block_id = BlockId(ids[number * BLOCK_ID_BYTES : (number + 1) * BLOCK_ID_BYTES])
            new = self._hold((rank, event.tier, foreign), _Known(block_id, parent.namespace, before))
            before = block_id
            run.add(block_id, new=new, told=told)
        run.end(told)

    def _parent(self, rank: int, event: ForeignStored) -> _Known | None:
        """What the run is chained to; an empty id at the start of a sequence, None when it cannot be told."""
        if event.parent is None:
            owner = self._namespace(event)
            return None if owner is None else _Known(BlockId(b""), owner)
        return self._known.get((rank, event.tier, event.parent)) or self._known.get((rank, "device", event.parent))

    def _namespace(self, event: ForeignStored) -> bytes | None:
        """Of a run that begins a sequence. An adapter alone does not say it where salts are not named."""
        salt = _salt(event)
        self._names_salts = self._names_salts or bool(salt)
        said = self._said_namespace(event.adapter, salt)
        if self._owners is None:
            return said
        foreign, first = event.hashes[0], array("I", event.token_ids[: self._block_size]).tobytes()
        if salt or (event.adapter is not None and self._names_salts):
            self._owners.learn(foreign, first, said)
            return said
        return self._owners.of(foreign, first, event.adapter, nobodys=None if event.adapter is None else said)

    def _said_namespace(self, adapter: str | None, salt: str) -> bytes:
        if (carried := naming.namespace_in(salt)) is not None:
            return carried
        if not salt and adapter is None:
            return self._default
        return namespace(self._fingerprint, self._kv_layout, adapter=adapter or "", salt=salt)

    def _remove(self, rank: int, event: ForeignRemoved, told: list[WorkerEvent]) -> None:
        gone: list[bytes] = []
        for foreign in event.hashes:
            key = (rank, event.tier, foreign)
            known = self._known.get(key)
            if known is None:
                continue
            self._copies[key] -= 1
            if not self._copies[key]:
                del self._copies[key], self._known[key]
            if self._release(event.tier, known.block_id):
                gone.append(known.block_id)
        if gone:
            told.append(BlocksRemoved(b"".join(gone), event.tier))

    def _move(self, rank: int, event: ForeignMoved, told: list[WorkerEvent]) -> None:
        """Stored in the new tier before it leaves the old one, so that it is known at every moment."""
        known = self._known.get((rank, event.before, event.hash))
        if known is None:
            return
        if self._hold((rank, event.after, event.hash), known):
            told.append(BlocksStored(known.block_id, known.parent, event.after))
        self._remove(rank, ForeignRemoved([event.hash], event.before), told)

    def _clear(self, rank: int, told: list[WorkerEvent]) -> None:
        gone: dict[Tier, list[bytes]] = {}
        for key in [key for key in self._known if key[0] == rank]:
            known, tier = self._known.pop(key), key[1]
            for _ in range(self._copies.pop(key)):
                if self._release(tier, known.block_id):
                    gone.setdefault(tier, []).append(known.block_id)
        if not self._known:
            told.append(BlocksCleared())
        else:
            told += [BlocksRemoved(b"".join(ids), tier) for tier, ids in gone.items()]

    def _hold(self, key: _Key, known: _Known) -> bool:
        """Whether that is the first copy."""
        self._known[key] = known
        self._copies[key] = self._copies.get(key, 0) + 1
        held = self._holders.get((key[1], known.block_id), 0)
        self._holders[key[1], known.block_id] = held + 1
        return not held

    def _release(self, tier: Tier, block_id: BlockId) -> bool:
        """Whether that was the last copy."""
        left = self._holders[tier, block_id] - 1
        if left:
            self._holders[tier, block_id] = left
            return False
        del self._holders[tier, block_id]
        return True


class _Run:
    """Consecutive new blocks of one sequence."""

    def __init__(self, tier: Tier, parent: BlockId | None) -> None:
        self._tier = tier
        self._previous = parent
        self._parent = parent
        self._ids: list[bytes] = []

    def add(self, block_id: BlockId, *, new: bool, told: list[WorkerEvent]) -> None:
        if not new:
            self.end(told)
        else:
            if not self._ids:
                self._parent = self._previous
            self._ids.append(block_id)
        self._previous = block_id

    def end(self, told: list[WorkerEvent]) -> None:
        if self._ids:
            told.append(BlocksStored(b"".join(self._ids), self._parent, self._tier))
            self._ids = []


def _salt(event: ForeignStored) -> str:
    """That of its first block, which alone is hashed with it; the adapter's name may be the same text."""
    keys = event.extra_keys[0] if event.extra_keys else None
    texts = [key for key in keys or () if isinstance(key, str)]
    if event.adapter is not None and event.adapter in texts:
        texts.remove(event.adapter)
    return texts[-1] if texts else ""


def _media(extra_keys: Sequence[Sequence[Any] | None]) -> Mapping[int, list[bytes]] | None:
    """Keys that are no plain texts: pairs of a medium's hash and its place."""
    found = {
        number: [msgspec.msgpack.encode(key) for key in keys if not isinstance(key, str)]
        for number, keys in enumerate(extra_keys)
        if keys
    }
    return {number: keys for number, keys in found.items() if keys} or None
