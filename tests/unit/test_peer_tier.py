"""The peer tier: two nodes in one process, and nodes that die, hang or lie."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from headwater.clock import RealClock, VirtualClock
from headwater.errors import StoreClosed, TierUnavailable
from headwater.kv.block import Block
from headwater.kv.resident import ResidentBlocks
from headwater.kv.stores.base import Absent, Kept
from headwater.kv.stores.conformance import BESIDE, FAMILY, OTHER, PAYLOAD_BYTES, Run, only
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.ledgered import TierOptions
from headwater.kv.stores.peer import PeerOptions, PeerTier
from headwater.kv.stores.peer_offer import PeerOffer
from headwater.runtime.conformance import eventually
from headwater.transfer.agent import Agent
from headwater.transfer.options import AgentOptions

KEY = b"k" * 32


class Node:
    """A host tier that is offered to peers."""

    def __init__(self, name: str, key: bytes = KEY, cap_bytes: int = 8 << 20) -> None:
        self.host = HostTier(TierOptions(cap_bytes, min_block_bytes=4096), RealClock())
        self.agent = Agent(name, AgentOptions(key=key))
        self.pool = self.agent.register(self.host.pool.data, block_bytes=4096, access="read")
        self.offer = PeerOffer(self.host, self.agent, self.pool, key)
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self.port = await self.offer.listen("127.0.0.1", port)

    async def close(self) -> None:
        await self.offer.close()
        await asyncio.to_thread(self.agent.close)
        await self.host.close()


@contextlib.asynccontextmanager
async def node(name: str, **settings: Any) -> AsyncIterator[Node]:
    made = Node(name, **settings)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


@contextlib.asynccontextmanager
async def peer_tier(*ports: int, key: bytes = KEY, **changes: Any) -> AsyncIterator[PeerTier]:
    options = replace(PeerOptions(tuple(("127.0.0.1", port) for port in ports), ask_timeout_s=2.0), **changes)
    agent = Agent("reader", AgentOptions(key=key))
    tier = PeerTier(options, agent, key)
    try:
        yield tier
    finally:
        await tier.close()
        await asyncio.to_thread(agent.close)


def num_leased(owner: Node) -> int:
    return sum(owner.host.ledger._leases.readers)


def on_loop(check: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(check)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(check(*args, **kwargs))

    return run


@on_loop
async def test_what_another_node_has_is_found_and_read() -> None:
    run = Run("a", 40)
    async with node("owner") as owner, peer_tier(owner.port) as tier:
        await run.put(owner.host)
        assert tier.known(run.ids) == bytes(40)
        asked = run.ids + Run("b", 2).ids
        assert await tier.contains(FAMILY, asked) == b"\1" * 40 + b"\0\0"
        assert await run.get(tier) == run.blocks
        assert tier.usage().num_hits == 40
        assert only(Kept.REFUSED, await Run("c", 2).put(tier))
        assert not num_leased(owner), "everything was given back"


@on_loop
async def test_blocks_of_several_models_lie_in_different_chunks_and_are_read_all_the_same() -> None:
    small = replace_family(FAMILY, 5000)
    runs = [Run("a", 30), Run("b", 30, small), Run("c", 30), Run("d", 30, small)]
    async with node("owner") as owner, peer_tier(owner.port) as tier:
        for run in runs:
            await run.put(owner.host)
        for run in runs:
            await tier.contains(run.family, run.ids)
            assert await run.get(tier) == run.blocks


@on_loop
async def test_nobody_is_told_of_parts_beside_the_first_that_a_peer_has() -> None:
    first, other = Run("a", 8), Run("b", 8, BESIDE)
    async with node("owner") as owner, peer_tier(owner.port) as tier:
        for run in (first, other):
            await run.put(owner.host)
            await tier.contains(run.family, run.ids)
            assert await run.get(tier) == run.blocks
        assert {block_id for block_id, _ in tier.resident()} == set(first.split)
        resident = ResidentBlocks()
        await tier.remove(other.split[0] + first.split[-1])
        for event in tier.drain_events():
            resident.apply(event)
        assert set(first.split[:-1]) == {one for one in first.split + other.split if one in resident}


def replace_family(family: Any, payload_bytes: int) -> Any:
    return type(family)(family.model, f"{family.layout}-{payload_bytes}", family.tenant, payload_bytes)


@on_loop
async def test_blocks_land_in_the_readers_pool_without_a_copy() -> None:
    run = Run("a", 20)
    async with node("owner") as owner, node("reader") as reader:
        await run.put(owner.host)
        tier = PeerTier(PeerOptions((("127.0.0.1", owner.port),), ask_timeout_s=2.0), reader.agent, KEY)
        tier.land_in(reader.pool)
        await tier.contains(FAMILY, run.ids)
        ticket, slots = reader.host.reserve(0, FAMILY, run.blocks)
        into = [reader.host.place(ticket, slot, FAMILY) for slot in slots if isinstance(slot, int)]
        assert await tier.get(FAMILY, run.ids, into) == run.blocks
        reader.host.commit(0, ticket, {s: b.checksum for s, b in zip(slots, run.blocks, strict=True)})  # type: ignore[misc]
        assert await run.get(reader.host) == run.blocks
        await tier.close()


@on_loop
async def test_nobody_is_asked_twice_for_what_nobody_has() -> None:
    async with node("owner") as owner, peer_tier(owner.port, absent_for_s=60.0) as tier:
        run = Run("a", 5)
        await tier.contains(FAMILY, run.ids)
        serial = tier.sessions[0]._serial
        assert await tier.contains(FAMILY, run.ids) == bytes(5)
        assert tier.sessions[0]._serial == serial


@on_loop
async def test_the_nearest_of_several_peers_and_events() -> None:
    first, second = Run("a", 8), Run("b", 8)
    async with node("one") as one, node("two") as two, peer_tier(one.port, two.port, present_for_s=60.0) as tier:
        await first.put(one.host)
        await second.put(two.host)
        await tier.contains(FAMILY, first.ids)
        await tier.contains(FAMILY, second.ids)
        assert await first.get(tier) == first.blocks
        assert await second.get(tier) == second.blocks
        resident = ResidentBlocks()
        await tier.remove(first.split[0])
        for event in tier.drain_events():
            resident.apply(event)
        assert len(resident) == tier.usage().num_blocks == 15
        assert await tier.clear(model="model-a") == 15


@on_loop
async def test_what_was_seen_is_believed_for_a_time_from_the_last_sighting() -> None:
    old, young = Run("a", 3), Run("b", 3)
    async with node("owner") as owner, peer_tier(owner.port, present_for_s=30.0) as tier:
        clock = tier._clock = VirtualClock()
        await old.put(owner.host)
        await young.put(owner.host)
        resident = ResidentBlocks()

        def follow() -> None:
            for event in tier.drain_events():
                resident.apply(event)

        await tier.contains(FAMILY, old.ids)
        clock.advance(20.0)
        await tier.contains(FAMILY, young.ids)
        clock.advance(10.0)
        assert tier.known(old.ids + young.ids) == b"\0\0\0\1\1\1"
        assert await tier.contains(FAMILY, old.split[0]) == b"\1", "asked again, and there it is"
        clock.advance(20.0)
        follow()
        assert tier.usage().num_blocks == len(resident) == 1
        assert old.split[0] in resident
        clock.advance(10.0)
        follow()
        assert tier.usage().num_blocks == len(resident) == 0


@on_loop
async def test_a_block_that_its_owner_dropped_is_a_miss() -> None:
    run = Run("a", 6)
    async with node("owner") as owner, peer_tier(owner.port) as tier:
        await run.put(owner.host)
        await tier.contains(FAMILY, run.ids)
        await owner.host.remove(b"".join(run.split[3:]))
        found = await run.get(tier)
        assert found == [*run.blocks[:3], *[Absent.MISSING] * 3]
        assert tier.known(run.ids) == b"\1\1\1\0\0\0"


@on_loop
async def test_a_flipped_bit_is_never_served_and_the_owner_drops_the_block() -> None:
    run = Run("a", 4)
    async with node("owner") as owner, peer_tier(owner.port) as tier:
        await run.put(owner.host)
        await tier.contains(FAMILY, run.ids)
        ticket, found = owner.host.lease(0, FAMILY, run.split[2])
        assert found[0] is not None
        owner.host.pool.data[found[0][1].offset + 77] ^= 4
        owner.host.release(0, ticket)
        answers = await run.get(tier)
        assert answers[2] is Absent.DAMAGED
        assert [answers[0], answers[1], answers[3]] == [run.blocks[0], run.blocks[1], run.blocks[3]]
        assert tier.usage().num_damaged == 1
        assert owner.host.known(run.ids) == b"\1\1\0\1"


@on_loop
async def test_a_peer_cannot_have_good_blocks_dropped() -> None:
    run = Run("a", 4)
    async with node("owner") as owner, peer_tier(owner.port) as tier:
        await run.put(owner.host)
        session = tier.sessions[0]
        from headwater.kv.stores.peer_wire import Borrow, GiveBack, Lent, Returned

        lent = await session.ask(Borrow(session.next_serial(), FAMILY, run.ids), Lent, 2.0)
        back = GiveBack(session.next_serial(), lent.ticket, [0, 1, 2, 3, 99])
        assert (await session.ask(back, Returned, 2.0)).valid
        assert owner.host.known(run.ids) == b"\1" * 4


@on_loop
async def test_a_peer_that_breaks_the_protocol_is_hung_up_on(caplog: pytest.LogCaptureFixture) -> None:
    from headwater.kv.stores.peer_wire import Ask, Have

    run = Run("a", 4)
    async with node("owner") as owner, peer_tier(owner.port) as tier:
        await run.put(owner.host)
        session = tier.sessions[0]
        with pytest.raises(TierUnavailable):
            await session.ask(Ask(session.next_serial(), b"no ids"), Have, 2.0)
        assert "no block ids" in caplog.text
        assert await tier.contains(FAMILY, run.ids) == b"\1" * 4, "the next connection is served"


@on_loop
async def test_leases_end_with_the_connection() -> None:
    run = Run("a", 4)
    async with node("owner") as owner:
        await run.put(owner.host)
        async with peer_tier(owner.port) as tier:
            from headwater.kv.stores.peer_wire import Borrow, Lent

            session = tier.sessions[0]
            await session.ask(Borrow(session.next_serial(), FAMILY, run.ids), Lent, 2.0)
            assert num_leased(owner) == 4
        await eventually(lambda: not num_leased(owner), "the lease of a gone peer is ended")


@on_loop
async def test_the_wrong_key_is_refused() -> None:
    async with node("owner") as owner, peer_tier(owner.port, key=b"x" * 32) as tier:
        await Run("a", 2).put(owner.host)
        assert await tier.contains(FAMILY, Run("a", 2).ids) == b"\0\0"
        assert "does not prove the key" in tier.sessions[0].breaker.reason


@on_loop
async def test_garbage_ends_the_connection_and_nothing_else() -> None:
    run = Run("a", 4)
    async with node("owner") as owner:
        await run.put(owner.host)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\4\0\0\0abcd", b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", owner.port)
            writer.write(garbage)
            writer.write_eof()
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
        async with peer_tier(owner.port) as tier:
            assert await tier.contains(FAMILY, run.ids) == b"\1" * 4


@on_loop
async def test_the_wrong_family_is_a_miss() -> None:
    run = Run("a", 2)
    async with node("owner") as owner, peer_tier(owner.port) as tier:
        await run.put(owner.host)
        await tier.contains(OTHER, run.ids)
        into = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in run.split]
        assert only(Absent.MISSING, await tier.get(OTHER, run.ids, into))


@on_loop
async def test_a_restarted_peer_is_a_miss_and_then_found_again() -> None:
    run = Run("a", 4)
    owner = Node("owner")
    await owner.start()
    await run.put(owner.host)
    async with peer_tier(owner.port, absent_for_s=0.0) as tier:
        await tier.contains(FAMILY, run.ids)
        await owner.close()
        with contextlib.suppress(TierUnavailable):
            assert not any(isinstance(answer, Block) for answer in await run.get(tier))
        again = Node("owner")
        await again.start(owner.port)
        await run.put(again.host)
        deadline = time.monotonic() + 10
        while await tier.contains(FAMILY, run.ids) != b"\1" * 4:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert await run.get(tier) == run.blocks
        await again.close()


@on_loop
async def test_a_closed_tier_says_so() -> None:
    async with peer_tier(1) as tier:
        await tier.close()
        with pytest.raises(StoreClosed):
            await tier.contains(FAMILY, Run("a", 1).ids)


@contextlib.contextmanager
def child(blocks: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    program = Path(__file__).parents[1] / "peer_child.py"
    command = [sys.executable, str(program), KEY.hex(), "a", str(blocks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@on_loop
async def test_a_killed_peer_is_a_miss_at_once() -> None:
    run = Run("a", 100)
    with child(100) as (process, port):
        async with peer_tier(port) as tier:
            assert await tier.contains(FAMILY, run.ids) == b"\1" * 100
            assert await run.get(tier) == run.blocks
            process.kill()
            process.wait()
            started = time.monotonic()
            with contextlib.suppress(TierUnavailable):
                assert not any(isinstance(answer, Block) for answer in await run.get(tier))
            assert time.monotonic() - started < 3
            assert tier.known(run.ids) == bytes(100)


@on_loop
async def test_a_stopped_peer_costs_one_short_wait() -> None:
    run = Run("a", 10)
    with child(10) as (process, port):
        async with peer_tier(port, ask_timeout_s=0.2, borrow_timeout_s=0.2) as tier:
            await eventually_contains(tier, run)
            os.kill(process.pid, signal.SIGSTOP)
            started = time.monotonic()
            for number in range(20):
                await tier.contains(FAMILY, Run(f"other {number}", 4).ids)
            with contextlib.suppress(TierUnavailable):
                await run.get(tier)
            assert time.monotonic() - started < 3, "after two unanswered questions nobody waits any more"
            os.kill(process.pid, signal.SIGCONT)


async def eventually_contains(tier: PeerTier, run: Run) -> None:
    deadline = time.monotonic() + 10
    while b"\0" in await tier.contains(run.family, run.ids):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
