"""Do caps hold? A store of its own process, all tiers, ten times what they hold, for as long as wanted.

    python bench/kv_caps.py [--minutes 30] [--requests 100000] [--overload 10] [--json]

`headwater kv serve` with host, disk and object tier (SeaweedFS on this machine). Four clients ask for prefixes of three
tenants, most of them seldom, load what is there, compare every byte, and store the rest; each leaves now and then and
comes back. Every second the bytes of each tier are compared with its cap: as the store says, as the file
system says, and as the bucket says (every 15 s). A row per minute; exit code 1 if a cap was ever passed, a wrong byte
served, or something was left over at the end.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import obstore

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from processes import cpu_s, running

from headwater.kv.block import ROOT
from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import Piece
from headwater.kv.node.wire import StatusReport
from headwater.kv.stores.object.connect import connect
from headwater.kv.stores.object.options import parse_object_url
from kv_fixtures import chain, family_of, payload_of
from object_servers import seaweedfs

BLOCK_BYTES = 64 << 10
CHAIN_BLOCKS = 16
CAPS = {"host": 64 << 20, "disk": 128 << 20, "object": 256 << 20}
CLIENTS = 4
HOT_CHAINS = 8
TENANTS = ("a", "b", "c")
STAY_REQUESTS = 2000
BUCKET_S = 15


@dataclass
class Seen:
    """Largest values since the start, and the last ones."""

    requests: int = 0
    wrong_bytes: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    most: dict[str, int] = field(default_factory=dict[str, int])
    passed: list[str] = field(default_factory=list[str])

    def note(self, what: str, num_bytes: int, cap_bytes: int) -> None:
        self.most[what] = max(self.most.get(what, 0), num_bytes)
        if num_bytes > cap_bytes:
            self.passed.append(f"{what}: {num_bytes} of {cap_bytes} bytes after {self.requests} requests")


@dataclass(frozen=True)
class Row:
    minute: float
    requests: int
    host_bytes: int
    disk_file_bytes: int
    object_bytes: int
    private_mib: float
    """Memory of the store's process that is its own: indexes, buffers, the interpreter."""
    shared_mib: float
    """The host tier's pool and table, and what is mapped of the disk tier's."""
    open_files: int
    cpu_s: float


async def work(number: int, socket: Path, num_chains: int, seen: Seen, pace_s: float, until: float, least: int) -> None:
    draw = random.Random(number)
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(CHAIN_BLOCKS)]
    client = StoreClient(socket, f"client {number}")
    await client.start(patience_s=10.0)
    next_at = time.monotonic()
    done = 0
    while time.monotonic() < until or seen.requests < least:
        pick = draw.randrange(num_chains) if draw.random() < 0.7 else draw.randrange(HOT_CHAINS)
        await ask(client, pick, into, seen)
        done += 1
        if done % STAY_REQUESTS == 0:
            await client.close()
            client = StoreClient(socket, f"client {number}")
            await client.start(patience_s=10.0)
        next_at = max(next_at + pace_s, time.monotonic() - 10 * pace_s)
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    await client.close()


async def ask(client: StoreClient, pick: int, into: list[memoryview], seen: Seen) -> None:
    """One request: what is there is loaded and compared, the rest stored as if it had been computed."""
    ids = chain(f"chain {pick}", CHAIN_BLOCKS)
    run = Piece(family_of(BLOCK_BYTES, TENANTS[pick % len(TENANTS)]), b"".join(ids), 0, ROOT)
    arrived = await client.load(run, into, timeout_s=2.0)
    seen.wrong_bytes += sum(view != payload_of(block, BLOCK_BYTES) for block, view in zip(ids[:arrived], into))  # noqa: B905
    seen.loaded_blocks += arrived
    if arrived < CHAIN_BLOCKS:
        payloads = [memoryview(payload_of(block, BLOCK_BYTES)) for block in ids[arrived:]]
        seen.stored_blocks += await client.offer(run.part(arrived, CHAIN_BLOCKS), payloads)
    seen.requests += 1


async def watch(
    socket: Path, folder: Path, object_url: str, pid: int, seen: Seen, until: float, least: int, *, as_json: bool
) -> list[Row]:
    client = StoreClient(socket, "watch")
    await client.start(patience_s=10.0)
    bucket = connect(parse_object_url(object_url, owner="watch")).reading
    began, rows, in_bucket, ticks = time.monotonic(), list[Row](), 0, 0
    while time.monotonic() < until or seen.requests < least:
        disk_bytes = await asyncio.to_thread(folder_bytes, folder)
        seen.note("disk, as the file system says", disk_bytes, CAPS["disk"])
        if ticks % BUCKET_S == 0:
            in_bucket = await asyncio.to_thread(bucket_bytes, bucket)
            seen.note("object, as the bucket says", in_bucket, CAPS["object"])
        report = await client.status()
        for tier in report.tiers:
            seen.note(tier.tier, tier.used_bytes, CAPS[tier.tier])
        if ticks % 60 == 0:
            used = {tier.tier: tier.used_bytes for tier in report.tiers}
            rows.append(row(began, seen, used["host"], disk_bytes, in_bucket, pid))
            show(rows[-1], as_json=as_json)
        ticks += 1
        await asyncio.sleep(1.0)
    await client.close()
    return rows


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def bucket_bytes(bucket: obstore.store.ObjectStore) -> int:
    return sum(one["size"] for page in obstore.list(bucket) for one in page)


