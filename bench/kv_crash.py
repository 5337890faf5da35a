"""kill -9 in a loop while a disk tier is written to, and the time to reopen a large one.

python bench/kv_crash.py --kills 200 --reopen-blocks 1000000
"""

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from headwater.clock import RealClock  # noqa: E402
from headwater.kv.block import ROOT, Block, Family  # noqa: E402
from headwater.kv.node import wire  # noqa: E402
from headwater.kv.node.benchmark import store_process  # noqa: E402
from headwater.kv.node.client import StoreClient  # noqa: E402
from headwater.kv.stores.disk import DiskOptions, DiskTier  # noqa: E402
from headwater.kv.stores.ledgered import TierOptions  # noqa: E402
from headwater.kv.table import Record  # noqa: E402
from kv_fixtures import buffers, payload_of  # noqa: E402


def open_tier(folder: Path, cap_bytes: int) -> DiskTier:
    return DiskTier(DiskOptions(folder, TierOptions(cap_bytes, min_block_bytes=4096)), RealClock())


async def check(folder: Path, cap_bytes: int, size: int) -> tuple[int, float]:
    """Every block that is served compared with what its id says; how many there are, and the time to reopen."""
    tier = open_tier(folder, cap_bytes)
    tier.ledger.check()
    records = list(tier.ledger.records())
    assert tier.ledger.space.used_bytes == len(records) * size, "capacity is leaked"
    for _, record in records:
        family = tier.ledger.families[record.family]
        into = buffers(1, size)
        answer = await tier.get(family, record.block.id, into)
        assert answer == [record.block], f"a committed block is {answer}"
        assert into[0] == payload_of(record.block.id, size), "a damaged block was served"
    await tier.close()
    return len(records), tier.reopen_s


def kill_loop(kills: int, cap_bytes: int, size: int) -> None:
    moment = random.Random(1)
    blocks = slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="kv-crash-") as name:
        folder = Path(name, "tier")
        for life in range(kills):
            command = [sys.executable, TESTS / "kv_disk_child.py", folder, str(cap_bytes), str(size), str(life)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == b"writing\n"
                time.sleep(moment.uniform(0.0, 0.1))
                child.send_signal(signal.SIGKILL)
            number, reopen_s = asyncio.run(check(folder, cap_bytes, size))
            blocks += number
            slowest = max(slowest, reopen_s)
    print(f"{kills} kills: {blocks:.0f} blocks served whole after reopening, none damaged, no capacity leaked")
    print(f"slowest reopen of {cap_bytes >> 20} MiB: {slowest * 1e3:.1f} ms")


def kill_workers(kills: int, size: int) -> None:
    """Four workers at a time on one store, one of them killed and replaced again and again."""
    moment = random.Random(3)
    with store_process(3 << 20, 4096) as path:
        workers: list[subprocess.Popen[bytes]] = []
        for number in range(kills + 4):
            command = [sys.executable, TESTS / "kv_worker_child.py", path, str(size), str(number), "3600"]
            workers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            if number >= 4:
                victim = workers.pop(0)
                assert victim.stdout is not None
                assert victim.stdout.readline() == b"working\n"
                time.sleep(moment.uniform(0.0, 0.1))
                assert victim.poll() is None, f"a worker ended with {victim.returncode}: it was served the wrong bytes"
                victim.kill()
                victim.communicate()
        for worker in workers:
            assert worker.poll() is None
            worker.kill()
            worker.communicate()
        status, verified = asyncio.run(look(path, size))
    host = status.tiers[0]
    print(
        f"{kills} workers killed: {host.num_hits} blocks read, {host.num_stored} stored, {host.num_damaged} damaged; "
        f"{verified.num_checked} checked at the end, {verified.num_damaged} damaged; no place leaked"
    )


async def look(path: Path, size: int) -> tuple[wire.StatusReport, wire.Verified]:
    client = StoreClient(path, "bench")
    await client.start(patience_s=5.0)
    for _ in range(100):
        status = await client.status()
        if status.tiers[0].used_bytes == status.tiers[0].num_blocks * size:
            break
        await asyncio.sleep(0.05)
    assert status.tiers[0].used_bytes == status.tiers[0].num_blocks * size, "capacity is leaked"
    verified = await client.verify("host")
    await client.close()
    return status, verified


def reopen(num_blocks: int) -> None:
    """A tier of so many 4 KiB blocks; the payloads are never written, for they are not read on opening."""
    with tempfile.TemporaryDirectory(prefix="kv-crash-") as name:
        cap_bytes = num_blocks * 4224 + (2 << 20)
        tier = open_tier(Path(name), cap_bytes)
        tier.ledger.families.number(Family("model", "layout", "", 4096))
        tier._save_families()
        source = random.Random(2)
        for number in range(num_blocks):
            slot = tier.ledger.table.take()
            offset = tier.ledger.space.allocate(4096, slot)
            assert offset is not None
            tier.ledger.table.insert(slot, Record(Block(source.randbytes(16), ROOT, number, 1), offset, 4096, 1, 0))
        asyncio.run(tier.close())
        started = time.process_time()
        tier = open_tier(Path(name), cap_bytes)
        cpu_s = time.process_time() - started
        assert tier.ledger.table.num_blocks == num_blocks
        print(f"reopen with {num_blocks} blocks: {tier.reopen_s:.2f} s, {cpu_s:.2f} s of CPU")
        asyncio.run(tier.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--worker-kills", type=int, default=200)
    parser.add_argument("--cap-mib", type=int, default=16)
    parser.add_argument("--block-bytes", type=int, default=16384)
    parser.add_argument("--reopen-blocks", type=int, default=1_000_000)
    args = parser.parse_args()
    if args.kills:
        kill_loop(args.kills, args.cap_mib << 20, args.block_bytes)
    if args.worker_kills:
        kill_workers(args.worker_kills, args.block_bytes)
    if args.reopen_blocks:
        reopen(args.reopen_blocks)


if __name__ == "__main__":
    main()
