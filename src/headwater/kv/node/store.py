"""The store of one node: the host tier in the middle, other tiers below it.

Up: `fetch` brings the blocks of a chain into the host tier, piece by piece, from whichever tier has them nearest.
Down: what was written or used is considered for the lower tiers by their admission and, if its turn comes, copied; a
block is not moved down but copied while it is still in the host tier, so eviction there never waits.

A lower tier that fails makes its blocks absent, nothing else. All work at a tier is bounded and has turns.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headwater.clock import Clock
from headwater.errors import StoreError, Unavailable
from headwater.kv.admission import Admission
from headwater.kv.block import Block, Family
from headwater.kv.identity import split_block_ids
from headwater.kv.node.prices import NodePrices
from headwater.kv.node.turns import Priority, Turns
from headwater.kv.pricing import TierRun
from headwater.kv.reservations import Refusal
from headwater.kv.stores.base import TierStore
from headwater.kv.stores.disk import DiskTier
from headwater.kv.stores.host import LOCAL, HostTier
from headwater.kv.stores.quantized import bare
from headwater.kv.table import run_of
from headwater.types import BLOCK_ID_BYTES, Tier

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
_TURNS_PER_TIER = 4
_MAX_WAITING = 256
_MAX_SPILLS = 65_536
_SPILL_TIMEOUT_S = 30.0
_BUSY_WAIT_S = 0.25
_TICK_S = 1.0
_CLOSE_S = 30.0


class Piece(NamedTuple):
    """Consecutive blocks of a chain."""

    family: Family
    ids: bytes
    first: int
    parent: bytes

    @property
    def num_blocks(self) -> int:
        return len(self.ids) // BLOCK_ID_BYTES

    def part(self, start: int, end: int) -> "Piece":
        """Blocks `start` to `end`, counted within the piece."""
        parent = self.ids[(start - 1) * BLOCK_ID_BYTES : start * BLOCK_ID_BYTES] if start else self.parent
        return Piece(self.family, self.ids[start * BLOCK_ID_BYTES : end * BLOCK_ID_BYTES], self.first + start, parent)

    def blocks(self) -> list[Block]:
        """Without checksums: those are not known yet."""
        ids = split_block_ids(self.ids)
        parents = [self.parent, *ids]
        return [Block(block_id, parents[i], self.first + i, 0) for i, block_id in enumerate(ids)]


def pieces_of(chain: Piece, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Parts of at most so many bytes, but at least a block."""
    step = max(1, piece_bytes // chain.family.payload_bytes)
    return [chain.part(start, min(start + step, chain.num_blocks)) for start in range(0, chain.num_blocks, step)]


@dataclass(slots=True)
class _Lower:
    """A tier below the host tier and what is under way there."""

    tier: TierStore
    admission: Admission | None
    """None: nothing is written to it."""
    turns: Turns = field(default_factory=lambda: Turns(_TURNS_PER_TIER, _MAX_WAITING))
    spills: deque[Piece] = field(default_factory=deque[Piece])
    spilling: set[bytes] = field(default_factory=set[bytes])
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = ""
    num_dropped: int = 0


class NodeStore:
    """See the module docstring. Owns its tiers; lives on one event loop."""

    def __init__(
        self,
        host: HostTier,
        lower: Sequence[TierStore],
        admissions: Mapping[Tier, Admission],
        prices: NodePrices,
        clock: Clock,
    ) -> None:
        self.host, self.prices = host, prices
        self.lower = [_Lower(tier, admissions.get(tier.tier)) for tier in lower]
        self._clock = clock
        self._commit = asyncio.Event()
        self._warned: set[Tier] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._going_on: set[asyncio.Task[None]] = set()
        """Loads, whoever still waits for them."""

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._tick()))
        self._tasks += [asyncio.create_task(self._spill(one)) for one in self.lower if one.admission]

    async def close(self) -> None:
        """Idempotent. What has not been copied down yet stays undone."""
        tasks, self._tasks = self._tasks, []
        for task in (*tasks, *self._going_on):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._going_on:
            await asyncio.wait(self._going_on, timeout=_CLOSE_S)
        for one in self.lower:
            with suppress(StoreError):
                await one.tier.close()
        await self.host.close()

    @property
    def tiers(self) -> list[TierStore]:
        return [self.host, *(one.tier for one in self.lower)]

    # Looking

    def locate(self, chain: Piece, num_parts: int = 1) -> list[TierRun]:
        """From where the longest known prefix of the chain would come, and how long that would take if so many chains
        of this size came together."""
        runs: list[tuple[Tier, int]] = []
        flags = [(one.tier, one.known(chain.ids)) for one in self.tiers]
        for number in range(chain.num_blocks):
            tier = next((tier for tier, known in flags if known[number]), None)
            if tier is None:
                break
            if runs and runs[-1][0] == tier:
                runs[-1] = tier, runs[-1][1] + 1
            else:
                runs.append((tier, 1))
        size = chain.family.payload_bytes * num_parts
        return [TierRun(tier, count, self.prices.load_ms(tier, count * size)) for tier, count in runs]

    async def ask(self, chain: Piece, timeout_s: float) -> None:
        """Let tiers that others write to as well find out what they have of the chain; `locate` then knows."""
        known = sum(run.num_blocks for run in self.locate(chain))
        rest = chain.part(known, chain.num_blocks)
        if not rest.num_blocks:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._ask(one, rest) for one in self.lower))

    async def _ask(self, one: _Lower, chain: Piece) -> None:
        try:
            await one.tier.contains(chain.family, chain.ids, chain.first)
        except StoreError as error:
            self._note_problem(one, error)

    # Up

    async def fetch(self, chain: Piece, priority: Priority, timeout_s: float) -> int:
        """Bring the chain into the host tier; how many blocks, from its start on, are there when this returns.

        What is demanded but not known here is asked for, half of the time at most: of blocks in several parts only the
        first were looked up."""
        deadline = self._clock.now() + timeout_s
        if priority is Priority.DEMANDED:
            await self.ask(chain, timeout_s / 2)
        present = 0
        for piece in pieces_of(chain):
            await self._within(deadline, self._fetch_piece(piece, priority, timeout_s))
            leading = self.host.ledger.table.num_leading(piece.ids)
            present += leading
            if leading < piece.num_blocks:
                break
        return present

    async def _within(self, deadline: float, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work up to a time and no longer. It goes on without us, for a read that was begun cannot be called
        off, and what it brings may be of use to others."""
        task = asyncio.create_task(work)
        self._going_on.add(task)
        task.add_done_callback(self._gone_on)
        await asyncio.wait({task}, timeout=max(0.0, deadline - self._clock.now()))

    def _gone_on(self, task: "asyncio.Task[None]") -> None:
        self._going_on.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a load into the host tier failed: %s", error, exc_info=error)

    async def _fetch_piece(self, piece: Piece, priority: Priority, timeout_s: float) -> None:
        for run in self.locate(piece):
            if run.tier == "host":
                piece = piece.part(run.num_blocks, piece.num_blocks)
                continue
            one = next(one for one in self.lower if one.tier.tier == run.tier)
            try:
                await self._load(one, piece.part(0, run.num_blocks), priority, timeout_s)
            except (StoreError, Unavailable) as error:
                self._note_problem(one, error)
                return
            piece = piece.part(run.num_blocks, piece.num_blocks)

    async def _load(self, one: _Lower, piece: Piece, priority: Priority, timeout_s: float) -> None:
        """From a lower tier into places of the host tier, without a copy between."""
        num_bytes = piece.num_blocks * piece.family.payload_bytes
        self.prices.queue(one.tier.tier, num_bytes)
        try:
            async with one.turns.turn(priority, timeout_s):
                await self._load_now(one, piece, timeout_s)
        finally:
            self.prices.queue(one.tier.tier, -num_bytes)

    async def _load_now(self, one: _Lower, piece: Piece, timeout_s: float) -> None:
        ticket, answers = self.host.reserve(LOCAL, piece.family, piece.blocks())
        wanted = list(zip(split_block_ids(piece.ids), answers, strict=True))
        mine = [(block_id, slot) for block_id, slot in wanted if isinstance(slot, int)]
        written: dict[int, int] = {}
        try:
            if mine:
                into = [self.host.place(ticket, slot, piece.family) for _, slot in mine]
                started = self._clock.now()
                found = await one.tier.get(piece.family, b"".join(block_id for block_id, _ in mine), into)
                written = {
                    slot: block.checksum
                    for (_, slot), block in zip(mine, found, strict=True)
                    if isinstance(block, Block)
                }
                if written:
                    took_ms = (self._clock.now() - started) * 1e3
                    self.prices.observe(one.tier.tier, len(written) * piece.family.payload_bytes, took_ms)
                    one.problem = ""
        finally:
            self.host.commit(LOCAL, ticket, written)
            self.committed()
        busy = b"".join(block_id for block_id, answer in wanted if answer is Refusal.BUSY)
        await self._others(busy, min(timeout_s, _BUSY_WAIT_S))

    async def _others(self, ids: bytes, timeout_s: float) -> None:
        """Wait for blocks that somebody else is writing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not all(self.host.known(ids)):
                    await self._commit.wait()

    def committed(self) -> None:
        """Something came into the host tier: whoever waits for it may look."""
        commit, self._commit = self._commit, asyncio.Event()
        commit.set()

    # Down

    def used(self, piece: Piece) -> None:
        """Blocks were written or read: lower tiers may want them."""
        for one in self.lower:
            if one.admission is None:
                continue
            known = one.tier.known(piece.ids)
            admitted = [
                not here and one.admission.admit(int.from_bytes(block_id[:8], "little"))
                for block_id, here in zip(split_block_ids(piece.ids), known, strict=True)
            ]
            self._queue_spills(one, piece, admitted)

    def _queue_spills(self, one: _Lower, piece: Piece, admitted: Sequence[bool]) -> None:
        start = 0
        while start < piece.num_blocks:
            if not admitted[start]:
                start += 1
                continue
            end = start + run_of(admitted[start:])
            last = piece.first + end - 1
            if self.prices.pays(one.tier.tier, piece.family, last, end - start):
                self._queue_spill(one, piece.part(start, end))
            start = end

    def _queue_spill(self, one: _Lower, piece: Piece) -> None:
        if len(one.spilling) + piece.num_blocks > _MAX_SPILLS:
            one.num_dropped += piece.num_blocks
            return
        if piece.ids[:BLOCK_ID_BYTES] in one.spilling:
            return
        one.spilling.update(split_block_ids(piece.ids))
        one.spills.extend(pieces_of(piece))
        one.wake.set()

    async def _spill(self, one: _Lower) -> None:
        while True:
            while not one.spills:
                one.wake.clear()
                await one.wake.wait()
            piece = one.spills.popleft()
            try:
                async with one.turns.turn(Priority.BACKGROUND, _SPILL_TIMEOUT_S):
                    await self._spill_now(one, piece)
            except (StoreError, Unavailable) as error:
                self._note_problem(one, error)
                one.num_dropped += piece.num_blocks
            except Exception:
                logger.exception("blocks could not be written to the %s tier", one.tier.tier)
                one.num_dropped += piece.num_blocks
            finally:
                one.spilling.difference_update(split_block_ids(piece.ids))

    async def _spill_now(self, one: _Lower, piece: Piece) -> None:
        ticket, found = self.host.lease(LOCAL, piece.family, piece.ids, use=False)
        try:
            here = [hit[1] for hit in found if hit is not None]
            views = [self.host.pool.view(record.offset, record.payload_bytes) for record in here]
            if here:
                await one.tier.put(piece.family, [record.block for record in here], views)
        finally:
            self.host.release(LOCAL, ticket)

    # Upkeep

    def _note_problem(self, one: _Lower, error: StoreError | Unavailable) -> None:
        if one.problem != error.message:
            logger.warning("the %s tier: %s", one.tier.tier, error.message)
            one.problem = error.message

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for tier in map(bare, self.tiers):
                if isinstance(tier, HostTier | DiskTier):
                    tier.tick()
                    self._warn_of_table(tier)

    def _warn_of_table(self, tier: HostTier | DiskTier) -> None:
        ledger = tier.ledger
        roomy = ledger.space.used_bytes < ledger.rules.low_watermark * ledger.space.num_bytes
        if ledger.table_was_full and roomy and tier.tier not in self._warned:
            self._warned.add(tier.tier)
            logger.warning(
                "small blocks have filled the table of the %s tier, %d in %d of %d bytes: "
                "headwater kv serve --min-block makes room for more",
                tier.tier, ledger.table.num_blocks, ledger.space.used_bytes, ledger.space.num_bytes,
            )  # fmt: skip
