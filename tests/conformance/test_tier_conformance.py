"""The tiers against the contract."""

from headwater.clock import RealClock
from headwater.kv.stores.base import TierStore
from headwater.kv.stores.conformance import PAYLOAD_BYTES, ROOM_BLOCKS, TierConformance
from headwater.kv.stores.host import HostTier, TierOptions
from headwater.kv.stores.memory import MemoryTier


class TestMemoryTier(TierConformance):
    async def open_tier(self) -> TierStore:
        return MemoryTier(ROOM_BLOCKS * PAYLOAD_BYTES)

    async def damage(self, tier: TierStore, block_id: bytes) -> None:
        assert isinstance(tier, MemoryTier)
        tier.corrupt(block_id)


class TestHostTier(TierConformance):
    async def open_tier(self) -> TierStore:
        return HostTier(TierOptions(cap_bytes=2 << 20, min_block_bytes=4096), RealClock())

    async def damage(self, tier: TierStore, block_id: bytes) -> None:
        assert isinstance(tier, HostTier)
        tier.pool.data[tier.ledger.table.offset_of(tier.ledger.table.find(block_id))] ^= 1
