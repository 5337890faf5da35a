"""The object tier against a model: any order of putting, getting, removing, crashing and cleaning up."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import obstore
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from headwater.kv.block import Block
from headwater.kv.checksum import checksum
from headwater.kv.identity import chain_block_ids, split_block_ids
from headwater.kv.resident import ResidentBlocks
from headwater.kv.stores.base import Absent
from headwater.kv.stores.conformance import FAMILY, PAYLOAD_BYTES, Run
from headwater.kv.stores.object.options import ObjectOptions
from headwater.kv.stores.object.tier import ObjectTier

RUN_BLOCKS = 4
CAP_OBJECTS = 6


def branches() -> list[Run]:
    """Three chains: two share their first six blocks, so that they part in the middle of an object."""
    first, second, third = Run("a", 14), Run("a", 14), Run("c", 9)
    tail = split_block_ids(chain_block_ids(b"b" * 32, bytes(32), 1, parent=first.split[5]))
    for number, block_id in enumerate(tail, start=6):
        second.split[number] = block_id
        second.payloads[number] = memoryview(second._payload(block_id))
        parent = second.split[number - 1]
        second.blocks[number] = Block(block_id, parent, number, checksum(block_id, second.payloads[number]))
    second.ids = b"".join(second.split)
    return [first, second, third]


RUNS = branches()
PAYLOADS = {block.id: bytes(payload) for run in RUNS for block, payload in zip(run.blocks, run.payloads, strict=True)}


@dataclass
class World:
    tier: ObjectTier
    resident: ResidentBlocks

    def check(self) -> None:
        for event in self.tier.drain_events():
            self.resident.apply(event)
        for run in RUNS:
            assert self.tier.known(run.ids) == bytes(block_id in self.resident for block_id in run.split)
        usage = self.tier.usage()
        assert usage.num_blocks == len(self.resident)
        assert usage.used_bytes <= usage.cap_bytes
        assert usage.num_damaged == 0


def open_world(store: Any) -> World:
    run_bytes = RUN_BLOCKS * PAYLOAD_BYTES
    options = ObjectOptions(
        "s3",
        "memory",
        cap_bytes=CAP_OBJECTS * (run_bytes + 256) + 3 * PAYLOAD_BYTES,
        min_object_bytes=run_bytes,
        target_object_bytes=run_bytes,
        gather_bytes=5 * PAYLOAD_BYTES,
        absent_for_s=0.0,
    )
    return World(ObjectTier(options, store=store), ResidentBlocks())


async def get(world: World, run: Run, numbers: Sequence[int]) -> None:
    into = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in numbers]
    answers = await world.tier.get(FAMILY, b"".join(run.split[n] for n in numbers), into)
    for number, answer, view in zip(numbers, answers, into, strict=True):
        assert answer in (run.blocks[number], Absent.MISSING)
        if isinstance(answer, Block):
            assert view == PAYLOADS[answer.id]


async def carry_out(steps: list[tuple[str, int, list[int]]]) -> None:
    store = MemoryStore()
    world = open_world(store)
    for verb, which, numbers in steps:
        run = RUNS[which]
        numbers = [number for number in numbers if number < len(run.blocks)]
        match verb:
            case "put":
                await world.tier.put(FAMILY, [run.blocks[n] for n in numbers], [run.payloads[n] for n in numbers])
            case "put all":
                await run.put(world.tier)
            case "get":
                await get(world, run, numbers)
            case "remove":
                await world.tier.remove(b"".join(run.split[n] for n in numbers))
            case "contains":
                first = numbers[0] if numbers else 0
                await world.tier.contains(FAMILY, b"".join(run.split[first:]), first)
                await get(world, run, range(len(run.blocks)))
            case "save":
                await world.tier._upkeep.loaded()
                await world.tier._upkeep.save()
            case "crash":
                world.tier._catalogue.ledger.num_changes = 0
                await world.tier.close()
                world = open_world(store)
            case "clear":
                await world.tier.clear()
                assert not sum(len(chunk) for chunk in obstore.list(store, "runs"))
        world.check()
    await world.tier.close()


verbs = st.sampled_from(["put", "put", "put all", "get", "remove", "contains", "save", "crash", "clear"])


@settings(max_examples=100)
@given(st.lists(st.tuples(verbs, st.integers(0, 2), st.lists(st.integers(0, 13), max_size=14)), max_size=12))
def test_whatever_happens_only_what_was_put_is_got(steps: list[tuple[str, int, list[int]]]) -> None:
    asyncio.run(carry_out(steps))


def test_a_branch_takes_what_it_shares_from_the_other_object() -> None:
    async def check() -> None:
        world = open_world(MemoryStore())
        first, second, _ = RUNS
        await first.put(world.tier)
        await world.tier.put(FAMILY, second.blocks[6:], second.payloads[6:])
        other = ObjectTier(world.tier._catalogue.options, store=world.tier._bucket._open.writing)
        assert await other.contains(FAMILY, second.ids) == b"\1" * 12 + b"\0\0"
        assert (await second.get(other))[:12] == second.blocks[:12]
        await other.close()
        await world.tier.close()

    asyncio.run(check())
