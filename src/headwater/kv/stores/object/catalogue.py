"""What this process knows of an object tier: which blocks can be had, what is owned, how much room is left. Pure.

A block is visible when it lies in a known object or is gathered in memory; every change of visibility is one event.
Bytes count against the cap from the moment they are reserved until the bucket has confirmed that they are gone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from headwater.kv.block import ROOT, Block, Family
from headwater.kv.identity import split_block_ids
from headwater.kv.journal import Journal
from headwater.kv.shares import MAX_GROUPS, Shares
from headwater.kv.stores.base import TierEvent, TierUsage
from headwater.kv.stores.object.gathering import Gathering, Loose
from headwater.kv.stores.object.known import KnownBlocks, KnownRun
from headwater.kv.stores.object.ledger import Ledger, Owned
from headwater.kv.stores.object.options import ObjectOptions
from headwater.kv.stores.object.runs import RunShape, family_digest, run_shape


@dataclass(slots=True)
class Counters:
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    hits: int = 0
    misses: int = 0
    damaged: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Doomed:
    """An object on its way out."""

    name: bytes
    key: str


class Catalogue:
    """See the module docstring."""

    def __init__(self, options: ObjectOptions) -> None:
        self.options = options
        self.count = Counters()
        self.shares = Shares(options.shares)
        self._early_limits: dict[str, float] | None = {}
        """Told before the ledger was asked for, whose limits are older; None once it was."""
        self._moved = False
        """Whether a tenant belongs to another group than some of what it has here."""
        self.ledger = Ledger(self.shares)
        self.blocks = KnownBlocks()
        self.gathering = Gathering(self.shares)
        self.families: dict[bytes, Family] = {}
        self.doomed: dict[bytes, Doomed] = {}
        """Objects that must go but are still there, or may be: those of ours count until they are gone."""
        self._doubtful: dict[bytes, int] = {}
        self._doubtful_bytes = 0
        self._reserved_bytes = 0
        self._journal = Journal("object")
        self._shapes: dict[Family, RunShape] = {}

    def shape(self, family: Family) -> RunShape:
        shape = self._shapes.get(family)
        if shape is None:
            limits = self.options
            shape = run_shape(family, min_bytes=limits.min_object_bytes, target_bytes=limits.target_object_bytes)
            self._shapes[family] = shape
            self.families[family_digest(family)] = family
        return shape

    # Visibility

    def visible(self, block_id: bytes) -> bool:
        return block_id in self.blocks or self.gathering.get(block_id) is not None

    def known(self, ids: bytes) -> bytes:
        return bytes(self.visible(block_id) for block_id in split_block_ids(ids))

    def gather(self, loose: Loose) -> None:
        self.gathering.add(replace(loose, group=self.group(loose.shape)))
        self._note_stored(loose.shape, loose.block.id, loose.block.parent)

    def drop_gathered(self, block_ids: Iterable[bytes]) -> int:
        gone = [loose for block_id in block_ids if (loose := self.gathering.pop(block_id)) is not None]
        for loose in gone:
            self._note_removed(loose.shape, [loose.block.id])
        return len(gone)

    def learn(self, shape: RunShape, name: bytes, ids: Iterable[tuple[int, bytes]], parent: bytes | None) -> None:
        """There is such an object, and these are blocks of it. `parent`: of the first of `ids`, if it is known."""
        pairs = list(ids)
        fresh = set(self.blocks.learn(shape, name, pairs))
        for index, block_id in pairs:
            if index in fresh and self.gathering.pop(block_id) is None:
                self._note_stored(shape, block_id, parent)
            parent = block_id
        while len(self.blocks) > self.options.max_known_blocks:
            oldest = self.blocks.oldest()
            if oldest is None or oldest.name == name:
                return
            self.forget(oldest.name)

    def use(self, block_id: bytes) -> None:
        """It is wanted: the object that holds it is the last to be evicted."""
        found = self.blocks.find(block_id)
        if found is not None:
            self.used(found[0])

    def used(self, run: KnownRun) -> None:
        self.blocks.touch(run)
        self.ledger.touch(run.name)

    def restore(self, block: Block) -> bool:
        """Whether a block that was removed here and is put again is still there."""
        restored = self.blocks.restore(block.id)
        if restored and (found := self.blocks.find(block.id)) is not None:
            self._note_stored(found[0].shape, block.id, block.parent)
        return restored

    def forget(self, name: bytes) -> int:
        """An object is gone, or not to be counted on: how many blocks with it."""
        run = self.blocks.run(name)
        if run is None:
            return 0
        gone = self.blocks.forget(name)
        self._note_removed(run.shape, gone)
        return len(gone)

    def remove(self, block_id: bytes) -> bool:
        """Forget one block; its object goes once nothing of it is left."""
        if self.drop_gathered([block_id]):
            return True
        run = self.blocks.remove(block_id)
        if run is None:
            return False
        self._note_removed(run.shape, [block_id])
        if not run.num_blocks:
            self.doom(run)
        return True

    def doom(self, run: KnownRun) -> None:
        """An object that must go."""
        self.forget(run.name)
        self.doomed[run.name] = Doomed(run.name, run.shape.key(run.name))

    # Room

    @property
    def used_bytes(self) -> int:
        return self.ledger.used_bytes + self.gathering.num_bytes + self._reserved_bytes + self._doubtful_bytes

    def fits(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.options.cap_bytes

    def reserve(self, num_bytes: int) -> None:
        self._reserved_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._reserved_bytes -= num_bytes

    def own(self, shape: RunShape, name: bytes, epoch: float) -> None:
        self._settle_doubt(name)
        self.doomed.pop(name, None)
        tenant = self.families[shape.family].tenant
        self.ledger.add(name, Owned(shape.folder, shape.object_bytes, int(epoch)), tenant)

    def doubt(self, shape: RunShape, name: bytes) -> None:
        """A write of unknown outcome: counted and doomed until the bucket has answered."""
        if name not in self.ledger and name not in self._doubtful:
            self._doubtful[name] = shape.object_bytes
            self._doubtful_bytes += shape.object_bytes
        self.doomed[name] = Doomed(name, shape.key(name))

    def gone(self, name: bytes) -> None:
        """The bucket has confirmed that an object is not there."""
        self._settle_doubt(name)
        self.doomed.pop(name, None)
        self.ledger.remove(name)
        self.forget(name)

    def victims(self, num_bytes: int, spared: set[bytes], group: int) -> list[Doomed]:
        """Objects of ours whose going makes room for a group of tenants: of whoever has to pay, the least recently used
        first, and doomed ones before all. They are invisible from now on."""
        chosen = list(self.doomed.values())
        freed = sum(self._doubtful.get(one.name, 0) or self._owned_bytes(one.name) for one in chosen)
        payers = self.shares.payers(group)
        for name, owned in chain.from_iterable(self.ledger.oldest(payer) for payer in payers):
            if freed >= num_bytes:
                break
            if name in spared or name in self.doomed:
                continue
            chosen.append(self.evict(name, owned))
            freed += owned.num_bytes
        return chosen

    def gathered(self, group: int) -> Iterator[Loose]:
        """Blocks in memory in the order in which they make room for a group of tenants."""
        oldest = self.gathering.oldest()
        return (loose for payer in self.shares.payers(group) for loose in oldest if loose.group == payer)

    def evict(self, name: bytes, owned: Owned) -> Doomed:
        """An object of ours that must go: invisible from now on."""
        self.count.evicted += self.forget(name)
        doomed = self.doomed[name] = Doomed(name, f"{owned.folder}{name.hex()}")
        return doomed

    def _owned_bytes(self, name: bytes) -> int:
        owned = self.ledger.get(name)
        return owned.num_bytes if owned else 0

    def _settle_doubt(self, name: bytes) -> None:
        self._doubtful_bytes -= self._doubtful.pop(name, 0)

    # Tenants

    def group(self, shape: RunShape) -> int:
        return self.shares.group_of(self.families[shape.family].tenant)

    def limit(self, tenant: str, fraction: float) -> None:
        """See `Shares.limit`; what the tenant has here already is moved by `regroup`."""
        early = self._early_limits
        if early is not None and (tenant in early or len(early) < MAX_GROUPS):
            early[tenant] = fraction
        before = self.shares.limits()
        self._moved |= self.shares.limit(tenant, fraction)
        if self.shares.limits() != before:
            self.ledger.num_changes += 1

    def loaded(self) -> None:
        """The ledger was asked for: what was told before holds against what is in it."""
        early, self._early_limits = self._early_limits or {}, None
        for tenant, fraction in early.items():
            self.limit(tenant, fraction)
        self._moved = True

    def regroup(self) -> None:
        """Charge all to the groups that tenants belong to now."""
        if self._moved:
            self._moved = False
            self.ledger.regroup()
            self.gathering.regroup(self.group)

    # Reports

    def usage(self) -> TierUsage:
        count = self.count
        return TierUsage(
            num_blocks=len(self.blocks) + len(self.gathering),
            used_bytes=self.used_bytes,
            cap_bytes=self.options.cap_bytes,
            num_stored=count.stored,
            num_evicted=count.evicted,
            num_refused=count.refused,
            num_hits=count.hits,
            num_misses=count.misses,
            num_damaged=count.damaged,
            num_failed=count.failed,
        )

    def drain_events(self) -> list[TierEvent]:
        return self._journal.drain(self.resident)

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        oldest = self.gathering.oldest()
        gathered = ((loose.block.id, loose.block.parent) for loose in oldest if not loose.shape.beside)
        return chain(self.blocks.resident(), gathered)

    def _note_stored(self, shape: RunShape, block_id: bytes, parent: bytes | None) -> None:
        if not shape.beside:
            self._journal.stored(block_id, parent or ROOT)

    def _note_removed(self, shape: RunShape, block_ids: list[bytes]) -> None:
        for block_id in block_ids if not shape.beside else ():
            self._journal.removed(block_id)
