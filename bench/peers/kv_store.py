"""LMCache's fs_native adapter beside our disk tier: same blocks, same disk, taking turns.

    python bench/peers/kv_store.py --lmcache PROGRAM [--keys 32] [--kib 256] [--rounds 8] [--turns 3]

LMCache is measured by its own `lmcache bench l2` in an empty folder, from within its process. Ours is the disk tier as
the node's store uses it, in one process as well, and look-ups are asked of the store's process over its socket, all
tiers with predicted times; from shared memory as well. LMCache neither checks what it reads nor bounds what it writes;
every block of ours carries a checksum that is verified. Both go through the page cache.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import uvloop

from headwater.clock import RealClock
from headwater.kv.block import Block
from headwater.kv.checksum import checksum
from headwater.kv.node.benchmark import Buffers, measure_lookups, store_process
from headwater.kv.stores.disk import DiskOptions, DiskTier
from headwater.kv.stores.ledgered import TierOptions


def lmcache(program: str, keys: int, kib: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of a round."""
    with tempfile.TemporaryDirectory(prefix="lmcache-") as folder:
        command = [
            *(program, "bench", "l2", "--l2-adapter", json.dumps({"type": "fs_native", "base_path": folder})),
            *("--num-keys", str(keys), "--data-size-kb", str(kib), "--rounds", str(rounds), "--warmup-rounds", "2"),
            *("--lookup-max-hit-rate", "1.0", "--format", "json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    result, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{\n") :])
    operations = [one for name, one in result["metrics"].items() if name.startswith("op_")]
    return {one["operation"].lower(): one["duration_p50_ms"] for one in operations}


async def ours(keys: int, kib: int, rounds: int) -> dict[str, float]:
    buffers = Buffers(kib << 10, keys)
    times: dict[str, list[float]] = {"store": [], "load": []}
    with tempfile.TemporaryDirectory(prefix="headwater-kv-") as folder:
        cap_bytes = (rounds + 8) * 4 * buffers.num_bytes
        tier = DiskTier(DiskOptions(Path(folder, "tier"), TierOptions(cap_bytes, min_block_bytes=4096)), RealClock())
        chains = [buffers.chain(f"round {number}") for number in range(rounds + 2)]
        for chain in chains:
            started = time.perf_counter()
            blocks = [
                block._replace(checksum=checksum(block.id, source))
                for block, source in zip(chain.blocks(), buffers.sources, strict=True)
            ]
            await tier.put(chain.family, blocks, buffers.sources)
            times["store"].append((time.perf_counter() - started) * 1e3)
        for chain in chains:
            started = time.perf_counter()
            found = await tier.get(chain.family, chain.ids, buffers.targets)
            times["load"].append((time.perf_counter() - started) * 1e3)
            assert [block.id for block in found if isinstance(block, Block)] == [b.id for b in chain.blocks()]
        assert buffers.targets == buffers.sources
        await tier.close()
    buffers.release()
    return {what: median(took[2:]) for what, took in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lmcache", required=True)
    parser.add_argument("--keys", type=int, default=32)
    parser.add_argument("--kib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    print(f"{args.keys} keys of {args.kib} KiB; load average {os.getloadavg()[0]:.1f}; medians in ms")
    print(f"{'turn':6}{'':10}{'store':>9}{'load':>9}{'lookup':>9}{'shared':>9}")
    for turn in range(args.turns):
        theirs = lmcache(args.lmcache, args.keys, args.kib, args.rounds)
        mine = uvloop.run(ours(args.keys, args.kib, args.rounds))
        with store_process(64 << 20, 4096) as path:
            lookups = uvloop.run(measure_lookups(path, args.keys, 200))
        print(f"{turn:<6}{'LMCache':10}{theirs['store']:>9.2f}{theirs['load']:>9.2f}{theirs['lookup']:>9.3f}")
        print(
            f"{'':6}{'ours':10}{mine['store']:>9.2f}{mine['load']:>9.2f}"
            f"{lookups.asked_us / 1e3:>9.3f}{lookups.shared_us / 1e3:>9.3f}"
        )
        size_gb = args.keys * args.kib * 1024 / 1e9
        print(
            f"{'':6}{'':10}{size_gb / mine['store'] * 1e3:>6.2f} GB/s{size_gb / mine['load'] * 1e3:>6.2f} GB/s; times "
            f"LMCache: store {theirs['store'] / mine['store']:.2f}, load {theirs['load'] / mine['load']:.2f}, "
            f"lookup {theirs['lookup'] / lookups.asked_us * 1e3:.2f}"
        )


if __name__ == "__main__":
    main()
