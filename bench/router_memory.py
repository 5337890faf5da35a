"""Memory of the prefix index under more distinct blocks than it may remember.

    python bench/router_memory.py [--blocks 10000000] [--limit 8000000] [--workers 64]

Workers store distinct blocks in runs of 128, none is removed. Printed as it fills: resident memory of the process that
the index takes, bytes per block in it, blocks refused, and CPU time per stored block; then what it takes to remove one
worker, and that its memory is given back for others.
"""

import argparse
import time
from random import Random

from headwater.kv.index import PrefixIndex
from headwater.types import WorkerId

RUN = 128
LINES = 10


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def fill(index: PrefixIndex, blocks: int, workers: int, random: Random) -> None:
    before = resident_bytes()
    for line in range(LINES):
        started = time.process_time()
        for run in range(line * blocks // LINES // RUN, (line + 1) * blocks // LINES // RUN):
            index.store(WorkerId(f"w{run % workers}"), [random.getrandbits(64) for _ in range(RUN)])
        cpu_ns = (time.process_time() - started) / (blocks / LINES) * 1e9
        stats = index.stats()
        held = stats.num_blocks["device"]
        used = resident_bytes() - before
        print(
            f"{(line + 1) * blocks // LINES:>12,} stored {held:>12,} held {stats.num_dropped:>12,} refused "
            f"{used / 2**20:>8,.0f} MiB {used / held:>6.0f} B/block {cpu_ns:>6.0f} ns each, drawing ids included",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--limit", type=int, default=8_000_000)
    parser.add_argument("--workers", type=int, default=64)
    args = parser.parse_args()
    index = PrefixIndex(args.limit)
    for number in range(args.workers):
        index.add_worker(WorkerId(f"w{number}"))
    fill(index, args.blocks, args.workers, Random(1))
    held = index.stats().num_blocks["device"]
    started = time.process_time()
    index.remove_worker(WorkerId("w0"))
    removed = held - index.stats().num_blocks["device"]
    cpu_s = time.process_time() - started
    each_ns = cpu_s / removed * 1e9
    print(f"one of {args.workers} workers removed: {removed:,} blocks in {cpu_s:.2f} s, {each_ns:.0f} ns each")


if __name__ == "__main__":
    main()
