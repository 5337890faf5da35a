"""What a node's store does about tiers that take long to say what they have."""

import asyncio
from collections.abc import Sequence

from headwater.clock import RealClock
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.identity import split_block_ids
from headwater.kv.node.prices import NodePrices
from headwater.kv.node.store import NodeStore, Piece
from headwater.kv.node.turns import Priority
from headwater.kv.stores.base import Absent
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.ledgered import TierOptions
from headwater.kv.stores.memory import MemoryTier
from headwater.runtime.conformance import run_leak_checked
from kv_fixtures import blocks_of, chain, family_of

SIZE = 8192


class Mute(MemoryTier):
    """Never answers what else it may have, and takes a moment to give what it has."""

    async def contains(self, family: Family, ids: bytes, first: int = 0) -> bytes:
        await asyncio.Event().wait()
        return bytes(len(ids) // 16)

    async def get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> list[Block | Absent]:
        await asyncio.sleep(0.05)
        return await super().get(family, ids, into)


def test_what_is_known_is_loaded_although_nobody_says_where_the_rest_is() -> None:
    async def check() -> None:
        clock, afar = RealClock(), Mute(32 << 20, "object")
        store = NodeStore(HostTier(TierOptions(4 << 20, min_block_bytes=4096), clock), [afar], {}, NodePrices(), clock)
        run = Piece(family_of(SIZE, ""), b"".join(chain("a", 10)), 0, ROOT)
        known = run.part(0, 5)
        await afar.put(known.family, *blocks_of(split_block_ids(known.ids), SIZE))
        try:
            assert await store.fetch(run, Priority.DEMANDED, 2.0) == 5
        finally:
            await store.close()

    run_leak_checked(check())
