"""A child that writes blocks to a disk tier as fast as it can, until it is killed. Prints a line once it has begun."""

import asyncio
import sys
from pathlib import Path

from headwater.clock import RealClock
from headwater.kv.stores.disk import DiskOptions, DiskTier
from headwater.kv.stores.ledgered import TierOptions
from kv_fixtures import blocks_of, chain, family_of

LIMIT = 0.2
"""Of one of its three tenants."""


def open_tier(folder: Path, cap_bytes: int) -> DiskTier:
    return DiskTier(DiskOptions(folder, TierOptions(cap_bytes, min_block_bytes=4096)), RealClock())


async def write(folder: Path, cap_bytes: int, size: int, life: int) -> None:
    tier = open_tier(folder, cap_bytes)
    tier.limit("tenant 1", LIMIT)
    prepared = [blocks_of(chain(f"run {number % 40} of {life}", 16), size) for number in range(60)]
    print("writing", flush=True)
    while True:
        for number, (blocks, payloads) in enumerate(prepared):
            await tier.put(family_of(size, f"tenant {number % 3}"), blocks, payloads)
            if number % 7 == 0:
                await tier.remove(blocks[number % 16].id)


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
