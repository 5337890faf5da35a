"""How fast a node's store is, beside the plain copies and reads it is made of, in one run.

Store and client are two processes, as in service. Every pair of figures is over the same buffers: memcpy for the host
tier, pwritev and preadv of the same file size for the disk tier. Rounds of both alternate; the best of each counts.
"""

import asyncio
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import uvloop

from headwater.clock import RealClock
from headwater.errors import StoreError
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import PIECE_BYTES, Piece
from headwater.kv.rules import Rules
from headwater.kv.stores.disk import DiskOptions, DiskTier
from headwater.kv.stores.disk_io import DiskIo
from headwater.kv.stores.disk_io import Piece as DiskPiece
from headwater.kv.stores.ledgered import TierOptions
from headwater.runtime.parent import die_with_parent
from headwater.transfer.memory import address_of, allocate

T = TypeVar("T")

_START_S = 30.0
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    block_bytes: int
    num_blocks: int
    gb_s: float
    ceiling_gb_s: float
    cpu_s_per_gb: float
    """Of this process."""

    @property
    def share(self) -> float:
        return self.gb_s / self.ceiling_gb_s if self.ceiling_gb_s else 0.0


@dataclass(frozen=True, slots=True)
class LookupRow:
    num_keys: int
    shared_us: float
    """Leading blocks in the host tier, read from shared memory; median."""
    asked_us: float
    """All tiers with predicted times, asked of the store's process; median."""


