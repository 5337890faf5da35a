"""The object tier: blocks in S3, Azure Blob or Google Cloud Storage, shared by all nodes that name the same place.

Blocks are packed into runs (`runs`): one object each, created only if there is none, found by name and never by
listing, so a node that knows nothing finds what others wrote. Each node deletes by cap what it wrote itself (`ledger`).
An object store that fails costs time within bounds and then nothing: the breaker opens and blocks count as absent.

What is not a whole run yet waits in memory, visible to this process, and is lost with it.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headwater.clock import Clock, RealClock
from headwater.errors import StoreClosed
from headwater.kv.block import Block, Family
from headwater.kv.identity import split_block_ids
from headwater.kv.shares import ShareUsage
from headwater.kv.stores.base import Absent, Kept, TierEvent, TierUsage
from headwater.kv.stores.breaker import Breaker
from headwater.kv.stores.object.bucket import Bucket, BucketCounts
from headwater.kv.stores.object.catalogue import Catalogue
from headwater.kv.stores.object.connect import Clients, connect
from headwater.kv.stores.object.options import ObjectOptions
from headwater.kv.stores.object.reading import Reader
from headwater.kv.stores.object.upkeep import Upkeep
from headwater.kv.stores.object.writing import Writer
from headwater.kv.stores.searches import Searches
from headwater.types import Tier

_MAX_CALLS = 64


class ObjectTier:
    """See the module docstring. Made on the event loop that drives it."""

    def __init__(self, options: ObjectOptions, *, store: Any = None, clock: Clock | None = None) -> None:
        """`store`: an obstore client to use instead of the one that `options` describe."""
        clock = clock or RealClock()
        chance = random.Random().random
        self.tier: Tier = "object"
        self._catalogue = Catalogue(options)
        clients = connect(options) if store is None else Clients(store, store)
        self._bucket = Bucket(clients, options, Breaker(clock, chance))
        self._reader = Reader(self._catalogue, self._bucket, clock)
        self._writer = Writer(self._catalogue, self._bucket, self._reader, clock)
        self._upkeep = Upkeep(self._catalogue, self._bucket, self._writer, clock, chance)
        self._calls = asyncio.Semaphore(_MAX_CALLS)
        self._searches = Searches()
        self._closed = False
        self._upkeep.start()

    @property
    def requests(self) -> BucketCounts:
        return self._bucket.counts

    def known(self, ids: bytes) -> bytes:
        return self._catalogue.known(ids)

    async def contains(self, family: Family, ids: bytes, first: int = 0) -> bytes:
        self._check_open()
        await self._searches.run(self._reader.search(family, ids, first))
        return self.known(ids)

    async def put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        async with self._in_flight():
            await self._upkeep.loaded()
            return await self._writer.put(family, blocks, payloads)

    async def get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> list[Block | Absent]:
        async with self._in_flight():
            return await self._reader.get(family, ids, into)

    async def remove(self, ids: bytes) -> int:
        self._check_open()
        removed = sum(map(self._catalogue.remove, split_block_ids(ids)))
        await self._writer.delete_doomed()
        return removed

    async def clear(self, *, tenant: str | None = None, model: str | None = None) -> int:
        self._check_open()
        return await self._upkeep.clear(tenant=tenant, model=model)

    def limit(self, tenant: str, fraction: float) -> None:
        self._catalogue.limit(tenant, fraction)

    def shares(self) -> list[ShareUsage]:
        return self._catalogue.shares.usage()

    def usage(self) -> TierUsage:
        return self._catalogue.usage()

    def drain_events(self) -> list[TierEvent]:
        return self._catalogue.drain_events()

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        return self._catalogue.resident()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._catalogue.options.request_timeout_s):
                for _ in range(_MAX_CALLS):  # each call in flight holds one, and those in line find it closed
                    await self._calls.acquire()
        await self._searches.close()
        await self._upkeep.close()
        await self._reader.close()
        self._bucket.close()

    @asynccontextmanager
    async def _in_flight(self) -> AsyncIterator[None]:
        self._check_open()
        async with self._calls:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the object tier is closed")
