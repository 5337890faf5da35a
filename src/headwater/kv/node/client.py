"""A worker's side of its node's store.

    client = StoreClient(socket_path, "worker-1")
    await client.start()
    runs = await client.match(chain)                     # per tier, with predicted times; see `headwater.kv.pricing`
    loaded = await client.load(chain, buffers, timeout_s=2.0)
    stored = await client.offer(chain, payloads)

A store that is slow, full, restarting or gone never fails its caller: less is matched, loaded or stored, and `problem`
says why. What is reported as loaded has been checked in the caller's buffer. Copies are made on threads of the client,
so the event loop and the engine go on; buffers must stay as they are until the call returns, cancelled or not.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from headwater.errors import HeadwaterError, StoreError
from headwater.kv.block import Family
from headwater.kv.identity import split_block_ids
from headwater.kv.node import wire
from headwater.kv.node.copies import called_off, copy_in, copy_out, num_copiers
from headwater.kv.node.link import A, Link, OnEvents
from headwater.kv.node.store import Piece, pieces_of
from headwater.kv.pricing import ComputeRate, Curiosity, LoadPlan, PrefillMs, TierRun, plan_load
from headwater.kv.stores.finishing import finished
from headwater.types import Tier

logger = logging.getLogger(__name__)

OnArrived = Callable[[int], None]
Part = tuple[Piece, Sequence[memoryview]]
"""A chain, and a buffer for each of its blocks."""
R = TypeVar("R")

_PIECES_AT_ONCE = 3
"""One is leased or reserved, one copied, one released or committed."""
_PARTS_AT_ONCE = 8
"""With so many pieces each, far from what the store lets a client ask at once."""
_MAX_PIECE_BYTES = 32 << 20
_PIECES_PER_POOL = 24
_TRIAL_S = 30.0


class StoreClient:
    """See the module docstring. Lives on one event loop."""

    def __init__(
        self,
        path: Path,
        name: str,
        *,
        on_events: OnEvents | None = None,
        num_threads: int = 0,
        max_offered_bytes: int = 256 << 20,
    ) -> None:
        """`num_threads` copy; 0: one, or two where there are processors to spare. `on_events` is told, on the event
        loop, what is resident in the node's tiers, and all of it again after a reconnection; on a lost connection it is
        told that all tiers are cleared."""
        self._link = Link(path, name, on_events)
        self._threads = ThreadPoolExecutor(num_threads or num_copiers(), thread_name_prefix="kv-copy")
        self._max_offered_bytes = max_offered_bytes
        self._offered_bytes = 0
        self._parts_at_once = asyncio.Semaphore(_PARTS_AT_ONCE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._curiosity = Curiosity()
        self._trial: asyncio.Task[None] | None = None
        self.num_offers_dropped = 0
        """Blocks that were not even tried because too much was under way."""
        self.num_damaged = 0

    @property
    def num_connections(self) -> int:
        """Since the start: with each the store may be another one."""
        return self._link.num_connections

    @property
    def problem(self) -> str:
        """Why there is no store now; empty if there is."""
        return self._link.problem

    async def start(self, *, patience_s: float = 0.0) -> None:
        """Connect, and stay connected. Waits so long for a store that is not there yet, then returns all the same."""
        self._loop = asyncio.get_running_loop()
        await self._link.start(patience_s=patience_s)

    async def close(self) -> None:
        """Idempotent. Copies that have begun are finished first."""
        trial, self._trial, self._loop = self._trial, None, None
        if trial is not None:
            trial.cancel()
            await asyncio.gather(trial, return_exceptions=True)
        await self._link.close()
        await asyncio.to_thread(self._threads.shutdown)

    # Engines

    def num_in_host(self, ids: bytes) -> int:
        """How many of the joined ids, from the first on, are in the host tier. Reads shared memory, asks nobody."""
        table = self._link.table
        return table.num_leading(ids) if table is not None else 0

    async def match(self, chain: Piece, *, timeout_s: float = 0.0, num_parts: int = 1) -> list[TierRun]:
        """From where the longest known prefix of the chain would come. `timeout_s`: how long other nodes and object
        stores may be asked about what is not known here; 0: not at all. `num_parts`: how many chains of this size are
        to be loaded together, for the predicted time; the others are taken to be where this one is."""
        try:
            located = await self._ask(wire.Locate(0, _chain(chain), timeout_s, num_parts), wire.Located, timeout_s)
        except StoreError as error:
            self._note(error)
            return []
        return located.runs

    def plan(
        self,
        chain: Piece,
        runs: Sequence[TierRun],
        prefill_ms: PrefillMs,
        *,
        num_tokens: int,
        cached_tokens: int,
        block_tokens: int,
    ) -> LoadPlan:
        """How much of what was matched is worth loading; see `plan_load`. Asks nobody; from any thread.

        A tier that is not worth it is tried now and then beside the computation, so that one that has recovered is
        noticed.
        """
        plan = plan_load(
            runs, prefill_ms, num_tokens=num_tokens, cached_tokens=cached_tokens, block_tokens=block_tokens
        )
        start = 0
        for run in runs:
            if start >= plan.num_blocks and run.tier != "host" and self._curiosity.refused(run.tier):
                self._try_out(chain.part(start, start + run.num_blocks))
            start += run.num_blocks
        return plan

    async def prefetch(self, chain: Piece, *, timeout_s: float) -> int:
        """Bring the chain into the host tier, because a request that needs it is on its way."""
        try:
            return (await self._ask(wire.Prefetch(0, _chain(chain), timeout_s), wire.Counted, timeout_s)).num_blocks
        except StoreError as error:
            self._note(error)
            return 0

    async def load(
        self, chain: Piece, into: Sequence[memoryview], *, timeout_s: float, on_arrived: OnArrived | None = None
    ) -> int:
        """Copy the chain's blocks into these buffers; how many, from the first on, arrived whole. `on_arrived` is told
        of progress."""
        deadline = time.monotonic() + timeout_s
        pieces = iter(pieces_of(chain, self._piece_bytes()))
        under_way: deque[tuple[Piece, asyncio.Task[int]]] = deque()
        loaded = 0
        try:
            while True:
                for piece in islice(pieces, _PIECES_AT_ONCE - len(under_way)):
                    views = into[piece.first - chain.first :][: piece.num_blocks]
                    under_way.append((piece, asyncio.create_task(self._load(piece, views, deadline))))
                if not under_way:
                    break
                arrived = await under_way[0][1]
                piece, _ = under_way.popleft()
                loaded += arrived
                if on_arrived is not None and arrived:
                    on_arrived(loaded)
                if arrived < piece.num_blocks or time.monotonic() > deadline:
                    break
        except StoreError as error:
            self._note(error)
        finally:
            await called_off([task for _, task in under_way])
        return loaded

    async def load_parts(self, parts: Sequence[Part], *, timeout_s: float) -> int:
        """As `load`, of chains that belong together: how many blocks, from the first on, arrived whole in all of them.
        What one lacks is not loaded of those after it."""
        deadline = time.monotonic() + timeout_s
        arrived = min(chain.num_blocks for chain, _ in parts)

        async def load(chain: Piece, into: Sequence[memoryview]) -> int:
            nonlocal arrived
            async with self._parts_at_once:
                left_s = max(0.0, deadline - time.monotonic())
                count = await self.load(chain.part(0, arrived), into[:arrived], timeout_s=left_s)
            arrived = min(arrived, count)
            return count

        loading = [asyncio.create_task(load(chain, into)) for chain, into in parts]
        try:
            return min(await asyncio.gather(*loading))
        finally:
            await called_off(loading)

    async def offer(self, chain: Piece, payloads: Sequence[memoryview]) -> int:
        """Store the chain's blocks; how many were new. Blocks that are there already count as used."""
        num_bytes = chain.num_blocks * chain.family.payload_bytes
        if self._offered_bytes and self._offered_bytes + num_bytes > self._max_offered_bytes:
            self.num_offers_dropped += chain.num_blocks
            return 0
        self._offered_bytes += num_bytes
        stored = 0
        try:
            stored = await self._give_all(chain, payloads)
        except StoreError as error:
            self._note(error)
        finally:
            self._offered_bytes -= num_bytes
        return stored

    async def describe(self, family: Family, rate: ComputeRate) -> None:
        """Say what computing a block costs here, for what is kept and what is written to disk."""
        with contextlib.suppress(StoreError):
            await self._ask(wire.Describe(0, family, *rate), wire.Counted)

    def limit(self, tenant: str, fraction: float) -> None:
        """How much of each tier the blocks of a tenant, offered from now on, may fill while others want room."""
        self._tell(wire.Limit(0, tenant, fraction))

    # Operators: these raise `StoreError`

    async def pin(self, ids: bytes, seconds: float) -> int:
        """Keep blocks in the host tier for a time, 0 ends it; how many are pinned (or were)."""
        return (await self._ask(wire.Pin(0, ids, seconds), wire.Counted)).num_blocks

    async def remove(self, ids: bytes) -> int:
        return (await self._ask(wire.Remove(0, ids), wire.Counted)).num_blocks

    async def clear(self, *, tenant: str | None = None, model: str | None = None) -> int:
        return (await self._ask(wire.Clear(0, tenant, model), wire.Counted, 60.0)).num_blocks

    async def status(self) -> wire.StatusReport:
        return await self._ask(wire.AskStatus(0), wire.StatusReport)

    async def list_blocks(self, tier: Tier, *, after: int = -1, limit: int = 1000) -> wire.BlockList:
        return await self._ask(wire.ListBlocks(0, tier, after, limit), wire.BlockList)

    async def verify(self, tier: Tier, *, timeout_s: float = 3600.0) -> wire.Verified:
        return await self._ask(wire.Verify(0, tier), wire.Verified, timeout_s)

    async def warm(self, max_bytes: int, *, timeout_s: float = 600.0) -> int:
        return (await self._ask(wire.Warm(0, max_bytes), wire.Counted, timeout_s)).num_blocks

    # Inside: loading

    def _try_out(self, refused: Piece) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_trial, pieces_of(refused)[0])

    def _begin_trial(self, piece: Piece) -> None:
        if self._trial is None or self._trial.done():
            self._trial = asyncio.create_task(self._tried(piece))

    async def _tried(self, piece: Piece) -> None:
        await self.prefetch(piece, timeout_s=_TRIAL_S)

    async def _load(self, piece: Piece, into: Sequence[memoryview], deadline: float) -> int:
        """Without asking anybody if all is in the host tier, else under a lease."""
        if await self._read(piece, into):
            return piece.num_blocks
        return await self._load_leased(piece, into, deadline)

    async def _read(self, piece: Piece, into: Sequence[memoryview]) -> bool:
        """Whether the whole piece was found in shared memory and is now in the buffers.

        Nothing keeps a block from being evicted and overwritten meanwhile, but then its bytes do not match the
        checksum, which is bound to its id: what matches is right, whatever happened on the way.
        """
        found = self._link.places(piece)
        if found is None:
            return False
        started = time.monotonic()
        arrived = await self._copy_out(piece, *found, into)
        if arrived < piece.num_blocks:
            return False
        self._tell(wire.Used(0, _chain(piece), (time.monotonic() - started) * 1e3))
        return True

    async def _load_leased(self, piece: Piece, into: Sequence[memoryview], deadline: float) -> int:
        """Copy and check; only what was checked while the lease still held counts."""
        timeout_s = max(0.0, deadline - time.monotonic())
        leased = await self._ask(wire.Lease(0, _chain(piece), timeout_s), wire.Leased, timeout_s)
        self._link.note_family(piece.family, leased.family)
        started = time.monotonic()
        try:
            arrived = await self._copy_out(piece, leased.offsets, leased.checksums, into)
        except asyncio.CancelledError:
            self._tell(wire.Release(0, leased.ticket, []))
            raise
        took_ms = (time.monotonic() - started) * 1e3
        damaged = leased.slots[arrived : arrived + 1]
        self.num_damaged += len(damaged)
        num_bytes = arrived * piece.family.payload_bytes
        released = await self._ask(wire.Release(0, leased.ticket, damaged, num_bytes, took_ms), wire.Released)
        return arrived if released.valid else 0

    async def _copy_out(
        self, piece: Piece, offsets: Sequence[int], checksums: Sequence[int], into: Sequence[memoryview]
    ) -> int:
        ids, size = split_block_ids(piece.ids)[: len(offsets)], piece.family.payload_bytes
        return await self._on_thread(partial(copy_out, self._link.memory(), size, ids, offsets, checksums, into))

    # Inside: storing

    async def _give_all(self, chain: Piece, payloads: Sequence[memoryview]) -> int:
        turns = asyncio.Semaphore(_PIECES_AT_ONCE)

        async def give(piece: Piece) -> int:
            async with turns:
                return await self._give(piece, payloads[piece.first - chain.first :][: piece.num_blocks])

        giving = [asyncio.create_task(give(piece)) for piece in pieces_of(chain, self._piece_bytes())]
        try:
            return sum(await asyncio.gather(*giving))
        finally:
            await called_off(giving)

    async def _give(self, piece: Piece, payloads: Sequence[memoryview]) -> int:
        reserved = await self._ask(wire.Reserve(0, _chain(piece)), wire.Reserved)
        self._link.note_family(piece.family, reserved.family)
        checksums: dict[int, int] = {}
        try:
            mine = [number for number, slot in enumerate(reserved.slots) if slot >= 0]
            if mine:
                sums = await self._copy_in(piece, mine, reserved.offsets, payloads)
                checksums = {reserved.slots[number]: one for number, one in zip(mine, sums, strict=True)}
        except asyncio.CancelledError:
            self._tell(wire.Commit(0, reserved.ticket, {}))
            raise
        return (await self._ask(wire.Commit(0, reserved.ticket, checksums), wire.Committed)).num_blocks

    async def _copy_in(
        self, piece: Piece, numbers: Sequence[int], offsets: Sequence[int], payloads: Sequence[memoryview]
    ) -> list[int]:
        """Those of these numbers."""
        ids = split_block_ids(piece.ids)
        work = partial(
            copy_in,
            self._link.memory(),
            piece.family.payload_bytes,
            [ids[number] for number in numbers],
            [offsets[number] for number in numbers],
            [payloads[number] for number in numbers],
        )
        return await self._on_thread(work)

    async def _on_thread(self, work: Callable[[], R]) -> R:
        return await finished(asyncio.get_running_loop().run_in_executor(self._threads, work))

    def _piece_bytes(self) -> int:
        """What is leased or reserved at once: few messages, but never much of the pool."""
        pool = self._link.pool
        pool_bytes = pool.layout.data_bytes if pool is not None else 0
        return min(_MAX_PIECE_BYTES, pool_bytes // _PIECES_PER_POOL)

    def _tell(self, message: wire.Request) -> None:
        self._link.tell(message)

    async def _ask(self, message: wire.Request, kind: type[A], timeout_s: float = 0.0) -> A:
        return await self._link.ask(message, kind, timeout_s)

    def _note(self, error: HeadwaterError) -> None:
        logger.debug("the KV store: %s", error.message)


def _chain(piece: Piece) -> wire.Chain:
    return wire.Chain(piece.family, piece.ids, piece.first, piece.parent)
