"""The host tier: payloads in one pool of shared memory per node, kept by the process that owns the pool.

Copies are made by whoever has the other end: workers copy to and from their engines (`headwater.kv.node`), this tier's
`put` and `get` copy for callers in this process, and lower tiers read and write places in the pool directly through
`reserve` and `lease`. Everything read is checked against its checksum after it was copied.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headwater.clock import Clock
from headwater.errors import StoreClosed
from headwater.kv.block import Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.lifecycle import Ledger, Refusal, Rules
from headwater.kv.policies import PolicyName, make_policy
from headwater.kv.shares import Shares
from headwater.kv.space import Space, chunk_bytes_for
from headwater.kv.stores.base import Absent, Kept, TierEvent, TierUsage
from headwater.kv.stores.shared_pool import SharedPool
from headwater.kv.table import BlockTable, Record, residents
from headwater.types import Tier

LOCAL = 0
"""The holder that stands for this process itself."""
_MIN_RECORDS = 64
_MAX_RECORDS = 4 << 20
"""Unless told otherwise: a table that is not full costs memory too."""
_MIN_BLOCK_BYTES = 16 << 10

KEPT = {Refusal.PRESENT: Kept.PRESENT, Refusal.BUSY: Kept.PRESENT, Refusal.FULL: Kept.REFUSED}


BlockWorth = Callable[[Family, int], float]
"""Milliseconds per byte that having a block saves, by family and position."""


def equal_worth(family: Family, position: int) -> float:
    """Every block saves as much as any other."""
    return 1.0


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What an operator may say about a tier that lies in one range of bytes."""

    cap_bytes: int
    policy: PolicyName = "lru"
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    min_block_bytes: int = 0
    """Sizes the table: so many bytes per block at least, or fewer blocks fit than bytes would allow. 0: 16 KiB, more in
    tiers of more than 64 GiB, so that there are at most 4 million."""
    rules: Rules = field(default_factory=Rules)

    @property
    def num_records(self) -> int:
        smallest = self.min_block_bytes or max(_MIN_BLOCK_BYTES, -(-self.cap_bytes // _MAX_RECORDS))
        return max(_MIN_RECORDS, self.cap_bytes // smallest)


def make_ledger(
    tier: Tier, options: TierOptions, table: BlockTable, space: Space, worth: BlockWorth = equal_worth
) -> Ledger:
    def worth_of(slot: int) -> float:
        record = table.read(slot)
        return worth(ledger.families[record.family], record.block.position) if record is not None else 0.0

    shares = Shares(options.shares)
    policy = make_policy(options.policy, table.capacity, shares.num_groups, worth_of)
    ledger = Ledger(tier, table, space, policy, shares, options.rules)
    return ledger


def usage_of(ledger: Ledger, used_bytes: int, cap_bytes: int, num_failed: int = 0) -> TierUsage:
    counters = ledger.counters
    return TierUsage(
        num_blocks=ledger.table.num_blocks,
        used_bytes=used_bytes,
        cap_bytes=cap_bytes,
        num_stored=counters.num_stored,
        num_evicted=counters.num_evicted,
        num_refused=counters.num_refused,
        num_hits=counters.num_hits,
        num_misses=counters.num_misses,
        num_damaged=counters.num_damaged,
        num_failed=num_failed,
    )


async def in_steps(steps: Iterator[int]) -> int:
    """Their sum; others get their turn between two."""
    total = 0
    for step in steps:
        total += step
        await asyncio.sleep(0)
    return total


class HostTier:
    """See the module docstring."""

    tier: Tier = "host"

    def __init__(self, options: TierOptions, clock: Clock, worth: BlockWorth = equal_worth) -> None:
        """Raises `ConfigError` if the memory is not there."""
        self.options = options
        self.pool = SharedPool.create(options.cap_bytes, options.num_records)
        table = BlockTable(self.pool.records, self.pool.index)
        space = Space(options.cap_bytes, chunk_bytes_for(options.cap_bytes))
        self.ledger = make_ledger("host", options, table, space, worth)
        self._clock = clock
        self._closed = False

    # For callers that move bytes themselves

    def reserve(self, holder: int, family: Family, blocks: Sequence[Block]) -> tuple[int, list[int | Refusal]]:
        """See `Ledger.reserve`; slots are turned into offsets by `offset_of`."""
        self._check_open()
        return self.ledger.reserve(holder, family, blocks, self._clock.now())

    def commit(self, holder: int, ticket: int, checksums: Mapping[int, int]) -> list[int]:
        return self.ledger.commit(holder, ticket, checksums, int(self._clock.epoch()))

    def lease(
        self, holder: int, family: Family, ids: bytes, *, use: bool = True
    ) -> tuple[int, list[tuple[int, Record] | None]]:
        """See `Ledger.lease`."""
        self._check_open()
        return self.ledger.lease(holder, family, ids, self._clock.now(), int(self._clock.epoch()), use=use)

    def release(self, holder: int, ticket: int, damaged: Sequence[int] = ()) -> bool:
        return self.ledger.release(holder, ticket, damaged)

    def used(self, ids: bytes) -> None:
        """Blocks were read by somebody who did not ask."""
        self.ledger.touch(ids)

    def place(self, ticket: int, slot: int, family: Family) -> memoryview:
        """Where to write a block that was reserved."""
        return self.pool.view(self.ledger.reserved_offset(ticket, slot), family.payload_bytes)

    # The contract

    def known(self, ids: bytes) -> bytes:
        return self.ledger.table.known(ids)

    async def contains(self, family: Family, ids: bytes, first: int = 0) -> bytes:
        self._check_open()
        return self.known(ids)

    async def put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        ticket, answers = self.reserve(LOCAL, family, blocks)
        sums: dict[int, int] = {}
        for answer, block, payload in zip(answers, blocks, payloads, strict=True):
            if isinstance(answer, int):
                self.place(ticket, answer, family)[:] = payload
                sums[answer] = block.checksum
        committed = set(self.commit(LOCAL, ticket, sums))
        return [
            KEPT[answer] if isinstance(answer, Refusal) else (Kept.STORED if answer in committed else Kept.FAILED)
            for answer in answers
        ]

    async def get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> list[Block | Absent]:
        ticket, found = self.lease(LOCAL, family, ids)
        answers: list[Block | Absent] = []
        damaged: list[int] = []
        for hit, view in zip(found, into, strict=True):
            if hit is None:
                answers.append(Absent.MISSING)
                continue
            slot, record = hit
            view[:] = self.pool.view(record.offset, record.payload_bytes)
            if checksum(record.block.id, view) == record.block.checksum:
                answers.append(record.block)
            else:
                damaged.append(slot)
                answers.append(Absent.DAMAGED)
        self.release(LOCAL, ticket, damaged)
        return answers

    async def remove(self, ids: bytes) -> int:
        self._check_open()
        return self.ledger.remove(ids)

    async def clear(self, *, tenant: str | None = None, model: str | None = None) -> int:
        self._check_open()
        return await in_steps(self.ledger.clear(tenant=tenant, model=model))

    def usage(self) -> TierUsage:
        return usage_of(self.ledger, self.ledger.space.used_bytes, self.options.cap_bytes)

    def drain_events(self) -> list[TierEvent]:
        return self.ledger.drain_events()

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        return residents(self.ledger.table.snapshot())

    def tick(self) -> None:
        """Let run out what is due, and keep some room free. To be called every second or so."""
        self.ledger.expire(self._clock.now())
        self.ledger.trim()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.ledger.table.close()
            self.pool.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the host tier is closed")
