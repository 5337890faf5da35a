"""The life of a block in a tier that lies in one range of bytes: what may be written, read and given up, and when.

    free -> reserved      by a holder, invisible, with a deadline
            -> committed  visible, immutable, checksummed; evictable unless leased or pinned
               -> leased  read by holders, each with a deadline; not evictable
               -> free    evicted, removed, too old, or found damaged
            -> stranded   the writer is late but alive, so it may still write: nobody else gets the place before the
                          writer gives it up, commits (too late: refused) or dies

A holder is whoever can die on its own: a worker's connection. When it goes, what it held goes: its leases end, what it
was writing is freed. A lease that runs out protects nothing any more; its holder learns that on release and must not
use what it read. A block removed while leased becomes invisible at once and is freed with its last lease.

Pure: bytes are moved by others, time is given. One ledger has one caller.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from headwater.kv.block import Block, Family
from headwater.kv.families import Families
from headwater.kv.journal import Journal, TierEvent
from headwater.kv.leases import Leases, Pins
from headwater.kv.policies import Policy
from headwater.kv.regrouping import Regrouping
from headwater.kv.reservations import Refusal, Reservation, Reservations
from headwater.kv.room import Room
from headwater.kv.rules import Counters, Rules
from headwater.kv.shares import OTHERS, Limits, Shares, ShareUsage
from headwater.kv.space import Space, slot_bytes_for
from headwater.kv.table import BlockTable, Record, residents
from headwater.types import Tier

_CLEAR_STEP = 1024


class Ledger:
    """See the module docstring. A slot is a record number of the table; tickets name reservations and leases."""

    def __init__(
        self, tier: Tier, table: BlockTable, space: Space, policy: Policy, shares: Shares, rules: Rules
    ) -> None:
        self.table, self.space, self.rules = table, space, rules
        self.counters = Counters()
        self.table_was_full = False
        """Whether a block had to go although there may have been bytes for another."""
        self.families = Families()
        self._policy, self._shares = policy, shares
        self._journal = Journal(tier)
        self._next_ticket = 0
        self._reservations = Reservations()
        self._leases = Leases(table.capacity)
        self._readers = self._leases.readers
        self._doomed: set[int] = set()
        self._pins = Pins(int(rules.max_pinned * space.num_bytes))
        self._regrouping = Regrouping(table, space, policy, shares)
        self._room = Room(table, space, policy, shares, self._leases, self._pins)

    # Writing

    def reserve(
        self, holder: int, family: Family, blocks: Sequence[Block], now: float
    ) -> tuple[int, list[int | Refusal]]:
        """A ticket, and per block the slot to write it into or why there is none. Never evicts blocks of the batch."""
        number = self.families.number(family)
        if number < 0:
            self.counters.num_refused += len(blocks)
            return -1, [Refusal.FULL] * len(blocks)
        found = self.table.find_all(b"".join([block.id for block in blocks]))
        keep = frozenset(found)
        ticket = self._ticket()
        size = family.payload_bytes
        group = self._shares.group_of(family.tenant)
        reservation = Reservation(holder, number, slot_bytes_for(size), now + self.rules.write_s)
        room = self._writers_room(size)
        answers: list[int | Refusal] = []
        for block, present in zip(blocks, found, strict=True):
            if present >= 0:
                self._policy.touch(present)
                answers.append(Refusal.PRESENT)
            elif block.id in self._reservations.writing:
                answers.append(Refusal.BUSY)
            elif len(reservation.blocks) >= room or (place := self._take(size, group, keep)) is None:
                self.counters.num_refused += 1
                answers.append(Refusal.FULL)
            else:
                slot, offset = place
                reservation.blocks[slot] = block, offset
                self._reservations.writing.add(block.id)
                answers.append(slot)
        if reservation.blocks:
            self.families.charge(number, len(reservation.blocks), reservation.num_bytes)
            self._reservations.begin(ticket, reservation)
        return ticket, answers

    def reserved_offset(self, ticket: int, slot: int) -> int:
        """Where a reserved slot lies."""
        return self._reservations[ticket].blocks[slot][1]

    def commit(self, holder: int, ticket: int, checksums: Mapping[int, int], now_s: int) -> list[int]:
        """Make visible what was written, by slot, and give back the rest of the reservation. The slots committed:
        none if it came too late or was never reserved."""
        reservation = self._reservations.end(holder, ticket)
        if reservation is None:
            return []
        number = reservation.family
        family = self.families[number]
        group = self._shares.group_of(family.tenant)
        committed: list[int] = []
        for slot, (block, offset) in reversed(reservation.blocks.items()):
            checksum = None if reservation.stranded else checksums.get(slot)
            if checksum is not None:
                block = Block(block.id, block.parent, block.position, checksum)
                if self.table.insert(slot, Record(block, offset, family.payload_bytes, now_s, number)):
                    self._policy.add(slot, group, _key(block))
                    committed.append(slot)
                    continue
            self._give_back(number, slot, offset)
        committed.reverse()
        self._shares.charge(group, len(committed) * reservation.slot_bytes)
        for slot in committed if not family.beside else ():
            block = reservation.blocks[slot][0]
            self._journal.stored(block.id, block.parent)
        self.counters.num_stored += len(committed)
        return committed

    # Reading

    def lease(
        self, holder: int, family: Family, ids: bytes, now: float, now_s: int, *, use: bool = True
    ) -> tuple[int, list[tuple[int, Record] | None]]:
        """Keep blocks from being evicted while they are read: a ticket, and slot and record per id, or None.

        `use`: whether that counts as being asked for.
        """
        number = self.families.find(family)
        found = [self._readable(slot, number, now_s) for slot in self.table.find_all(ids)]
        slots = [hit[0] for hit in found if hit is not None]
        if use:
            self.counters.num_hits += len(slots)
            self.counters.num_misses += len(found) - len(slots)
            for slot in reversed(slots):
                self._policy.touch(slot)
        ticket = self._ticket()
        if slots:
            self._leases.begin(holder, ticket, slots, now + self.rules.lease_s)
        return ticket, found

    def release(self, holder: int, ticket: int, damaged: Sequence[int] = ()) -> bool:
        """End a lease. `damaged`: slots whose payload did not match. False if the lease had run out before: what was
        read may be another block by now and must not be used."""
        slots = self._leases.slots(holder, ticket)
        if slots is None:
            return False
        for slot in damaged:
            if slot in slots and self.drop(slot):
                self.counters.num_damaged += 1
        self._end_lease(ticket)
        return True

    def touch(self, ids: bytes) -> None:
        """Count as read by somebody who took no lease."""
        for slot in reversed(self.table.find_all(ids)):
            if slot >= 0:
                self._policy.touch(slot)
                self.counters.num_hits += 1

    # Keeping and giving up

    def pin(self, ids: bytes, until: float) -> bytes:
        """Keep blocks from being evicted up to a time; one byte per id, 1 if it is pinned now."""
        return bytes(
            [slot >= 0 and self._pins.pin(slot, self._slot_bytes(slot), until) for slot in self.table.find_all(ids)]
        )

    def unpin(self, ids: bytes) -> int:
        return sum(self._pins.unpin(slot) for slot in self.table.find_all(ids))

    def limit(self, tenant: str, fraction: float) -> None:
        """See `Shares.limit`. What the tenant has here already is moved by `regroup`."""
        if self._shares.limit(tenant, fraction):
            self._regrouping.begin()

    def regroup(self) -> None:
        """See `Regrouping.step`."""
        self._regrouping.step(self.families)

    def drop(self, slot: int, *, evicted: bool = False) -> bool:
        """Make a committed block invisible; its place is free once nobody reads it."""
        record = self.table.read(slot)
        if record is None:
            return False
        self._pins.unpin(slot)
        self.table.remove(slot)
        group = self._policy.group_of(slot)
        self._policy.discard(slot, evicted=evicted)
        if not self.families[record.family].beside:
            self._journal.removed(record.block.id)
        slot_bytes = slot_bytes_for(record.payload_bytes)
        self._shares.charge(group, -slot_bytes)
        self.families.charge(record.family, -1, -slot_bytes)
        self.counters.num_evicted += evicted
        if self._readers[slot]:
            self._doomed.add(slot)
        else:
            self._free(slot, record.offset)
        return True

    def remove(self, ids: bytes) -> int:
        return sum(self.drop(slot) for slot in self.table.find_all(ids) if slot >= 0)

    def clear(self, *, tenant: str | None = None, model: str | None = None) -> Iterator[int]:
        """Forget blocks, some at each step, so that others may be served between two; how many went in that step.

        What is being written is called off at once: a block of a cleared tenant does not appear afterwards.
        """
        meant = self.families.matching(tenant, model)
        self._reservations.strand(meant)
        gone = 0
        for number, (slot, record) in enumerate(self.records(), start=1):
            if self.families[record.family].matches(tenant, model):
                gone += self.drop(slot)
            if number % _CLEAR_STEP == 0:
                yield gone
                gone = 0
        yield gone

    def drop_holder(self, holder: int) -> None:
        """The holder is gone, for certain: nothing writes or reads on its behalf any more."""
        for ticket in self._reservations.of(holder):
            reservation = self._reservations[ticket]
            self._reservations.end(holder, ticket)
            for slot, (_, offset) in reservation.blocks.items():
                self._give_back(reservation.family, slot, offset)
        for ticket in self._leases.of(holder):
            self._end_lease(ticket)

    def expire(self, now: float) -> None:
        """Let run out what is past its deadline."""
        for ticket in self._leases.due(now):
            self._end_lease(ticket)
            self.counters.num_expired += 1
        self.counters.num_expired += self._reservations.strand_due(now)
        self._pins.expire(now)

    def trim(self, max_blocks: int = 256) -> int:
        """Above the high watermark, evict towards the low one; how many blocks went."""
        if self.space.used_bytes <= self.rules.high_watermark * self.space.num_bytes:
            return 0
        target = self.rules.low_watermark * self.space.num_bytes
        number = 0
        while number < max_blocks and self.space.used_bytes > target:
            victim = self._room.victim(OTHERS, frozenset())
            if victim is None or not self._evict([victim]):
                break
            number += 1
        return number

    # Reopening

    def recover(self, families: Sequence[Family], limits: Limits) -> int:
        """Take over what a former life left in the table, without telling events; how many records were of no use."""
        self.families = Families(families)
        for tenant, fraction in limits.items():
            self._shares.limit(tenant, fraction)
        useless = 0
        for slot, record in self.table.recover():
            known = record.family < len(self.families)
            if not (
                known
                and self.families[record.family].payload_bytes == record.payload_bytes
                and self.space.claim(record.offset, record.payload_bytes, slot)
            ):
                self.table.discard(slot)
                useless += 1
            elif not self.table.adopt(slot, record):
                self.space.free(record.offset)
                self.table.discard(slot)
                useless += 1
            else:
                self.families.charge(record.family, 1, slot_bytes_for(record.payload_bytes))
                self._admit(slot, record)
        return useless

    # Looking

    @property
    def num_stranded(self) -> int:
        """Places that wait for a late writer."""
        return self._reservations.num_stranded

    @property
    def pinned_bytes(self) -> int:
        return self._pins.num_bytes

    def limits(self) -> Limits:
        """For `recover` of a later life."""
        return self._shares.limits()

    def share_usage(self) -> list[ShareUsage]:
        return self._shares.usage()

    def records(self, start: int = 0) -> Iterator[tuple[int, Record]]:
        """All committed blocks with record numbers from `start` on. They may change between two steps."""
        for slot in self.table.numbers(start):
            record = self.table.read(slot)
            if record is not None:
                yield slot, record

    def drain_events(self) -> list[TierEvent]:
        return self._journal.drain(self.resident)

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        """(id, parent) of all blocks that others are told of, as of this call."""
        return residents(self.table.snapshot(), self.families.beside())

    def check(self) -> None:
        """Every slot is in one state and every byte is accounted for. For tests."""
        self.table.check()
        self.space.check()
        committed = {slot for slot, _ in self.records()}
        reserved = [slot for one in self._reservations for slot in one.blocks]
        taken = [*committed, *reserved, *self._doomed]
        owners = [slot for chunk in range(self.space.num_chunks) for slot in self.space.owners_of_chunk(chunk)]
        assert sorted(owners) == sorted(taken), "space is leaked or taken twice"
        assert len(set(taken)) == len(taken), "a slot is in two states"
        self._leases.check()
        self._pins.check(committed)
        assert all(self._readers[slot] for slot in self._doomed), "a doomed block without readers"
        self._reservations.check()
        assert sum(bytes_ for _, _, bytes_ in self.families.usage()) <= self.space.used_bytes
        charged: Counter[int] = Counter()
        for slot in committed:
            charged[self._policy.group_of(slot)] += self._slot_bytes(slot)
        assert self._shares.used_bytes == charged

    # Inside

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _writers_room(self, size: int) -> int:
        """How many blocks of that size may be reserved now."""
        if not self.space.fits(size):
            return 0
        left = self.rules.max_reserved * self.space.num_bytes - self._reservations.num_bytes
        return int((left - size) // slot_bytes_for(size)) + 1

    def _take(self, size: int, group: int, keep: frozenset[int]) -> tuple[int, int] | None:
        """A record number and a place in space, evicting what has to go."""
        slot = self.table.take()
        if slot < 0:
            self.table_was_full = True
            victim = self._room.victim(group, keep)
            if victim is None or not self._evict([victim]):
                return None
            slot = self.table.take()
        offset = self.space.allocate(size, slot)
        if offset is None and self._evict(self._room.for_payload(size, group, keep)):
            offset = self.space.allocate(size, slot)
        if offset is None:
            self.table.give_back(slot)
            return None
        return slot, offset

    def _evict(self, slots: Sequence[int]) -> bool:
        """Whether anything went."""
        return sum([self.drop(slot, evicted=True) for slot in slots]) > 0

    def _admit(self, slot: int, record: Record) -> None:
        """A block is there: let the policy know. Its family has been charged."""
        group = self._shares.group_of(self.families[record.family].tenant)
        self._shares.charge(group, slot_bytes_for(record.payload_bytes))
        self._policy.add(slot, group, _key(record.block))

    def _readable(self, slot: int, family: int, now_s: int) -> tuple[int, Record] | None:
        record = self.table.read(slot) if slot >= 0 else None
        if record is None or record.family != family:
            return None
        if self.rules.ttl_s is not None and record.stored_at_s + self.rules.ttl_s < now_s:
            self.drop(slot)
            self.counters.num_expired += 1
            return None
        return slot, record

    def _end_lease(self, ticket: int) -> None:
        for slot in self._leases.end(ticket):
            if slot in self._doomed:
                self._doomed.discard(slot)
                self._free(slot, self.table.offset_of(slot))

    def _give_back(self, family: int, slot: int, offset: int) -> None:
        """A reserved place that was not committed."""
        self.families.charge(family, -1, -self.space.slot_bytes_at(offset))
        self._free(slot, offset)

    def _free(self, slot: int, offset: int) -> None:
        self.space.free(offset)
        self.table.give_back(slot)

    def _slot_bytes(self, slot: int) -> int:
        return self.space.slot_bytes_at(self.table.offset_of(slot))


def _key(block: Block) -> int:
    return int.from_bytes(block.id[:8], "little")
