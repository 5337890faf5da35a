"""Metadata at scale, and what tenants learn of each other.

    python bench/kv_scale.py --blocks 10000000          # look-ups and stores per second, bytes per block
    python bench/kv_scale.py --tenants 2000             # can one tenant tell by the time what another has asked?

The first keeps the table of a tier with so many blocks in memory, without payloads: 4 KiB each are only reckoned with.
"""

import argparse
import asyncio
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from headwater.clock import RealClock
from headwater.kv.block import ROOT, Block
from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.lifecycle import Ledger
from headwater.kv.node.client import StoreClient
from headwater.kv.node.prices import NodePrices
from headwater.kv.node.server import Server
from headwater.kv.node.store import NodeStore, Piece
from headwater.kv.policies import make_policy
from headwater.kv.rules import Rules
from headwater.kv.shares import Shares
from headwater.kv.space import Space, chunk_bytes_for
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.ledgered import TierOptions
from headwater.kv.table import RECORD_BYTES, BlockTable, index_bytes
from kv_fixtures import family_of

BATCH = 128


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def metadata(num_blocks: int) -> None:
    before = resident_bytes()
    table = BlockTable(memoryview(bytearray(num_blocks * RECORD_BYTES)), memoryview(bytearray(index_bytes(num_blocks))))
    shares = Shares()
    space_bytes = num_blocks * 4096 + (256 << 20)  # only whole chunks are used: one more
    space = Space(space_bytes, chunk_bytes_for(space_bytes))
    policy = make_policy("lru", num_blocks, shares.num_groups, lambda slot: 1.0)
    ledger = Ledger("disk", table, space, policy, shares, Rules())
    family = family_of(4096)
    source = random.Random(1)
    sample: list[bytes] = []
    started = time.process_time()
    for first in range(0, num_blocks, BATCH):
        ids = source.randbytes(16 * min(BATCH, num_blocks - first))
        blocks = [Block(ids[at : at + 16], ROOT, at // 16, 0) for at in range(0, len(ids), 16)]
        ticket, slots = ledger.reserve(1, family, blocks, 0.0)
        ledger.commit(1, ticket, {slot: 1 for slot in slots if isinstance(slot, int)}, 1)
        if len(sample) < 20_000 and first % (BATCH * 4) == 0:
            sample.append(ids[: 16 * 32])
        if first % (BATCH * 32) == 0:
            ledger.drain_events()
    store_s = time.process_time() - started
    ledger.drain_events()
    used = resident_bytes() - before
    assert table.num_blocks > 0.99 * num_blocks
    started = time.process_time()
    for ids in sample:
        assert table.num_leading(ids) == 32
    lookup_s = time.process_time() - started
    misses = [source.randbytes(16 * 32) for _ in range(2000)]
    missed = time.process_time()
    for ids in misses:
        assert table.num_leading(ids) == 0
    miss_s = time.process_time() - missed
    print(f"{table.num_blocks} blocks: {used / table.num_blocks:.0f} bytes of memory per block")
    print(f"stored {table.num_blocks / store_s:,.0f} blocks/s")
    print(f"found {len(sample) * 32 / lookup_s:,.0f} blocks/s ({lookup_s / len(sample) * 1e6:.1f} us for 32 keys)")
    print(f"missed at the first of 32 keys in {miss_s / len(misses) * 1e6:.1f} us")


async def tenants(num_rounds: int) -> None:
    """Tenant B asks for prompts that tenant A has stored, and for prompts that nobody has, in turns."""
    size, tokens = 64 << 10, 16 * 64
    with tempfile.TemporaryDirectory(prefix="kv-scale-") as name:
        clock = RealClock()
        host = HostTier(TierOptions(256 << 20), clock)
        store = NodeStore(host, [], {}, NodePrices(), clock)
        server = Server(store, Path(name, "kv.sock"), clock)
        store.start()
        server.start()
        client = StoreClient(Path(name, "kv.sock"), "bench")
        await client.start(patience_s=5.0)
        keys = {tenant: namespace("model", "layout", salt=tenant) for tenant in ("a", "b")}
        prompts = [random.Random(number).randbytes(4 * tokens) for number in range(32)]
        into = [memoryview(bytearray(size)) for _ in range(tokens // 16)]
        for prompt in prompts:
            ids = chain_block_ids(keys["a"], prompt, 16)
            await client.offer(Piece(family_of(size, "a"), ids, 0, ROOT), into)
        times: dict[str, list[float]] = {"stored by a": [], "stored by nobody": []}
        for number in range(num_rounds):
            theirs = prompts[number % len(prompts)]
            for what, prompt in (
                ("stored by a", theirs),
                ("stored by nobody", random.Random(-number - 1).randbytes(4 * tokens)),
            ):
                run = Piece(family_of(size, "b"), chain_block_ids(keys["b"], prompt, 16), 0, ROOT)
                started = time.perf_counter()
                runs = await client.match(run)
                loaded = await client.load(run, into, timeout_s=1.0)
                times[what].append(time.perf_counter() - started)
                assert (runs, loaded) == ([], 0), "a block was shared between tenants"
        for what, took in times.items():
            took.sort()
            quartiles = [f"{took[len(took) * part // 4] * 1e6:.0f}" for part in (1, 2, 3)]
            print(f"tenant b asks for what is {what}: quartiles {', '.join(quartiles)} us")
        await client.close()
        await server.close()
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--tenants", type=int, default=0)
    args = parser.parse_args()
    os.nice(5)
    if args.blocks:
        metadata(args.blocks)
    if args.tenants:
        asyncio.run(tenants(args.tenants))


if __name__ == "__main__":
    main()
