"""The way of blocks into the bucket: what is whole is written, the rest is gathered in memory until it is.

A put of several runs writes them side by side. Nothing is visible before it is safe: in the bucket, or copied.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec

from headwater.clock import Clock
from headwater.errors import TierUnavailable
from headwater.kv.block import Block, Family
from headwater.kv.stores.base import Kept
from headwater.kv.stores.object.bucket import Bucket, Uncertain
from headwater.kv.stores.object.catalogue import Catalogue, Doomed
from headwater.kv.stores.object.gathering import Loose, WholeRun
from headwater.kv.stores.object.known import KnownRun
from headwater.kv.stores.object.reading import Reader
from headwater.kv.stores.object.runs import RunShape, encode_header

FAMILIES = "families/"
_MAX_DELETED_AT_ONCE = 250
_MAX_ATTEMPTS = 8


class Writer:
    """See the module docstring."""

    def __init__(self, catalogue: Catalogue, bucket: Bucket, reader: Reader, clock: Clock) -> None:
        self._catalogue = catalogue
        self._bucket = bucket
        self._reader = reader
        self._clock = clock
        self._flying: dict[bytes, asyncio.Future[None]] = {}
        self._told_families: set[bytes] = set()
        self._telling = asyncio.Lock()
        self._deleting = asyncio.Lock()

    async def put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        await self._landed(blocks)
        shape = self._catalogue.shape(family)
        group = self._catalogue.group(shape)
        answers: dict[bytes, Kept] = {}
        order: list[Kept | bytes] = []
        fresh: dict[bytes, Loose] = {}
        for block, payload in zip(blocks, payloads, strict=True):
            if block.id in fresh or self._catalogue.visible(block.id):
                self._catalogue.use(block.id)
                order.append(Kept.PRESENT)
            elif self._catalogue.restore(block):
                order.append(Kept.STORED)
            else:
                fresh[block.id] = Loose(shape, block, payload, group)
                order.append(block.id)
        if fresh:
            answers = await self._put_fresh(shape, fresh)
        kept = [answers[one] if isinstance(one, bytes) else one for one in order]
        self._count(kept)
        return kept

    async def make_room(self, num_bytes: int, spared: set[bytes], group: int) -> bool:
        """Delete objects of ours until that many bytes of a group of tenants fit; False if they cannot."""
        catalogue = self._catalogue
        if catalogue.fits(num_bytes):
            return True
        if num_bytes > catalogue.options.cap_bytes:
            return False
        async with self._deleting:
            for _ in range(_MAX_ATTEMPTS):
                missing = catalogue.used_bytes + num_bytes - catalogue.options.cap_bytes
                if missing <= 0:
                    return True
                slack = min(catalogue.options.cap_bytes // 50, 8 * num_bytes)
                victims = catalogue.victims(missing + slack, spared, group)
                if not victims and not self._drop_gathered(missing, spared, group):
                    return False
                await self.delete(victims)
        return False

    async def delete_doomed(self) -> None:
        """Raises `TierUnavailable`; what is left is tried again by upkeep."""
        if self._catalogue.doomed:
            async with self._deleting:
                await self.delete(list(self._catalogue.doomed.values()))

    async def delete(self, doomed: Sequence[Doomed]) -> None:
        for start in range(0, len(doomed), _MAX_DELETED_AT_ONCE):
            part = doomed[start : start + _MAX_DELETED_AT_ONCE]
            await self._bucket.delete([one.key for one in part])
            for one in part:
                self._catalogue.gone(one.name)

    # One put

    async def _landed(self, blocks: Sequence[Block]) -> None:
        """Wait for other calls that are writing the same blocks."""
        while waiting := {self._flying[block.id] for block in blocks if block.id in self._flying}:
            await asyncio.wait(waiting)

    async def _put_fresh(self, shape: RunShape, fresh: dict[bytes, Loose]) -> dict[bytes, Kept]:
        landed = asyncio.get_running_loop().create_future()
        self._flying.update(dict.fromkeys(fresh, landed))
        try:
            answers = await self._write_whole(shape, fresh)
            rest = {block_id: loose for block_id, loose in fresh.items() if block_id not in answers}
            answers |= await self._gather(rest, spared=set(fresh))
        finally:
            for block_id in fresh:
                del self._flying[block_id]
            landed.set_result(None)
        await self._write_late(shape, fresh)
        return answers

    async def _write_late(self, shape: RunShape, fresh: dict[bytes, Loose]) -> None:
        """Runs of others that waited for these blocks, and whose blocks are in memory all."""
        blocks = [loose.block for loose in fresh.values()]
        late = self._catalogue.gathering.made_whole(shape, blocks, self._find)
        with contextlib.suppress(TierUnavailable):
            await self._write_all(late, set(fresh))

    async def _write_whole(self, shape: RunShape, fresh: dict[bytes, Loose]) -> dict[bytes, Kept]:
        """Write what the fresh blocks make whole: what became of those among them."""

        def find(block_id: bytes) -> Loose | tuple[KnownRun, int] | None:
            return fresh.get(block_id) or self._find(block_id)

        runs = self._catalogue.gathering.made_whole(shape, [loose.block for loose in fresh.values()], find)
        answers: dict[bytes, Kept] = {}
        for run, kept in zip(runs, await self._write_all(runs, set(fresh)), strict=True):
            for loose in run.loose:
                block_id = loose.block.id
                if block_id in fresh and answers.get(block_id) is not Kept.STORED:
                    answers[block_id] = kept
        return answers

    async def _write_all(self, runs: list[WholeRun], spared: set[bytes]) -> list[Kept]:
        spared = spared | {run.name for run in runs}
        results = await asyncio.gather(*(self._write(run, spared) for run in runs), return_exceptions=True)
        trouble = [result for result in results if isinstance(result, BaseException)]
        for error in trouble:
            if not isinstance(error, TierUnavailable):
                raise error
        if trouble and len(trouble) == len(results):
            raise trouble[0]
        return [Kept.FAILED if isinstance(result, BaseException) else result for result in results]

    async def _gather(self, rest: dict[bytes, Loose], spared: set[bytes]) -> dict[bytes, Kept]:
        answers: dict[bytes, Kept] = {}
        for block_id, loose in rest.items():
            room = self._room_to_gather(loose, spared)
            if room and not self._catalogue.fits(len(loose.payload)):
                room = await self.make_room(len(loose.payload), spared, loose.group)
            if room and not self._catalogue.visible(block_id):
                self._catalogue.gather(loose)
            answers[block_id] = Kept.STORED if room else Kept.REFUSED
        return answers

    def _room_to_gather(self, loose: Loose, spared: set[bytes]) -> bool:
        gathering, most = self._catalogue.gathering, self._catalogue.options.gather_bytes
        num_bytes = len(loose.payload)
        over = gathering.num_bytes + num_bytes - most
        return over <= 0 or (num_bytes <= most and self._drop_gathered(over, spared, loose.group))

    def _drop_gathered(self, num_bytes: int, spared: set[bytes], group: int) -> bool:
        """Give up gathered blocks for a group of tenants, those of this put not among them; whether that was enough."""
        doomed: list[bytes] = []
        for loose in self._catalogue.gathered(group):
            if num_bytes <= 0:
                break
            if loose.block.id not in spared:
                doomed.append(loose.block.id)
                num_bytes -= len(loose.payload)
        self._catalogue.count.evicted += self._catalogue.drop_gathered(doomed)
        self._catalogue.gathering.trim()
        return num_bytes <= 0

    def _find(self, block_id: bytes) -> Loose | tuple[KnownRun, int] | None:
        return self._catalogue.gathering.get(block_id) or self._catalogue.blocks.find(block_id)

    # One run

    async def _write(self, run: WholeRun, spared: set[bytes]) -> Kept:
        shape = run.shape
        if not await self.make_room(shape.object_bytes, spared, run.loose[0].group):
            return Kept.REFUSED
        self._catalogue.reserve(shape.object_bytes)
        try:
            return await self._write_reserved(run)
        finally:
            self._catalogue.release(shape.object_bytes)

    async def _write_reserved(self, run: WholeRun) -> Kept:
        shape, name, catalogue = run.shape, run.name, self._catalogue
        blocks, payloads = await self._content(run)
        if not blocks:
            return Kept.FAILED
        await self._tell_family(shape)
        if name in catalogue.doomed:
            await self.delete_doomed()
        try:
            created = await self._bucket.create(shape.key(name), [encode_header(shape, blocks), *payloads])
        except (Uncertain, asyncio.CancelledError):
            catalogue.doubt(shape, name)
            raise
        if created:
            catalogue.own(shape, name, self._clock.epoch())
        self._reader.appeared(name)
        n = shape.num_blocks
        catalogue.learn(shape, name, ((block.position % n, block.id) for block in blocks), blocks[0].parent)
        return Kept.STORED if created else Kept.PRESENT

    async def _content(self, run: WholeRun) -> tuple[list[Block], list[memoryview]]:
        blocks = [loose.block for loose in run.loose]
        payloads = [loose.payload for loose in run.loose]
        if run.borrowed is None:
            return blocks, payloads
        source, count = run.borrowed
        buffer = memoryview(bytearray(count * run.shape.payload_bytes))
        size = run.shape.payload_bytes
        views = [buffer[i * size : (i + 1) * size] for i in range(count)]
        wanted = [(index, block_id) for index, block_id in enumerate(source.ids[:count]) if block_id is not None]
        if len(wanted) < count:
            return [], []
        found = await self._reader.read_run(source, wanted, views)
        intact = [block for block in found if isinstance(block, Block)]
        if len(intact) < count:
            return [], []
        return intact + blocks, views + payloads

    async def _tell_family(self, shape: RunShape) -> None:
        """So that others can clear by tenant or model what they never wrote."""
        async with self._telling:
            if shape.family not in self._told_families:
                family = self._catalogue.families[shape.family]
                await self._bucket.create(f"{FAMILIES}{shape.family.hex()}", [msgspec.msgpack.encode(family)])
                self._told_families.add(shape.family)

    def _count(self, kept: list[Kept]) -> None:
        count = self._catalogue.count
        count.stored += kept.count(Kept.STORED)
        count.refused += kept.count(Kept.REFUSED)
        count.failed += kept.count(Kept.FAILED)
