"""The object tier over an in-memory store of obstore's: with single blocks as objects, with several, with many."""

import asyncio

import obstore
import pytest
from obstore.store import MemoryStore

from headwater.kv.stores.base import TierStore
from headwater.kv.stores.conformance import PAYLOAD_BYTES, ROOM_BLOCKS, TierConformance
from headwater.kv.stores.object.options import ObjectOptions
from headwater.kv.stores.object.tier import ObjectTier
from object_tier_parts import flip_payload_bit


@pytest.fixture(scope="module", autouse=True)
def _runtime_of_obstore() -> None:
    """Its first asynchronous call opens descriptors that stay."""

    async def call() -> None:
        await obstore.put_async(MemoryStore(), "a", b"")

    asyncio.run(call())


class ObjectTierConformance(TierConformance):
    run_blocks = 1

    async def open_tier(self) -> TierStore:
        run_bytes = self.run_blocks * PAYLOAD_BYTES
        options = ObjectOptions(
            "s3",
            "bucket",
            cap_bytes=2 * ROOM_BLOCKS * (PAYLOAD_BYTES + 128),
            min_object_bytes=run_bytes,
            target_object_bytes=run_bytes,
        )
        return ObjectTier(options, store=MemoryStore())

    async def damage(self, tier: TierStore, block_id: bytes) -> None:
        assert isinstance(tier, ObjectTier)
        flip_payload_bit(tier, block_id)

    async def upkeep(self, tier: TierStore) -> None:
        assert isinstance(tier, ObjectTier)
        await tier._upkeep._look()


class TestObjectPerBlock(ObjectTierConformance):
    run_blocks = 1


class TestObjectPerFour(ObjectTierConformance):
    run_blocks = 4


class TestGatheredOnly(ObjectTierConformance):
    """Runs that are never whole."""

    run_blocks = 32
