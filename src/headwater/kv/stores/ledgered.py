"""What tiers have in common whose blocks lie in one range of bytes, kept by a `Ledger`: the host and the disk tier.

A subclass opens the medium and moves the bytes.
"""

import asyncio
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headwater.clock import Clock
from headwater.errors import StoreClosed
from headwater.kv.block import Family
from headwater.kv.lifecycle import Ledger
from headwater.kv.policies import PolicyName, make_policy
from headwater.kv.reservations import Refusal
from headwater.kv.rules import Rules
from headwater.kv.shares import Shares, ShareUsage
from headwater.kv.space import Space
from headwater.kv.stores.base import Kept, TierEvent, TierUsage
from headwater.kv.table import BlockTable
from headwater.types import Tier

_MIN_RECORDS = 64
_MAX_RECORDS = 4 << 20
"""Unless told otherwise: a table that is not full costs memory too."""
_MIN_BLOCK_BYTES = 16 << 10

_KEPT = {Refusal.PRESENT: Kept.PRESENT, Refusal.BUSY: Kept.PRESENT, Refusal.FULL: Kept.REFUSED}


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


def kept(answers: Sequence[int | Refusal], committed: Container[int]) -> list[Kept]:
    """What became of blocks that were reserved with these answers, of which those in these places were committed."""
    return [
        _KEPT[answer] if isinstance(answer, Refusal) else (Kept.STORED if answer in committed else Kept.FAILED)
        for answer in answers
    ]


class LedgerTier:
    """See the module docstring. The half of `TierStore` that the ledger answers."""

    tier: Tier

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self.ledger = ledger
        self._clock = clock
        self._closed = False

    def known(self, ids: bytes) -> bytes:
        return self.ledger.table.known(ids)

    async def contains(self, family: Family, ids: bytes, first: int = 0) -> bytes:
        self._check_open()
        return self.known(ids)

    async def remove(self, ids: bytes) -> int:
        self._check_open()
        return self.ledger.remove(ids)

    async def clear(self, *, tenant: str | None = None, model: str | None = None) -> int:
        self._check_open()
        return await in_steps(self.ledger.clear(tenant=tenant, model=model))

    def limit(self, tenant: str, fraction: float) -> None:
        self.ledger.limit(tenant, fraction)

    def shares(self) -> list[ShareUsage]:
        return self.ledger.share_usage()

    def drain_events(self) -> list[TierEvent]:
        return self.ledger.drain_events()

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        return self.ledger.resident()

    def tick(self) -> None:
        """Let run out what is due, charge blocks to whom they belong, and keep some room free. To be called every
        second or so."""
        self.ledger.expire(self._clock.now())
        self.ledger.regroup()
        self.ledger.trim()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"the {self.tier} tier is closed")
