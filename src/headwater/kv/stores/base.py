"""The contract of a tier. `headwater.kv.stores.conformance` is its test.

A tier keeps opaque payloads by block id. It is driven by one event loop; `known`, `usage` and `drain_events` never
wait, everything else may. Bytes go straight between the caller's buffers and the medium: the caller owns the buffers,
keeps them alive and leaves them alone until the call returns.

Promises every tier keeps:

- A block is visible only once it is complete. A put that fails, is cancelled or dies half-way leaves nothing visible.
- A block is immutable: a second put of the same id changes nothing (`PRESENT`).
- What `get` reports as a `Block` has been checked, in the caller's buffer, against the block's checksum. Damaged
  blocks are reported `DAMAGED`, removed, and counted; what is then in the buffer must not be used. A block of another
  size than the family says is `MISSING`.
- `usage().used_bytes` never exceeds `usage().cap_bytes`, at no instant.
- The answer to a batch has one entry per id, in order. One bad block never fails its batch.
- The tier as a whole being out of reach raises `TierUnavailable`, within a deadline of the tier's own.
- Work beyond the tier's bound of calls in flight waits its turn; cancelling a waiting call takes it out of the line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from headwater.kv.block import Block, Family
from headwater.kv.shares import ShareUsage
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.types import Tier

TierEvent = BlocksStored | BlocksRemoved | BlocksCleared


class Kept(Enum):
    """What became of a block that was put."""

    STORED = "stored"
    PRESENT = "present"
    """Was there already; nothing was written."""
    REFUSED = "refused"
    """No room that may be taken: pinned or leased blocks, the tenant's share, a payload larger than the tier."""
    FAILED = "failed"
    """The medium did."""


class Absent(Enum):
    """Why a block was not got."""

    MISSING = "missing"
    DAMAGED = "damaged"
    FAILED = "failed"
    """The medium failed; the block may still be there."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What an operator sees of a tier. Counters run since the tier was opened."""

    num_blocks: int
    used_bytes: int
    """What it takes on the medium, slack and headers included."""
    cap_bytes: int
    num_stored: int = 0
    num_evicted: int = 0
    num_refused: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_damaged: int = 0
    num_failed: int = 0


class TierStore(Protocol):
    """See the module docstring."""

    @property
    def tier(self) -> Tier: ...

    def known(self, ids: bytes) -> bytes:
        """One byte per joined id: 1 if the block is here as far as this process knows, else 0. Never waits.

        For a tier that others write to as well, 0 may mean "not known here": `contains` asks the medium.
        """
        ...

    async def contains(self, family: Family, ids: bytes, first: int = 0) -> bytes:
        """As `known`, after asking the medium where it is shared. `ids` are consecutive blocks of one chain and `first`
        is the position of the first: names of packed objects follow from it, so that nothing has to be listed."""
        ...

    async def put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        """Keep blocks; `payloads[i]` has exactly `family.payload_bytes` bytes and is not checked against its checksum
        here. May evict others to make room, never one of the same batch. Repeated ids within a batch are `PRESENT`."""
        ...

    async def get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> list[Block | Absent]:
        """Read blocks into buffers of `family.payload_bytes` bytes each, one per joined id."""
        ...

    async def remove(self, ids: bytes) -> int:
        """Forget blocks; how many were there. Blocks that are being read go once their readers are done."""
        ...

    async def clear(self, *, tenant: str | None = None, model: str | None = None) -> int:
        """Forget all blocks of a tenant, of a model, of both together, or of everyone; how many there were."""
        ...

    def limit(self, tenant: str, fraction: float) -> None:
        """How much of the tier blocks of this tenant may fill while others want room; 1: as much as anybody. For what
        is put from now on, and soon for what is there; what was guaranteed to the tenant stays."""
        ...

    def shares(self) -> list[ShareUsage]:
        """What tenants with a share or limit take, and all others together."""
        ...

    def usage(self) -> TierUsage: ...

    def drain_events(self) -> list[TierEvent]:
        """What became resident and what went since the last call, in order, with this tier's name in it.

        Nothing of families that are `beside` others. Bounded: where too much has gathered, one `BlocksCleared` followed
        by what is resident now stands for it.
        """
        ...

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        """(id, parent) of everything known here that events tell of, as it is when this is called; read at leisure."""
        ...

    async def close(self) -> None:
        """Finish what is being written, refuse what waits, let go of the medium. Idempotent."""
        ...
