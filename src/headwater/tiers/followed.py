"""What there is to say between cluster and store about an engine that goes to the store by itself.

Now and then the store is asked what it has learned of its tiers, which routers are told, and is told what computing
costs here, which decides what is worth writing down. Loads and stores are the engine's own.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from headwater.errors import StoreError
from headwater.kv.block import Family
from headwater.kv.node.client import StoreClient
from headwater.kv.node.wire import TierStatus
from headwater.kv.pricing import ComputeRate
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import StoreCounts
from headwater.types import Tier

_ASK_S = 10.0
_MAX_DESCRIBED = 64
_MIB = 1 << 20


class Followed:
    """From `start` to `close`. `rate`: what computing a block costs, as far as it was measured, which `price` tells the
    engine. `num_ranks`: of tensor parallelism."""

    def __init__(
        self,
        client: StoreClient,
        card: ModelCard,
        rate: Callable[[], ComputeRate],
        num_ranks: int,
        price: Callable[[ComputeRate], None] | None = None,
    ) -> None:
        self._client, self._card, self._rate, self._num_ranks, self._price = client, card, rate, num_ranks, price
        self._token_ms: dict[Tier, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._ask(), name="kv-store-followed")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def counts(self) -> StoreCounts:
        return StoreCounts(0, 0, 0, 0, dict(self._token_ms))

    async def _ask(self) -> None:
        while True:
            if self._price is not None:
                self._price(self._rate())
            with contextlib.suppress(StoreError):
                await self._exchange()
            await asyncio.sleep(_ASK_S)

    async def _exchange(self) -> None:
        tiers = (await self._client.status()).tiers
        families = list(_families(tiers, self._card.fingerprint))[:_MAX_DESCRIBED]
        if not families:
            return
        block_mib = max(self._loaded_bytes(family) for family in families) / _MIB
        token_mib = block_mib / self._card.block_size
        self._token_ms = {tier.tier: tier.load_ms_per_mib * token_mib for tier in tiers}
        for family in families:
            await self._client.describe(family, self._rate())

    def _loaded_bytes(self, family: Family) -> int:
        """Of a block, by one rank: all load at the same time."""
        return family.payload_bytes * max(1, family.parts // self._num_ranks)


def _families(tiers: Sequence[TierStatus], model: str) -> Iterator[Family]:
    """Of all tiers, each once."""
    used = (one for tier in tiers for one in tier.families if one.model == model)
    return iter(
        dict.fromkeys(
            Family(one.model, one.layout, one.tenant, one.payload_bytes, one.parts, one.beside) for one in used
        )
    )
