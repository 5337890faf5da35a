"""The host tier: payloads in one pool of shared memory per node, kept by the process that owns the pool.

Copies are made by whoever has the other end: workers copy to and from their engines (`headwater.kv.node`), this tier's
`put` and `get` copy for callers in this process, and lower tiers read and write places in the pool directly through
`reserve` and `lease`. Everything read is checked against its checksum after it was copied.
"""

from collections.abc import Mapping, Sequence

from headwater.clock import Clock
from headwater.kv.block import Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.reservations import Refusal
from headwater.kv.space import Space, chunk_bytes_for
from headwater.kv.stores.base import Absent, Kept, TierUsage
from headwater.kv.stores.ledgered import BlockWorth, LedgerTier, TierOptions, equal_worth, kept, make_ledger, usage_of
from headwater.kv.stores.shared_pool import SharedPool
from headwater.kv.table import BlockTable, Record
from headwater.types import Tier

LOCAL = 0
"""The holder that stands for this process itself."""


class HostTier(LedgerTier):
    """See the module docstring."""

    tier: Tier = "host"

    def __init__(self, options: TierOptions, clock: Clock, worth: BlockWorth = equal_worth) -> None:
        """Raises `ConfigError` if the memory is not there."""
        self.options = options
        self.pool = SharedPool.create(options.cap_bytes, options.num_records)
        table = BlockTable(self.pool.records, self.pool.index)
        space = Space(options.cap_bytes, chunk_bytes_for(options.cap_bytes))
        super().__init__(make_ledger("host", options, table, space, worth), clock)

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

    async def put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        ticket, answers = self.reserve(LOCAL, family, blocks)
        sums: dict[int, int] = {}
        for answer, block, payload in zip(answers, blocks, payloads, strict=True):
            if isinstance(answer, int):
                self.place(ticket, answer, family)[:] = payload
                sums[answer] = block.checksum
        committed = set(self.commit(LOCAL, ticket, sums))
        return kept(answers, committed)

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

    def usage(self) -> TierUsage:
        return usage_of(self.ledger, self.ledger.space.used_bytes, self.options.cap_bytes)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.ledger.table.close()
            self.pool.close()
