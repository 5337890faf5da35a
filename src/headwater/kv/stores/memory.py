"""The in-process tier: blocks as bytes objects in a dict, least recently used first out. The twin of the real tiers
for simulations and tests; nothing outlives the process."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headwater.errors import StoreClosed
from headwater.kv.block import Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.identity import split_block_ids
from headwater.kv.resident import stored_runs
from headwater.kv.shares import Shares, ShareUsage
from headwater.kv.stores.base import Absent, Kept, TierEvent, TierUsage
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.types import Tier

_MAX_EVENTS = 10_000


class MemoryTier:
    """`cap_bytes` of payload."""

    def __init__(self, cap_bytes: int, tier: Tier = "host") -> None:
        self.tier: Tier = tier
        self._blocks: dict[bytes, tuple[Family, Block, bytes]] = {}
        self._shares = Shares()
        self._groups: dict[bytes, int] = {}
        self._usage = TierUsage(0, 0, cap_bytes)
        self._events: list[TierEvent] = []
        self._closed = False

    def known(self, ids: bytes) -> bytes:
        return bytes(block_id in self._blocks for block_id in split_block_ids(ids))

    async def contains(self, family: Family, ids: bytes, first: int = 0) -> bytes:
        self._check_open()
        return self.known(ids)

    async def put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        self._check_open()
        batch = {block.id for block in blocks}
        return [
            self._put(family, block, bytes(payload), batch) for block, payload in zip(blocks, payloads, strict=True)
        ]

    async def get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> list[Block | Absent]:
        self._check_open()
        return [self._get(family, block_id, view) for block_id, view in zip(split_block_ids(ids), into, strict=True)]

    async def remove(self, ids: bytes) -> int:
        self._check_open()
        return sum(self._drop(block_id) for block_id in split_block_ids(ids))

    async def clear(self, *, tenant: str | None = None, model: str | None = None) -> int:
        self._check_open()
        doomed = [block_id for block_id, (family, _, _) in self._blocks.items() if family.matches(tenant, model)]
        return sum(self._drop(block_id) for block_id in doomed)

    def limit(self, tenant: str, fraction: float) -> None:
        if not self._shares.limit(tenant, fraction):
            return
        group = self._shares.group_of(tenant)
        for block_id, (family, _, payload) in self._blocks.items():
            if family.tenant == tenant:
                self._shares.charge(self._groups[block_id], -len(payload))
                self._shares.charge(group, len(payload))
                self._groups[block_id] = group

    def shares(self) -> list[ShareUsage]:
        return self._shares.usage()

    def usage(self) -> TierUsage:
        return self._usage

    def drain_events(self) -> list[TierEvent]:
        events, self._events = self._events, []
        if len(events) < _MAX_EVENTS:
            return events
        resident = stored_runs(self.resident())
        return [BlocksCleared(self.tier), *(BlocksStored(run.block_ids, run.parent, self.tier) for run in resident)]

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        return iter([(block.id, block.parent) for family, block, _ in self._blocks.values() if not family.beside])

    async def close(self) -> None:
        self._closed = True
        self._blocks.clear()

    def corrupt(self, block_id: bytes) -> None:
        """Flip one bit of a block, as failing memory would: for tests of what lies above."""
        family, block, payload = self._blocks[block_id]
        self._blocks[block_id] = family, block, bytes([payload[0] ^ 1]) + payload[1:]

    def _put(self, family: Family, block: Block, payload: bytes, batch: set[bytes]) -> Kept:
        if block.id in self._blocks:
            return Kept.PRESENT
        evicted = 0
        while self._usage.used_bytes + len(payload) > self._usage.cap_bytes:
            victim = self._victim(family.tenant, batch)
            if victim is None or len(payload) > self._usage.cap_bytes:
                self._count(num_refused=1)
                return Kept.REFUSED
            evicted += self._drop(victim)
        self._blocks[block.id] = family, block, payload
        self._groups[block.id] = self._shares.group_of(family.tenant)
        self._shares.charge(self._groups[block.id], len(payload))
        self._count(num_stored=1, num_evicted=evicted, num_blocks=1, used_bytes=len(payload))
        self._note(family, BlocksStored(block.id, block.parent, self.tier))
        return Kept.STORED

    def _victim(self, tenant: str, batch: set[bytes]) -> bytes | None:
        payers = self._shares.payers(self._shares.group_of(tenant))
        mine = (block_id for payer in payers for block_id in self._blocks if self._groups[block_id] == payer)
        return next((block_id for block_id in mine if block_id not in batch), None)

    def _get(self, family: Family, block_id: bytes, into: memoryview) -> Block | Absent:
        found = self._blocks.get(block_id)
        if found is None or found[0] != family:
            self._count(num_misses=1)
            return Absent.MISSING
        _, block, payload = found
        into[:] = payload
        if checksum(block_id, into) != block.checksum:
            self._drop(block_id)
            self._count(num_damaged=1)
            return Absent.DAMAGED
        self._blocks[block_id] = self._blocks.pop(block_id)
        self._count(num_hits=1)
        return block

    def _drop(self, block_id: bytes) -> int:
        found = self._blocks.pop(block_id, None)
        if found is None:
            return 0
        self._shares.charge(self._groups.pop(block_id), -len(found[2]))
        self._count(num_blocks=-1, used_bytes=-len(found[2]))
        self._note(found[0], BlocksRemoved(block_id, self.tier))
        return 1

    def _count(self, **changes: int) -> None:
        self._usage = replace(
            self._usage, **{name: getattr(self._usage, name) + change for name, change in changes.items()}
        )

    def _note(self, family: Family, event: TierEvent) -> None:
        if len(self._events) < _MAX_EVENTS and not family.beside:
            self._events.append(event)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the tier is closed")
