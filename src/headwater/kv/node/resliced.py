"""Loading the blocks of one tensor-parallel shard from those that another number of workers stored."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import Piece
from headwater.kv.shards import Slice

_BATCH_BYTES = 32 << 20


async def load_resliced(
    client: StoreClient,
    sources: Mapping[int, Piece],
    slices: Sequence[Slice],
    into: Sequence[memoryview],
    *,
    timeout_s: float,
) -> int:
    """How many blocks, from the first on, were put together. `sources`: the chain of each stored rank that the slices
    name (ids differ by rank, as layouts do); all of the same number of blocks."""
    deadline = time.monotonic() + timeout_s
    block_bytes = sum(chain.family.payload_bytes for chain in sources.values())
    step = max(1, _BATCH_BYTES // block_bytes)
    done = 0
    while done < len(into) and time.monotonic() < deadline:
        part = into[done : done + step]
        loaded = await _load_part(client, sources, slices, done, part, deadline)
        done += loaded
        if loaded < len(part):
            break
    return done


async def _load_part(
    client: StoreClient,
    sources: Mapping[int, Piece],
    slices: Sequence[Slice],
    first: int,
    into: Sequence[memoryview],
    deadline: float,
) -> int:
    chains = {rank: chain.part(first, first + len(into)) for rank, chain in sources.items()}
    scratch = {
        rank: [memoryview(bytearray(chain.family.payload_bytes)) for _ in into] for rank, chain in chains.items()
    }
    timeout_s = max(0.0, deadline - time.monotonic())
    counts = await asyncio.gather(*(client.load(chains[rank], scratch[rank], timeout_s=timeout_s) for rank in chains))
    whole = min(counts)
    for number in range(whole):
        for rank, source, target, num_bytes in slices:
            into[number][target : target + num_bytes] = scratch[rank][number][source : source + num_bytes]
    return whole
