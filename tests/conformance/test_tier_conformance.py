"""The tiers against the contract."""

from headwater.kv.stores.base import TierStore
from headwater.kv.stores.conformance import PAYLOAD_BYTES, ROOM_BLOCKS, TierConformance
from headwater.kv.stores.memory import MemoryTier


class TestMemoryTier(TierConformance):
    async def open_tier(self) -> TierStore:
        return MemoryTier(ROOM_BLOCKS * PAYLOAD_BYTES)

    async def damage(self, tier: TierStore, block_id: bytes) -> None:
        assert isinstance(tier, MemoryTier)
        tier.corrupt(block_id)
