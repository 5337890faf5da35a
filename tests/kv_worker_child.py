"""A worker that stores and loads blocks of a node's store, for ever or until it is killed: the tests' and the bench's.

    python kv_worker_child.py SOCKET BLOCK_BYTES NUMBER SECONDS

Every payload that arrives is compared with what its id says. Ends with 0, with 3 if anything wrong was served.
"""

import asyncio
import random
import sys
import time
from pathlib import Path

from headwater.kv.block import ROOT
from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import Piece
from kv_fixtures import buffers, chain, family_of, payload_of


async def work(path: Path, size: int, number: int, seconds: float) -> int:
    client = StoreClient(path, f"worker {number}")
    await client.start(patience_s=10.0)
    draw = random.Random(number)
    into = buffers(24, size)
    until = time.monotonic() + seconds
    loaded = 0
    print("working", flush=True)
    while time.monotonic() < until:
        ids = chain(f"shared {draw.randrange(12)}", draw.randrange(8, 24))
        run = Piece(family_of(size), b"".join(ids), 0, ROOT)
        arrived = await client.load(run, into, timeout_s=1.0)
        if any(into[n] != payload_of(ids[n], size) for n in range(arrived)):
            return 3
        loaded += arrived
        await client.offer(run, [memoryview(payload_of(block_id, size)) for block_id in ids])
    await client.close()
    print(f"{loaded} blocks loaded", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
