"""The object tier against plain obstore: the same bytes in objects of the same size, taking turns.

    python bench/kv_object.py [--server memory s3 azure] [--payload 64KiB 2MiB] [--mebibytes 128] [--rounds 3]
    python bench/kv_object.py --url "s3://bucket/bench?region=eu-central-1"

`s3` and `azure` are SeaweedFS and Azurite on this machine: what they give says what their server's processor can do,
so compare the two columns, not either with a cloud. CPU seconds are those of this process.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
from obstore.store import MemoryStore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from headwater.config.units import parse_bytes
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.identity import chain_block_ids, split_block_ids
from headwater.kv.stores.object.connect import Clients, connect
from headwater.kv.stores.object.options import ObjectOptions, parse_object_url
from headwater.kv.stores.object.tier import ObjectTier
from object_servers import azurite, seaweedfs

CONNECTIONS = 16


class Chain:
    """Blocks of one sequence with random bytes."""

    def __init__(self, payload_bytes: int, count: int) -> None:
        self.family = Family("bench", f"bench-{os.urandom(8).hex()}", "", payload_bytes)
        ids = split_block_ids(chain_block_ids(os.urandom(32), bytes(4 * count), 1))
        self.ids = b"".join(ids)
        data = memoryview(os.urandom(payload_bytes * count))
        self.payloads = [data[i * payload_bytes : (i + 1) * payload_bytes] for i in range(count)]
        sums = map(checksum, ids, self.payloads)
        parents = [ROOT, *ids]
        self.blocks = [Block(ids[i], parents[i], i, one) for i, one in enumerate(sums)]
        landing = memoryview(bytearray(payload_bytes * count))
        self.into = [landing[i * payload_bytes : (i + 1) * payload_bytes] for i in range(count)]
        landing[:] = b"\1" * len(landing)  # page faults are not what is measured


class Timed:
    def __init__(self) -> None:
        self.gb_per_s: list[float] = []
        self.cpu_s_per_gb: list[float] = []

    async def run(self, num_bytes: int, work: Callable[[], Awaitable[Any]]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = await work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.gb_per_s.append(num_bytes / wall / 1e9)
        self.cpu_s_per_gb.append(cpu / num_bytes * 1e9)
        return result

    def __str__(self) -> str:
        return f"{statistics.median(self.gb_per_s):6.2f} {statistics.median(self.cpu_s_per_gb):6.2f}"


async def side_by_side(works: list[Callable[[], Awaitable[Any]]]) -> None:
    limit = asyncio.Semaphore(CONNECTIONS)

    async def one(work: Callable[[], Awaitable[Any]]) -> None:
        async with limit:
            await work()

    await asyncio.gather(*(one(work) for work in works))


async def plain_put(store: Any, keys: list[str], body: memoryview) -> None:
    await side_by_side([lambda key=key: obstore.put_async(store, key, body, use_multipart=False) for key in keys])  # type: ignore[misc]


async def plain_get(store: Any, keys: list[str], into: memoryview) -> None:
    async def one(key: str) -> None:
        found = memoryview(await (await obstore.get_async(store, key)).bytes_async())
        into[: len(found)] = found

    await side_by_side([lambda key=key: one(key) for key in keys])  # type: ignore[misc]


async def measure(options: ObjectOptions, clients: Clients, payload_bytes: int, num_bytes: int, rounds: int) -> str:
    timed = {name: Timed() for name in ("put", "plain put", "get", "plain get")}
    lookups_ms: list[float] = []
    store = None if clients.reading is not clients.writing else clients.reading
    count = max(1, num_bytes // payload_bytes)
    for number in range(rounds):
        chain = Chain(payload_bytes, count)
        writer = ObjectTier(replace(options, owner=f"bench-writer-{number}"), store=store)
        shape = writer._catalogue.shape(chain.family)
        count = count // shape.num_blocks * shape.num_blocks
        chain = Chain(payload_bytes, count)
        await writer.contains(chain.family, chain.ids)  # connects, and waits for the ledger
        keys = [f"plain-{number}-{i}" for i in range(count // shape.num_blocks)]
        body = memoryview(os.urandom(shape.object_bytes))
        total = len(keys) * shape.object_bytes
        await writer.put(Chain(payload_bytes, 1).family, [], [])
        await timed["put"].run(total, lambda w=writer, c=chain: w.put(c.family, c.blocks, c.payloads))  # type: ignore[misc]
        await timed["plain put"].run(total, lambda k=keys, b=body: plain_put(clients.writing, k, b))  # type: ignore[misc]
        puts = writer.requests.puts
        await writer.close()
        reader = ObjectTier(replace(options, owner=f"bench-reader-{number}"), store=store)
        started = time.perf_counter()
        found = await reader.contains(chain.family, chain.ids)
        lookups_ms.append((time.perf_counter() - started) * 1e3)
        assert found == b"\1" * count
        answers = await timed["get"].run(total, lambda r=reader, c=chain: r.get(c.family, c.ids, c.into))  # type: ignore[misc]
        assert answers == chain.blocks
        target = memoryview(bytearray(b"\1" * shape.object_bytes))
        await timed["plain get"].run(total, lambda k=keys, t=target: plain_get(clients.reading, k, t))  # type: ignore[misc]
        requests = reader.requests
        per_thousand = [1000 * n / count for n in (puts, requests.heads, requests.gets - 1)]
        await reader.clear()
        await reader.close()
        await obstore.delete_async(clients.writing, keys)
    columns = "  ".join(str(one) for one in timed.values())
    return (
        f"{shape.num_blocks:5d} {shape.object_bytes / (1 << 20):6.1f}  {columns}  "
        + " ".join(f"{one:6.1f}" for one in per_thousand)
        + f"  {statistics.median(lookups_ms):7.1f} ({count})"
    )


@contextlib.contextmanager
def opened(server: str) -> Iterator[tuple[ObjectOptions, Clients]]:
    if server == "memory":
        store = MemoryStore()
        yield ObjectOptions("s3", "memory"), Clients(store, store)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running_in = seaweedfs(Path(folder)) if server == "s3" else azurite(Path(folder), memory_mib=6144)
        with running_in as running:
            os.environ.update(running.environment)
            options = parse_object_url(running.url("bench", more="timeout=60s"), owner="bench")
            yield options, connect(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", nargs="*", default=["memory", "s3", "azure"], choices=["memory", "s3", "azure"])
    parser.add_argument("--url", help="measure this place instead; credentials from the environment")
    parser.add_argument("--payload", nargs="*", default=["64KiB", "2MiB"])
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'GB/s and CPU s/GB':>58} {'requests per 1,000 blocks':>46}")
    columns = (
        "where",
        "payload",
        "run",
        "MiB",
        "put",
        "plain put",
        "get",
        "plain get",
        "PUT",
        "HEAD",
        "GET",
        "look-up ms",
    )
    print("{:8} {:>7} {:>5} {:>6} {:>13} {:>14} {:>14} {:>14} {:>7} {:>6} {:>6} {:>10}".format(*columns))

    def show(name: str, where: ObjectOptions, clients: Clients) -> None:
        for payload in options.payload:
            row = asyncio.run(measure(where, clients, parse_bytes(payload), options.mebibytes << 20, options.rounds))
            print(f"{name:8} {payload:>7} {row}", flush=True)

    if options.url:
        where = parse_object_url(options.url, owner="bench")
        show(where.scheme, where, connect(where))
        return
    for server in options.server:
        with opened(server) as (where, clients):
            show(server, where, clients)


if __name__ == "__main__":
    main()
