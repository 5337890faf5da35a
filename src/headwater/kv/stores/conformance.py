"""What every tier must do. Subclass, provide `open_tier` and `damage`, and let pytest collect the class."""

import asyncio
from collections.abc import Sequence

import msgspec

from headwater.errors import StoreClosed
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.identity import chain_block_ids, split_block_ids
from headwater.kv.resident import ResidentBlocks
from headwater.kv.stores.base import Absent, Kept, TierStore
from headwater.runtime.conformance import on_loop

PAYLOAD_BYTES = 8192
ROOM_BLOCKS = 64
"""How many blocks of `FAMILY` the tier under test has room for, at least; at most ten times as many."""

FAMILY = Family("model-a", "test", "", PAYLOAD_BYTES)
OTHER = Family("model-b", "test", "tenant-b", PAYLOAD_BYTES)
BESIDE = msgspec.structs.replace(FAMILY, parts=2, beside=True)


class Run:
    """Consecutive blocks of one chain, with payloads that tell them apart."""

    def __init__(self, name: str, count: int, family: Family = FAMILY) -> None:
        self.family = family
        key = name.encode().ljust(32, b".")[:32]
        self.ids = chain_block_ids(key, bytes(4 * count), 1)
        self.split = split_block_ids(self.ids)
        self.payloads = [memoryview(self._payload(block_id)) for block_id in self.split]
        parents = [ROOT, *self.split]
        self.blocks = [
            Block(block_id, parents[i], i, checksum(block_id, self.payloads[i]))
            for i, block_id in enumerate(self.split)
        ]

    def _payload(self, block_id: bytes) -> bytes:
        size = self.family.payload_bytes
        return (block_id * (size // len(block_id) + 1))[:size]

    async def put(self, tier: TierStore) -> list[Kept]:
        return await tier.put(self.family, self.blocks, self.payloads)

    async def get(self, tier: TierStore) -> list[Block | Absent]:
        """What the tier answers; every block it vouches for has been compared with what was put."""
        into = [memoryview(bytearray(self.family.payload_bytes)) for _ in self.split]
        found = await tier.get(self.family, self.ids, into)
        assert len(found) == len(self.blocks)
        for block, answer, view, payload in zip(self.blocks, found, into, self.payloads, strict=True):
            if isinstance(answer, Block):
                assert answer == block
                assert view == payload
        return found


def only(expected: object, answers: Sequence[object]) -> bool:
    return all(answer == expected for answer in answers)


class TierConformance:
    """The suite."""

    async def open_tier(self) -> TierStore:
        """An empty tier with room for `ROOM_BLOCKS` blocks of 8 KiB, at most for ten times that."""
        raise NotImplementedError

    async def damage(self, tier: TierStore, block_id: bytes) -> None:
        """Flip one bit of the payload where the tier keeps it."""
        raise NotImplementedError

    async def upkeep(self, tier: TierStore) -> None:
        """Have the tier do now what it does on the side every second or so, if it does anything."""

    @on_loop
    async def test_an_empty_tier_has_nothing(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 3)
        assert tier.known(run.ids) == bytes(3)
        assert await tier.contains(FAMILY, run.ids) == bytes(3)
        assert only(Absent.MISSING, await run.get(tier))
        assert await tier.remove(run.ids) == 0
        assert await tier.clear() == 0
        assert tier.usage().num_blocks == 0
        assert tier.drain_events() == []
        await tier.close()

    @on_loop
    async def test_what_was_put_is_got(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 10)
        assert only(Kept.STORED, await run.put(tier))
        assert tier.known(run.ids) == b"\1" * 10
        assert await tier.contains(FAMILY, run.ids + Run("b", 1).ids) == b"\1" * 10 + b"\0"
        assert await run.get(tier) == run.blocks
        usage = tier.usage()
        assert (usage.num_blocks, usage.num_stored, usage.num_hits) == (10, 10, 10)
        assert 10 * PAYLOAD_BYTES <= usage.used_bytes <= usage.cap_bytes
        await tier.close()

    @on_loop
    async def test_blocks_are_immutable(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 2)
        await run.put(tier)
        changed = [memoryview(bytes(PAYLOAD_BYTES)) for _ in run.blocks]
        assert only(Kept.PRESENT, await tier.put(FAMILY, run.blocks, changed))
        assert await run.get(tier) == run.blocks
        twice = Run("b", 1)
        kept = await tier.put(FAMILY, twice.blocks * 2, twice.payloads * 2)
        assert sorted(one.value for one in kept) == ["present", "stored"]
        await tier.close()

    @on_loop
    async def test_a_batch_answers_per_block(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 5)
        await tier.put(FAMILY, run.blocks[::2], run.payloads[::2])
        found = await run.get(tier)
        assert [isinstance(one, Block) for one in found] == [True, False, True, False, True]
        assert tier.known(run.ids) == b"\1\0\1\0\1"
        await tier.close()

    @on_loop
    async def test_a_payload_that_does_not_match_its_checksum_is_never_served(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 3)
        wrong = [run.payloads[0], memoryview(bytes(PAYLOAD_BYTES)), run.payloads[2]]
        await tier.put(FAMILY, run.blocks, wrong)
        found = await run.get(tier)
        assert found[0] == run.blocks[0]
        assert found[1] in (Absent.DAMAGED, Absent.MISSING)
        await tier.close()

    @on_loop
    async def test_a_flipped_bit_is_never_served(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 4)
        await run.put(tier)
        await self.damage(tier, run.split[2])
        found = await run.get(tier)
        assert found[2] is Absent.DAMAGED
        assert [found[0], found[1], found[3]] == [run.blocks[0], run.blocks[1], run.blocks[3]]
        assert (await run.get(tier))[2] is Absent.MISSING
        assert tier.known(run.split[2]) == b"\0"
        assert tier.usage().num_damaged == 1
        assert (await run.put(tier))[2] is Kept.STORED, "a damaged block can be stored anew"
        assert await run.get(tier) == run.blocks
        await tier.close()

    @on_loop
    async def test_the_wrong_family_is_a_miss(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 1)
        await run.put(tier)
        smaller = Family(FAMILY.model, FAMILY.layout, FAMILY.tenant, 4096)
        assert await tier.get(smaller, run.ids, [memoryview(bytearray(4096))]) == [Absent.MISSING]
        assert await run.get(tier) == run.blocks
        await tier.close()

    @on_loop
    async def test_remove(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 6)
        await run.put(tier)
        assert await tier.remove(b"".join(run.split[3:])) == 3
        assert await tier.remove(b"".join(run.split[2:])) == 1
        assert tier.known(run.ids) == b"\1\1\0\0\0\0"
        assert tier.usage().num_blocks == 2
        await tier.close()

    @on_loop
    async def test_clear_by_tenant_and_model(self) -> None:
        tier = await self.open_tier()
        ours, theirs = Run("a", 4), Run("b", 3, OTHER)
        await ours.put(tier)
        await theirs.put(tier)
        assert await tier.clear(tenant="nobody") == 0
        assert await tier.clear(tenant="tenant-b", model="model-a") == 0
        assert await tier.clear(tenant="tenant-b") == 3
        assert only(Absent.MISSING, await theirs.get(tier))
        assert await ours.get(tier) == ours.blocks
        assert await tier.clear(model="model-a") == 4
        await theirs.put(tier)
        assert await tier.clear() == 3
        assert tier.usage().num_blocks == 0
        await tier.close()

    @on_loop
    async def test_the_cap_holds_and_old_blocks_make_room(self) -> None:
        tier = await self.open_tier()
        last: Run | None = None
        stored = 0
        for number in range(ROOM_BLOCKS * 30 // 16):
            last = Run(f"run {number}", 16)
            stored += sum(kept is Kept.STORED for kept in await last.put(tier))
            usage = tier.usage()
            assert usage.used_bytes <= usage.cap_bytes
        assert stored >= ROOM_BLOCKS
        assert tier.usage().num_blocks <= 10 * ROOM_BLOCKS
        assert tier.usage().num_evicted + tier.usage().num_refused > 0
        assert last is not None
        await last.get(tier)
        await tier.close()

    @on_loop
    async def test_a_tenant_that_floods_takes_no_more_than_its_limit(self) -> None:
        tier = await self.open_tier()
        ours = [Run(f"ours {number}", 16) for number in range(10 * ROOM_BLOCKS // 16)]
        for run in ours:
            await run.put(tier)
        before = sum(sum(tier.known(run.ids)) for run in ours)
        tier.limit("tenant-b", 0.25)
        theirs = [Run(f"theirs {number}", 16, OTHER) for number in range(12 * ROOM_BLOCKS // 16)]
        for run in theirs:
            await run.put(tier)
        left = sum(sum(tier.known(run.ids)) for run in ours)
        held = sum(sum(tier.known(run.ids)) for run in theirs)
        assert held >= ROOM_BLOCKS // 16, "within its limit it has room"
        # Room is made a little more at a time than is needed, and in whole objects.
        assert left >= 0.7 * before
        tier.limit("tenant-b", 1.0)
        for run in theirs:
            await run.put(tier)
        assert sum(sum(tier.known(run.ids)) for run in ours) < 0.5 * before, "as much as anybody"
        await tier.close()

    @on_loop
    async def test_a_limit_that_comes_late_or_ends_counts_for_what_is_there(self) -> None:
        tier = await self.open_tier()
        ours, theirs = Run("ours", 8), Run("theirs", 16, OTHER)
        await ours.put(tier)
        await theirs.put(tier)
        all_bytes = sum(one.used_bytes for one in tier.shares())
        assert [one.tenant for one in tier.shares()] == [""]
        for fraction, part in ((0.25, 2 / 3), (0.5, 2 / 3), (1.0, 0.0), (0.01, 2 / 3)):
            tier.limit("tenant-b", fraction)
            await self.upkeep(tier)
            shares = {one.tenant: one for one in tier.shares()}
            assert sum(one.used_bytes for one in shares.values()) == all_bytes
            if part:
                assert shares["tenant-b"].used_bytes == part * all_bytes
                assert shares["tenant-b"].limit == fraction
            else:
                assert shares.keys() == {""}
        for number in range(10 * ROOM_BLOCKS // 16):
            await Run(f"run {number}", 16).put(tier)
        left = sum(tier.known(theirs.ids))
        await self.upkeep(tier)
        shares = {one.tenant: one for one in tier.shares()}
        assert left < 16, "what was there before has to go"
        assert tier.usage().num_blocks > left
        assert (shares["tenant-b"].used_bytes > 0) == (left > 0)
        await tier.clear()
        assert sum(one.used_bytes for one in tier.shares()) == 0
        await tier.close()

    @on_loop
    async def test_events_add_up_to_what_is_resident(self) -> None:
        tier = await self.open_tier()
        resident = ResidentBlocks()
        runs = [Run(f"run {number}", 16) for number in range(ROOM_BLOCKS // 2)]

        def follow() -> None:
            for event in tier.drain_events():
                assert event.tier == tier.tier
                resident.apply(event)

        for run in runs:
            await run.put(tier)
            follow()
        await tier.remove(runs[-1].split[-1])
        await tier.clear(model="nothing")
        follow()
        for run in runs:
            assert tier.known(run.ids) == bytes(block_id in resident for block_id in run.split)
        assert len(resident) == tier.usage().num_blocks
        told = {block_id for block_id, _ in tier.resident()}
        assert len(told) == len(resident)
        assert all(block_id in resident for block_id in told)
        await tier.clear()
        follow()
        assert len(resident) == 0
        await tier.close()

    @on_loop
    async def test_nobody_is_told_of_parts_beside_the_first(self) -> None:
        tier = await self.open_tier()
        first, other = Run("first", 16), Run("other", 16, BESIDE)
        for run in (other, first):
            await run.put(tier)
        assert tier.known(first.ids + other.ids) == bytes([1]) * 32
        assert await other.get(tier) == other.blocks
        assert {block_id for block_id, _ in tier.resident()} == set(first.split)
        resident = ResidentBlocks()
        await tier.remove(other.split[-1])
        for event in tier.drain_events():
            resident.apply(event)
        assert set(first.split) == {block_id for block_id in first.split + other.split if block_id in resident}
        await tier.clear()
        for event in tier.drain_events():
            resident.apply(event)
        assert not len(resident)
        await tier.close()

    @on_loop
    async def test_many_calls_at_once(self) -> None:
        tier = await self.open_tier()
        runs = [Run(f"run {number % 4}", 8) for number in range(16)]

        async def use(run: Run) -> None:
            for _ in range(4):
                await run.put(tier)
                await run.get(tier)
                await tier.remove(run.split[0])

        await asyncio.gather(*(use(run) for run in runs))
        assert tier.usage().used_bytes <= tier.usage().cap_bytes
        await tier.clear()
        assert tier.usage().num_blocks == 0
        await tier.close()

    @on_loop
    async def test_a_cancelled_put_leaves_nothing_half_done(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 16)
        for turns in range(4):
            task = asyncio.create_task(run.put(tier))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await run.get(tier)
        await run.put(tier)
        assert await run.get(tier) == run.blocks
        await tier.close()

    @on_loop
    async def test_a_closed_tier_says_so(self) -> None:
        tier = await self.open_tier()
        run = Run("a", 2)
        await run.put(tier)
        await tier.close()
        await tier.close()
        for call in (run.put(tier), run.get(tier), tier.contains(FAMILY, run.ids), tier.remove(run.ids), tier.clear()):
            closed = False
            try:
                await call
            except StoreClosed:
                closed = True
            assert closed