def row(began: float, seen: Seen, host_bytes: int, disk_bytes: int, object_bytes: int, pid: int) -> Row:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    private, *shared = (int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile", "RssShmem"))
    open_files = len(os.listdir(f"/proc/{pid}/fd"))
    minute = (time.monotonic() - began) / 60
    return Row(
        minute, seen.requests, host_bytes, disk_bytes, object_bytes, private, sum(shared), open_files, cpu_s(pid)
    )


def show(row: Row, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(row)), flush=True)
        return
    tiers = [f"{num_bytes / 2**20:7.1f}" for num_bytes in (row.host_bytes, row.disk_file_bytes, row.object_bytes)]
    print(
        f"{row.minute:6.1f} {row.requests:8} {' '.join(tiers)} {row.private_mib:8.1f} {row.shared_mib:7.1f} "
        f"{row.open_files:5} {row.cpu_s:7.1f}",
        flush=True,
    )


async def left_over(socket: Path) -> tuple[StatusReport, list[str]]:
    """What should not be there once all clients have gone and everything was cleared."""
    client = StoreClient(socket, "last")
    await client.start(patience_s=10.0)
    last = await client.status()
    faults: list[str] = []
    for tier in ("host", "disk"):
        checked = await client.verify("host" if tier == "host" else "disk")
        print(f"{tier}: {checked.num_checked} blocks verified, {checked.num_damaged} damaged")
        faults += [f"{checked.num_damaged} damaged blocks in the {tier} tier"] * bool(checked.num_damaged)
    await client.clear()
    await asyncio.sleep(3.0)
    await client.clear()
    empty = await client.status()
    faults += [f"{tier.num_blocks} blocks are left in the {tier.tier} tier" for tier in empty.tiers if tier.num_blocks]
    if (empty.pinned_bytes, empty.num_stranded, len(empty.clients)) != (0, 0, 1):
        faults.append(f"left over: {empty.pinned_bytes} pinned, {empty.num_stranded} stranded, {empty.clients}")
    await client.close()
    return last, faults


async def measure(args: argparse.Namespace, socket: Path, folder: Path, object_url: str, pid: int) -> int:
    seen = Seen()
    num_chains = int(args.overload * sum(CAPS.values()) / (BLOCK_BYTES * CHAIN_BLOCKS))
    until = time.monotonic() + 60 * args.minutes
    pace_s = CLIENTS * 60 * args.minutes / max(1, args.requests)
    workers = [work(n, socket, num_chains, seen, pace_s, until, args.requests) for n in range(CLIENTS)]
    watching = watch(socket, folder, object_url, pid, seen, until, args.requests, as_json=args.json)
    await asyncio.gather(watching, *workers)
    last, faults = await left_over(socket)
    print(
        f"{seen.requests} requests of {num_chains} prefixes: {seen.loaded_blocks} blocks loaded and compared, ", end=""
    )
    print(f"{seen.stored_blocks} stored, {seen.wrong_bytes} wrong")
    for what, num_bytes in seen.most.items():
        print(f"most {what}: {num_bytes} of {CAPS[what.split(',')[0]]} bytes")
    for tier in last.tiers:
        print(f"{tier.tier}: {tier.num_stored} stored, {tier.num_evicted} evicted, {tier.num_hits} hits, ", end="")
        print(
            f"{tier.num_misses} misses, {tier.num_damaged} damaged, {tier.num_failed} failed, {tier.problem or 'well'}"
        )
    for fault in (*seen.passed, *faults):
        print(f"FAULT {fault}")
    return 1 if seen.passed or faults or seen.wrong_bytes else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--overload", type=float, default=10.0, help="times what all tiers together hold")
    parser.add_argument("--json", action="store_true", help="rows for machines")
    args = parser.parse_args()
    os.nice(10)
    with tempfile.TemporaryDirectory(prefix="hw-caps-") as name, seaweedfs(Path(name)) as server:
        os.environ.update(server.environment)
        socket, folder = Path(name, "run", "kv.sock"), Path(name, "disk")
        object_url = server.url("caps", more=f"cap={CAPS['object']}")
        command = [
            sys.executable,
            "-m",
            "headwater",
            "kv",
            "serve",
            "--socket",
            str(socket),
            *tiers(folder, object_url),
        ]
        with running([command], dict(os.environ), str(Path(name, "log"))) as (child,):
            if not args.json:
                print("minute requests  host/MiB disk/MiB object/MiB private/MiB shared/MiB files CPU/s", flush=True)
            return asyncio.run(measure(args, socket, folder, object_url, child.pid))


def tiers(folder: Path, object_url: str) -> Iterator[str]:
    yield from ("--host", str(CAPS["host"]), "--disk", f"{folder}:{CAPS['disk']}", "--object", object_url)
    yield from ("--share", "a=0.2", "--min-block", str(BLOCK_BYTES))


if __name__ == "__main__":
    sys.exit(main())
