"""The tiers against the contract."""

from pathlib import Path

import pytest

from headwater.clock import RealClock
from headwater.kv.stores.base import TierStore
from headwater.kv.stores.conformance import PAYLOAD_BYTES, ROOM_BLOCKS, TierConformance
from headwater.kv.stores.disk import DiskOptions, DiskTier
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.ledgered import TierOptions
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

    async def upkeep(self, tier: TierStore) -> None:
        assert isinstance(tier, HostTier)
        tier.tick()


@pytest.mark.parametrize("direct", [False, True])
class TestDiskTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, direct: bool) -> None:
        self.folder, self.direct = tmp_path / "tier", direct

    async def open_tier(self) -> TierStore:
        return DiskTier(DiskOptions(self.folder, TierOptions(3 << 20, min_block_bytes=4096), self.direct), RealClock())

    async def upkeep(self, tier: TierStore) -> None:
        assert isinstance(tier, DiskTier)
        tier.tick()

    async def damage(self, tier: TierStore, block_id: bytes) -> None:
        assert isinstance(tier, DiskTier)
        at = tier.ledger.table.offset_of(tier.ledger.table.find(block_id))
        with (self.folder / "blocks").open("r+b") as blocks:
            blocks.seek(at)
            byte = blocks.read(1)
            blocks.seek(at)
            blocks.write(bytes([byte[0] ^ 1]))