class Buffers:
    """Memory that was touched before, as an engine's is: where blocks come from and go to."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        self.block_bytes, self.num_blocks = block_bytes, num_blocks
        self._memory = [allocate(block_bytes * num_blocks) for _ in range(2)]
        self.sources, self.targets = (
            [view[n * block_bytes : (n + 1) * block_bytes] for n in range(num_blocks)]
            for memory in self._memory
            if (view := memory.view) is not None
        )
        noise = os.urandom(block_bytes)
        for number, source in enumerate(self.sources):
            source[:] = noise
            source[:8] = number.to_bytes(8, "little")

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def memcpy(self) -> None:
        """What everything is measured against: one call per block."""
        target, source, size = address_of(self.targets[0]), address_of(self.sources[0]), self.block_bytes
        move = ctypes.memmove
        for at in range(0, self.num_bytes, size):
            move(target + at, source + at, size)

    def chain(self, name: str) -> Piece:
        family = Family("bench", "bench", "", self.block_bytes)
        ids = [blake2b(f"{name} {n}".encode(), digest_size=16).digest() for n in range(self.num_blocks)]
        return Piece(family, b"".join(ids), 0, ROOT)

    def release(self) -> None:
        for view in (*self.sources, *self.targets):
            view.release()
        for memory in self._memory:
            memory.release()


@contextmanager
def store_process(host_bytes: int, min_block_bytes: int) -> Iterator[Path]:
    """`headwater kv serve` in a process of its own, which ends with this one."""
    with tempfile.TemporaryDirectory(prefix="headwater-kv-") as folder:
        path = Path(folder, "kv.sock")
        command = [
            *(sys.executable, "-m", "headwater", "kv", "serve", "--socket", str(path), "--host", str(host_bytes)),
            *("--min-block", str(min_block_bytes), "--log-level", "warning"),
        ]
        bound = partial(die_with_parent, os.getpid())
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=bound) as process:
            try:
                deadline = time.monotonic() + _START_S
                while not path.exists():
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise StoreError("the store's process did not start")
                    time.sleep(0.02)
                yield path
            finally:
                process.terminate()


async def measure_host(path: Path, buffers: Buffers, rounds: int) -> list[Row]:
    """Offer and load everything, a fresh chain each round."""
    client = StoreClient(path, "bench", max_offered_bytes=1 << 40)
    await client.start(patience_s=5.0)
    best = {"memcpy": _Best(), "put": _Best(), "get": _Best()}
    try:
        for number in range(rounds + 1):
            chain = buffers.chain(f"round {number}")
            with best["memcpy"].timed(number):
                buffers.memcpy()
            with best["put"].timed(number):
                stored = await client.offer(chain, buffers.sources)
            with best["get"].timed(number):
                loaded = await client.load(chain, buffers.targets, timeout_s=30.0)
            if (stored, loaded) != (buffers.num_blocks, buffers.num_blocks):
                raise StoreError(f"stored {stored} and loaded {loaded} of {buffers.num_blocks} blocks")
            await client.remove(chain.ids)
    finally:
        await client.close()
    ceiling = best["memcpy"].gb_s(buffers.num_bytes)
    return [
        Row(f"host {what}", buffers.block_bytes, buffers.num_blocks, one.gb_s(buffers.num_bytes), ceiling,
            one.cpu_s_per_gb(buffers.num_bytes))
        for what, one in best.items()
    ]  # fmt: skip


async def measure_disk(folder: Path, buffers: Buffers, rounds: int, *, direct: bool) -> list[Row]:
    """The tier beside the same number of threads that write and read a file of their own, unchecked."""
    options = TierOptions(_disk_bytes(buffers), min_block_bytes=4096)
    tier = DiskTier(DiskOptions(folder / "tier", options, direct), RealClock())
    fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, buffers.num_bytes)
    direct_fd = os.open(folder / "plain", os.O_RDWR | os.O_DIRECT) if direct else -1
    plain = DiskIo(fd, direct_fd, tier.options.num_threads, RealClock())
    best = {name: _Best() for name in ("pwritev", "preadv", "put", "get")}
    try:
        for number in range(rounds + 1):
            chain = buffers.chain(f"round {number}")
            blocks = [
                block._replace(checksum=checksum(block.id, source))
                for block, source in zip(chain.blocks(), buffers.sources, strict=True)
            ]
            parts = _parts(buffers)
            written, wanted = _pieces(blocks, buffers.sources), _pieces(blocks, buffers.targets)
            with best["pwritev"].timed(number):
                await _at_once(plain.write(written[part]) for part in parts)
            with best["put"].timed(number):
                await _at_once(tier.put(chain.family, blocks[part], buffers.sources[part]) for part in parts)
            with best["preadv"].timed(number):
                await _at_once(plain.read(wanted[part], check=False) for part in parts)
            with best["get"].timed(number):
                found = await _at_once(
                    tier.get(chain.family, chain.ids[16 * part.start : 16 * part.stop], buffers.targets[part])
                    for part in parts
                )
            if [block for answers in found for block in answers] != blocks:
                raise StoreError("the disk tier did not give back what it was given")
            await tier.remove(chain.ids)
    finally:
        await tier.close()
        plain.close(wait=True)
        for one in (fd, direct_fd):
            if one >= 0:
                os.close(one)
    rows = []
    for what, ceiling in (("pwritev", "pwritev"), ("put", "pwritev"), ("preadv", "preadv"), ("get", "preadv")):
        gb_s, most = best[what].gb_s(buffers.num_bytes), best[ceiling].gb_s(buffers.num_bytes)
        cpu = best[what].cpu_s_per_gb(buffers.num_bytes)
        label = f"disk {what}{' direct' if direct else ''}"
        rows.append(Row(label, buffers.block_bytes, buffers.num_blocks, gb_s, most, cpu))
    return rows


async def measure_lookups(path: Path, num_keys: int, rounds: int) -> LookupRow:
    """Of blocks that are there."""
    buffers = Buffers(4096, num_keys)
    client = StoreClient(path, "bench")
    await client.start(patience_s=5.0)
    chain = buffers.chain("lookup")
    await client.offer(chain, buffers.sources)
    shared: list[float] = []
    asked: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        found = client.num_in_host(chain.ids)
        shared.append(time.perf_counter() - started)
        started = time.perf_counter()
        runs = await client.match(chain)
        asked.append(time.perf_counter() - started)
        if found != num_keys or sum(run.num_blocks for run in runs) != num_keys:
            raise StoreError(f"found {found} of {num_keys} keys")
    await client.close()
    buffers.release()
    return LookupRow(num_keys, sorted(shared)[rounds // 2] * 1e6, sorted(asked)[rounds // 2] * 1e6)


class _Best:
    """The shortest of several rounds; the first one, which warms up, does not count."""

    def __init__(self) -> None:
        self._wall_s = self._cpu_s = float("inf")

    @contextmanager
    def timed(self, round_number: int) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        if round_number:
            self._wall_s = min(self._wall_s, time.perf_counter() - wall)
            self._cpu_s = min(self._cpu_s, time.process_time() - cpu)

    def gb_s(self, num_bytes: int) -> float:
        return num_bytes / self._wall_s / 1e9

    def cpu_s_per_gb(self, num_bytes: int) -> float:
        return self._cpu_s / num_bytes * 1e9


def _parts(buffers: Buffers) -> list[slice]:
    """As the node's store would divide it."""
    step = max(1, PIECE_BYTES // buffers.block_bytes)
    return [slice(at, min(at + step, buffers.num_blocks)) for at in range(0, buffers.num_blocks, step)]


def _disk_bytes(buffers: Buffers) -> int:
    """Room for two rounds, and enough of it that what is written at once is the part that a tier takes in at a time."""
    at_once = _AT_ONCE * max(PIECE_BYTES, buffers.block_bytes)
    return 2 * buffers.num_bytes + int(at_once / Rules().max_reserved) + (8 << 20)


async def _at_once(calls: Iterable[Awaitable[T]]) -> list[T]:
    """A few under way, as in service."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(call: Awaitable[T]) -> T:
        async with turns:
            return await call

    return await asyncio.gather(*map(one, calls))


def _pieces(blocks: list[Block], views: list[memoryview]) -> list[DiskPiece]:
    size = len(views[0])
    return [
        DiskPiece(number, number * size, view, block.id, block.checksum)
        for number, (block, view) in enumerate(zip(blocks, views, strict=True))
    ]


def run_all(block_bytes: list[int], total_bytes: int, rounds: int, folder: Path, report: Callable[[Row], None]) -> None:
    """Host and disk for each block size."""
    for size in block_bytes:
        buffers = Buffers(size, max(1, total_bytes // size))
        try:
            with store_process(max(4 * buffers.num_bytes, 64 << 20), 4096) as path:
                for row in uvloop.run(measure_host(path, buffers, rounds)):
                    report(row)
            for direct in (False, True):
                with tempfile.TemporaryDirectory(prefix="headwater-kv-", dir=folder) as place:
                    for row in uvloop.run(measure_disk(Path(place), buffers, rounds, direct=direct)):
                        report(row)
        finally:
            buffers.release()
