"""The disk tier: preallocated files of one folder, a hard cap, a table that survives any crash.

A block's payload is written before its record, and its record is cleared before its place is used again, so a process
killed at any instruction leaves whole blocks and free places, nothing else. After a loss of power, records and payloads
may not match; every payload is checked when it is read, so that costs blocks, never a wrong answer. Nothing waits for
the medium to confirm (no fsync): a cache may lose its newest blocks, and waiting would cost what it saves.

The tier refuses work while the medium does not answer (`TierUnavailable`), and for a while after it failed repeatedly.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headwater.clock import Clock
from headwater.errors import TierUnavailable
from headwater.kv.block import Block, Family
from headwater.kv.shares import Limits
from headwater.kv.space import Space
from headwater.kv.stores.base import Absent, Kept, TierUsage
from headwater.kv.stores.breaker import Breaker
from headwater.kv.stores.disk_files import DiskFiles
from headwater.kv.stores.disk_io import DiskIo, Outcome, Piece
from headwater.kv.stores.ledgered import BlockWorth, LedgerTier, TierOptions, equal_worth, kept, make_ledger, usage_of
from headwater.kv.table import RECORD_BYTES, BlockTable, index_bytes
from headwater.types import Tier

logger = logging.getLogger(__name__)

_HOLDER = 0
_STALL_S = 10.0
_FAILURES_BEFORE_PAUSE = 8
_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class DiskOptions:
    folder: Path
    tier: TierOptions
    direct: bool = False
    """Go around the page cache (O_DIRECT): for devices faster than a copy, and to leave memory to others."""
    num_threads: int = 4
    max_calls: int = 8
    """Calls in flight; more wait their turn."""


class DiskTier(LedgerTier):
    """See the module docstring."""

    tier: Tier = "disk"

    def __init__(self, options: DiskOptions, clock: Clock, worth: BlockWorth = equal_worth) -> None:
        """Opens or makes the folder; raises `ConfigError`."""
        tier = options.tier
        self.options = options
        self._files = DiskFiles(options.folder, tier.cap_bytes, tier.num_records, direct=options.direct)
        sizes = self._files.sizes
        records = memoryview(self._files.records)[: sizes.num_records * RECORD_BYTES]
        table = BlockTable(records, memoryview(bytearray(index_bytes(sizes.num_records))))
        space = Space(sizes.data_bytes, sizes.chunk_bytes)
        super().__init__(make_ledger("disk", tier, table, space, worth), clock)
        started = clock.now()
        manifest = self._files.manifest
        self.num_useless = self.ledger.recover(manifest.families, manifest.limits)
        """Records of a former life that could not be used."""
        self.reopen_s = clock.now() - started
        self._io = DiskIo(self._files.fd, self._files.direct_fd, options.num_threads, clock)
        self._turns = asyncio.Semaphore(options.max_calls)
        self._num_failed = 0
        self._limits_unsaved = False
        self._breaker = Breaker(clock, random.Random().random, threshold=_FAILURES_BEFORE_PAUSE)

    async def put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        async with self._working():
            return await self._put(family, blocks, payloads)

    async def get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> list[Block | Absent]:
        async with self._working():
            return await self._get(family, ids, into)

    def limits(self) -> Limits:
        """What tenants may fill, those of former lives included."""
        return self.ledger.limits()

    def tick(self) -> None:
        super().tick()
        if self._io.stalled_s() <= _STALL_S:
            self._save_limits()

    def usage(self) -> TierUsage:
        overhead = self._files.sizes.records_bytes
        used = self.ledger.space.used_bytes + overhead if not self._closed else 0
        return usage_of(self.ledger, used, self.options.tier.cap_bytes, self._num_failed)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(_CLOSE_S):
                for _ in range(self.options.max_calls):
                    await self._turns.acquire()
        except TimeoutError:
            # Threads hang in the kernel with our files; letting go of those would let them write into others.
            logger.error("the disk tier at %s does not answer: it is left behind", self.options.folder)
            self._io.close(wait=False)
            return
        self._io.close(wait=True)
        self._save_limits()
        self._let_go()

    def abandon(self) -> None:
        """Instead of `close`, before anything was asked of it."""
        self._closed = True
        self._io.close(wait=True)
        self._let_go()

    def _let_go(self) -> None:
        self.ledger.table.close()
        self._files.close()

    async def _put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        ticket, answers = self.ledger.reserve(_HOLDER, family, blocks, self._clock.now())
        checksums: dict[int, int] = {}
        committed: set[int] = set()
        try:
            pieces = [
                Piece(answer, self.ledger.reserved_offset(ticket, answer), payload, block.id, block.checksum)
                for answer, block, payload in zip(answers, blocks, payloads, strict=True)
                if isinstance(answer, int)
            ]
            if pieces:
                self._save_families()
                done = set(self._judge(await self._io.write(pieces)).done)
                checksums = {piece.number: piece.checksum for piece in pieces if piece.number in done}
        finally:
            committed.update(self.ledger.commit(_HOLDER, ticket, checksums, int(self._clock.epoch())))
        return kept(answers, committed)

    async def _get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> list[Block | Absent]:
        now, now_s = self._clock.now(), int(self._clock.epoch())
        ticket, found = self.ledger.lease(_HOLDER, family, ids, now, now_s)
        outcome = Outcome([], [], [])
        damaged: list[int] = []
        try:
            pieces = [
                Piece(number, hit[1].offset, view, hit[1].block.id, hit[1].block.checksum)
                for number, (hit, view) in enumerate(zip(found, into, strict=True))
                if hit is not None
            ]
            if pieces:
                outcome = self._judge(await self._io.read(pieces))
            damaged = [hit[0] for number in outcome.damaged if (hit := found[number]) is not None]
        finally:
            whole = self.ledger.release(_HOLDER, ticket, damaged)
        done, spoilt = set(outcome.done) if whole else set[int](), set(outcome.damaged)
        return [
            Absent.MISSING if hit is None
            else hit[1].block if number in done
            else Absent.DAMAGED if number in spoilt
            else Absent.FAILED
            for number, hit in enumerate(found)
        ]  # fmt: skip

    def _save_families(self) -> None:
        """A record must never name a family that the manifest does not have."""
        families = list(self.ledger.families)
        if families != self._files.manifest.families:
            self._files.write_manifest(families, self.ledger.limits())

    def _save_limits(self) -> None:
        """Those that changed since the families were written."""
        limits = self.ledger.limits()
        if limits == self._files.manifest.limits:
            return
        try:
            self._files.write_manifest(self._files.manifest.families, limits)
        except TierUnavailable as error:
            if not self._limits_unsaved:
                logger.error("the disk tier would not keep limits of tenants over a restart: %s", error.message)
            self._limits_unsaved = True
        else:
            self._limits_unsaved = False

    def _judge(self, outcome: Outcome) -> Outcome:
        """A medium that fails again and again is left alone for a while."""
        self._num_failed += len(outcome.failed)
        if not outcome.failed:
            self._breaker.succeed()
        elif self._breaker.fail(f"{self.options.folder} fails again and again"):
            logger.error("the disk tier: %s", self._breaker.reason)
        return outcome

    @asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        """A turn at a medium that answers."""
        self._check_open()
        self._check_stalled()
        async with self._turns:
            self._check_open()
            self._check_stalled()
            if not self._breaker.allow():
                raise TierUnavailable(self._breaker.reason, retry_after_s=self._breaker.retry_after_s())
            try:
                yield
            finally:
                self._breaker.abandon()

    def _check_stalled(self) -> None:
        stalled_s = self._io.stalled_s()
        if stalled_s > _STALL_S:
            raise TierUnavailable(
                f"{self.options.folder} has not answered for {stalled_s:.0f} s", retry_after_s=_STALL_S
            )
