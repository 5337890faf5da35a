"""The node's store with real clients over its socket: workers that die, share, overload; tiers below."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from headwater.clock import RealClock
from headwater.errors import StoreError
from headwater.kv.admission import AdmitAll, SecondUse
from headwater.kv.block import ROOT, Family
from headwater.kv.identity import split_block_ids
from headwater.kv.node import wire
from headwater.kv.node.client import StoreClient
from headwater.kv.node.prices import NodePrices
from headwater.kv.node.server import Server
from headwater.kv.node.store import NodeStore, Piece
from headwater.kv.pricing import ComputeRate
from headwater.kv.resident import ResidentBlocks
from headwater.kv.rules import Rules
from headwater.kv.stores.base import TierStore
from headwater.kv.stores.finishing import finished
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.ledgered import TierOptions
from headwater.kv.stores.memory import MemoryTier
from headwater.kv.table import BlockTable
from headwater.runtime.conformance import eventually, run_leak_checked
from kv_fixtures import blocks_of, buffers, chain, family_of, payload_of

SIZE = 8192
HOST = TierOptions(4 << 20, min_block_bytes=4096, rules=Rules(max_reserved=0.5))


class Node:
    """A store, its server, and clients."""

    def __init__(
        self, folder: Path, host: TierOptions = HOST, lower: TierStore | None = None, *, eager: bool = False
    ) -> None:
        clock = RealClock()
        self.path = folder / "kv.sock"
        self.host = HostTier(host, clock)
        self.lower = lower
        tiers = [lower] if lower is not None else []
        admissions = {tier.tier: AdmitAll() if eager else SecondUse() for tier in tiers}
        self.store = NodeStore(self.host, tiers, admissions, NodePrices(), clock)
        self.server = Server(self.store, self.path, clock)
        self.clients: list[StoreClient] = []

    async def client(self, name: str = "worker", **options: Callable[..., None]) -> StoreClient:
        client = StoreClient(self.path, name, **options)  # type: ignore[arg-type]
        await client.start(patience_s=5.0)
        self.clients.append(client)
        assert not client.problem
        return client


@asynccontextmanager
async def running(
    folder: Path, host: TierOptions = HOST, lower: TierStore | None = None, *, eager: bool = False
) -> AsyncIterator[Node]:
    node = Node(folder, host, lower, eager=eager)
    node.store.start()
    node.server.start()
    try:
        yield node
    finally:
        for client in node.clients:
            await client.close()
        await node.server.close()
        node.host.ledger.check()
        await node.store.close()


def piece(name: str, count: int, *, tenant: str = "", size: int = SIZE) -> Piece:
    return Piece(family_of(size, tenant), b"".join(chain(name, count)), 0, ROOT)


def payloads(run: Piece) -> list[memoryview]:
    ids = [run.ids[at : at + 16] for at in range(0, len(run.ids), 16)]
    return [memoryview(payload_of(block_id, run.family.payload_bytes)) for block_id in ids]


async def load(client: StoreClient, run: Piece, timeout_s: float = 2.0) -> int:
    """How many blocks came; each compared with what it must be."""
    into = buffers(run.num_blocks, run.family.payload_bytes)
    loaded = await client.load(run, into, timeout_s=timeout_s)
    assert into[:loaded] == payloads(run)[:loaded]
    return loaded


def test_what_one_worker_stores_another_loads(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            one, two = await node.client("one"), await node.client("two")
            run = piece("a", 20)
            assert two.num_in_host(run.ids) == 0
            assert await two.match(run) == []
            assert await one.offer(run, payloads(run)) == 20
            assert await one.offer(run, payloads(run)) == 0
            assert two.num_in_host(run.ids) == 20
            runs = await two.match(run)
            assert [(found.tier, found.num_blocks) for found in runs] == [("host", 20)]
            assert runs[0].load_ms > 0
            assert (await two.match(run, num_parts=8))[0].load_ms > 2 * runs[0].load_ms, "with others of that size"
            progress: list[int] = []
            into = buffers(20, SIZE)
            assert await two.load(run, into, timeout_s=1.0, on_arrived=progress.append) == 20
            assert progress == [20]
            assert into == payloads(run)

    run_leak_checked(check())


def test_of_chains_that_belong_together_what_all_have_is_loaded(tmp_path: Path) -> None:
    """More of them than are loaded at once; from below, each asks the store."""

    async def check() -> None:
        disk = MemoryTier(32 << 20, "disk")
        async with running(tmp_path, lower=disk) as node:
            client = await node.client()
            runs = [piece(f"part {number}", 12) for number in range(100)]
            for number, run in enumerate(runs):
                short = run.part(0, 9) if number == 17 else run
                await disk.put(run.family, *blocks_of(split_block_ids(short.ids), SIZE))
            into = [buffers(12, SIZE) for _ in runs]
            assert await client.load_parts(list(zip(runs, into, strict=True)), timeout_s=20.0) == 9
            assert all(views[:9] == payloads(run)[:9] for run, views in zip(runs, into, strict=True))
            assert not any(any(views[11]) for views in into[40:]), "what one lacks is not loaded of those after it"
            assert await client.load_parts([(run, buffers(12, SIZE)) for run in runs[:17]], timeout_s=5.0) == 12

    run_leak_checked(check())


def test_loading_stops_at_the_first_gap(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            run = piece("a", 10)
            await client.offer(run, payloads(run))
            await client.remove(run.ids[16 * 4 : 16 * 5])
            assert await load(client, run) == 4
            assert await client.match(piece("b", 3)) == []
            assert await load(client, piece("b", 3)) == 0

    run_leak_checked(check())


def test_a_flipped_bit_in_shared_memory_is_never_served(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            run = piece("a", 10)
            await client.offer(run, payloads(run))
            table = node.host.ledger.table
            node.host.pool.data[table.offset_of(table.find(run.ids, 6)) + 100] ^= 4
            assert await load(client, run) == 6
            assert client.num_damaged == 1
            assert (await client.status()).tiers[0].num_damaged == 1
            assert client.num_in_host(run.ids) == 6
            assert await client.offer(run, payloads(run)) == 1
            assert await load(client, run) == 10

    run_leak_checked(check())


def test_a_worker_that_vanishes_leaves_nothing_behind(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client, other = await node.client("dies"), await node.client("lives")
            run, second = piece("a", 10), piece("b", 10)
            await client.offer(run, payloads(run))
            used = node.host.ledger.space.used_bytes
            node.host.reserve(1, second.family, second.blocks())
            node.host.lease(1, run.family, run.ids)
            assert node.host.ledger.space.used_bytes > used
            assert client._link.connection is not None
            client._link.connection.close()
            await eventually(lambda: node.host.ledger.space.used_bytes == used, "its reservations are freed")
            assert await load(other, run) == 10
            assert await other.offer(second, payloads(second)) == 10

    run_leak_checked(check())


def test_a_store_that_restarts_is_found_again(tmp_path: Path) -> None:
    async def check() -> None:
        resident = {"host": ResidentBlocks()}

        def follow(events: object) -> None:
            for event in events:  # type: ignore[attr-defined]
                if event.tier == "host":
                    resident["host"].apply(event)

        run = piece("a", 10)
        client = StoreClient(tmp_path / "kv.sock", "worker", on_events=follow)
        await client.start()
        assert await client.offer(run, payloads(run)) == 0, "no store yet: nothing fails"
        async with running(tmp_path):
            await eventually(lambda: not client.problem, "connected")
            assert await client.offer(run, payloads(run)) == 10
            await eventually(lambda: len(resident["host"]) == 10, "told of its blocks")
        await eventually(lambda: bool(client.problem), "noticed")
        assert len(resident["host"]) == 0
        assert await load(client, run) == 0
        assert await client.match(run) == []
        async with running(tmp_path):
            await eventually(lambda: not client.problem, "connected again")
            assert await client.offer(run, payloads(run)) == 10
            assert await load(client, run) == 10
        await client.close()

    run_leak_checked(check())


def test_what_is_used_twice_goes_down_and_comes_up_again(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryTier(32 << 20, "disk")
        async with running(tmp_path, lower=disk) as node:
            client = await node.client()
            once, twice = piece("once", 10), piece("twice", 10)
            for run in (once, twice, twice):
                await client.offer(run, payloads(run))
            await eventually(lambda: all(disk.known(twice.ids)), "written to the lower tier")
            assert not any(disk.known(once.ids)), "one use is not enough"
            await node.host.remove(twice.ids)
            runs = await client.match(twice)
            assert [(found.tier, found.num_blocks) for found in runs] == [("disk", 10)]
            assert await load(client, twice) == 10
            assert client.num_in_host(twice.ids) == 10

    run_leak_checked(check())


def test_prefetch_brings_blocks_up_before_they_are_asked_for(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryTier(32 << 20, "disk")
        async with running(tmp_path, lower=disk, eager=True) as node:
            client = await node.client()
            run = piece("a", 30)
            await client.offer(run, payloads(run))
            await eventually(lambda: all(disk.known(run.ids)), "written to the lower tier")
            await node.host.clear()
            found = await asyncio.gather(*(client.prefetch(run, timeout_s=2.0) for _ in range(8)))
            assert found == [30] * 8
            assert client.num_in_host(run.ids) == 30
            assert disk.usage().num_hits == 30, "eight who asked at once: one read"

    run_leak_checked(check())


def test_damage_below_is_not_brought_up(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryTier(32 << 20, "disk")
        async with running(tmp_path, lower=disk, eager=True) as node:
            client = await node.client()
            run = piece("a", 10)
            await client.offer(run, payloads(run))
            await eventually(lambda: all(disk.known(run.ids)), "written to the lower tier")
            await node.host.clear()
            disk.corrupt(run.ids[16 * 5 : 16 * 6])
            assert await load(client, run) == 5

    run_leak_checked(check())


def test_a_load_that_takes_too_long_gives_what_has_come(tmp_path: Path) -> None:
    release = asyncio.Event()

    class Hanging(MemoryTier):
        """As a disk that does not answer: what was begun cannot be called off."""

        async def get(self, family, ids, into):  # type: ignore[no-untyped-def]
            await finished(asyncio.ensure_future(release.wait()))
            return await super().get(family, ids, into)

    async def check() -> None:
        disk = Hanging(32 << 20, "disk")
        async with running(tmp_path, lower=disk, eager=True) as node:
            client = await node.client()
            run = piece("a", 10)
            await client.offer(run, payloads(run))
            await eventually(lambda: all(disk.known(run.ids)), "written to the lower tier")
            await node.host.remove(run.ids[16 * 3 :])
            assert await load(client, run, timeout_s=0.1) == 3
            assert await load(client, run, timeout_s=0.1) == 3
            release.set()
            await eventually(lambda: client.num_in_host(run.ids) == 10, "it comes in the end, for the next one")

    run_leak_checked(check())


def test_eight_workers_at_once(tmp_path: Path) -> None:
    """Everybody stores and loads overlapping chains in a tier that is far too small."""

    async def work(client: StoreClient, number: int) -> None:
        for turn in range(12):
            run = piece(f"chain {(number + turn) % 10}", 20, tenant="x" if turn % 3 == 0 else "")
            await client.offer(run, payloads(run))
            await load(client, run)

    async def check() -> None:
        async with running(tmp_path, TierOptions(1 << 20, min_block_bytes=4096)) as node:
            clients = [await node.client(f"worker {number}") for number in range(8)]
            await asyncio.gather(*(work(client, number) for number, client in enumerate(clients)))
            usage = node.host.usage()
            assert usage.used_bytes <= usage.cap_bytes
            assert usage.num_damaged == 0
            assert usage.num_evicted > 0

    run_leak_checked(check())


def test_an_offer_that_is_called_off_gives_its_places_back(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            run = piece("a", 100)
            for turns in range(8):
                task = asyncio.create_task(client.offer(run, payloads(run)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            ledger = node.host.ledger
            await eventually(lambda: ledger.space.used_bytes == ledger.table.num_blocks * SIZE, "given back")
            await client.offer(run, payloads(run))
            assert await load(client, run) == 100

    run_leak_checked(check())


def test_what_was_read_after_its_lease_ran_out_does_not_count(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            run = piece("a", 10)
            await client.offer(run, payloads(run))
            copied = client._on_thread

            async def late(work: Callable[[], int]) -> int:
                arrived = await copied(work)
                node.host.ledger.expire(float("inf"))
                return arrived

            client._link.families.clear()  # so that it asks for a lease
            client._on_thread = late  # type: ignore[assignment, method-assign]
            assert await client.load(run, buffers(10, SIZE), timeout_s=1.0) == 0

    run_leak_checked(check())


def test_offers_beyond_the_bound_are_dropped_and_counted_and_later_ones_are_not(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = StoreClient(node.path, "worker", max_offered_bytes=15 * SIZE)
            node.clients.append(client)
            await client.start(patience_s=5.0)
            first, second = piece("a", 10), piece("b", 10)
            offered = await asyncio.gather(*(client.offer(run, payloads(run)) for run in (first, second)))
            assert offered == [10, 0]
            assert client.num_offers_dropped == 10
            assert await client.offer(second, payloads(second)) == 10

    run_leak_checked(check())


def test_a_block_that_went_from_the_lower_tier_is_written_there_again(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryTier(32 << 20, "disk")
        async with running(tmp_path, lower=disk, eager=True) as node:
            client = await node.client()
            run = piece("a", 10)
            for _ in range(2):
                await client.offer(run, payloads(run))
                await eventually(lambda: all(disk.known(run.ids)), "written to the lower tier")
                await disk.remove(run.ids)

    run_leak_checked(check())


def test_listing_page_by_page_shows_each_block_once(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            run = piece("a", 10)
            await client.offer(run, payloads(run))
            await client.remove(run.ids[16 * 4 : 16 * 6])
            shown: list[str] = []
            after = -1
            for expected in (3, 3, 2):
                page = await client.list_blocks("host", after=after, limit=3)
                assert len(page.blocks) == expected
                shown += [block.id for block in page.blocks]
                after = page.next_after
            assert after == -1
            left = [run.ids[16 * n : 16 * n + 16].hex() for n in (0, 1, 2, 3, 6, 7, 8, 9)]
            assert sorted(shown) == sorted(left)

    run_leak_checked(check())


def test_cost_of_computing_is_learned_from_engines(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryTier(32 << 20, "disk")
        async with running(tmp_path, lower=disk, eager=True) as node:
            client = await node.client()
            run = piece("a", 10)
            await client.describe(run.family, ComputeRate(1e-9, 0.0, 16))
            await client.offer(run, payloads(run))
            await asyncio.sleep(0.05)
            assert not any(disk.known(run.ids)), "computing it is cheaper than reading it back"

    run_leak_checked(check())


def test_computing_a_block_counts_once_for_all_its_parts() -> None:
    prices, whole = NodePrices(), piece("a", 1).family
    part = msgspec.structs.replace(whole, payload_bytes=SIZE // 8, parts=8)
    enough_ms = prices.load_ms("disk", 10 * SIZE) - prices.load_ms("host", 10 * SIZE)
    for family in (whole, part):
        for factor in (0.8, 1.2):
            prices.describe(family, ComputeRate(factor * enough_ms / 160, 0.0, 16))
            assert prices.pays("disk", family, 9, 10) == (factor > 1)
    assert prices.worth(whole, 5) == pytest.approx(prices.worth(part, 5))


class Afar(MemoryTier):
    """Others write to it too: what it has is found out by asking."""

    def __init__(self) -> None:
        super().__init__(32 << 20, "object")
        self._asked: set[bytes] = set()

    def known(self, ids: bytes) -> bytes:
        flags = zip(split_block_ids(ids), super().known(ids), strict=True)
        return bytes(here and block_id in self._asked for block_id, here in flags)

    async def contains(self, family: Family, ids: bytes, first: int = 0) -> bytes:
        self._asked.update(split_block_ids(ids))
        return self.known(ids)


def test_parts_beside_the_one_that_was_looked_up_are_asked_for_when_they_are_wanted(tmp_path: Path) -> None:
    async def check() -> None:
        afar, run = Afar(), piece("a", 10)
        beside = piece("b", 10)._replace(family=msgspec.structs.replace(run.family, beside=True))
        for one in (run, beside):
            await afar.put(one.family, *blocks_of(split_block_ids(one.ids), SIZE))
        async with running(tmp_path, lower=afar) as node:
            client = await node.client()
            assert [found.num_blocks for found in await client.match(run, timeout_s=1.0)] == [10]
            assert await client.prefetch(beside, timeout_s=1.0) == 0, "nobody looks far for what may be wanted"
            assert await load(client, run) == await load(client, beside) == 10

    run_leak_checked(check())


def test_tenants_are_cleared_alone(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            ours, theirs = piece("a", 5, tenant="ours"), piece("b", 5, tenant="theirs")
            for run in (ours, theirs):
                await client.offer(run, payloads(run))
            assert await load(client, Piece(theirs.family, ours.ids, 0, ROOT)) == 0, "ids of another family"
            assert await client.clear(tenant="ours") == 5
            assert await load(client, ours) == 0
            assert await load(client, theirs) == 5

    run_leak_checked(check())


def test_a_tier_that_was_slow_and_has_recovered_is_noticed(tmp_path: Path) -> None:
    async def check() -> None:
        disk = MemoryTier(32 << 20, "disk")
        async with running(tmp_path, lower=disk, eager=True) as node:
            client = await node.client()
            run = piece("a", 20)
            await client.offer(run, payloads(run))
            await eventually(lambda: all(disk.known(run.ids)), "written to the lower tier")
            await node.host.clear()
            for _ in range(200):
                node.store.prices.observe("disk", run.num_blocks * SIZE, 10_000.0)
            refusals = 0
            for _ in range(40):
                runs = await client.match(run)
                if not runs or runs[0].tier == "host":
                    break
                plan = client.plan(
                    run, runs, lambda new, cached: 1.0 * new, num_tokens=320, cached_tokens=0, block_tokens=16
                )
                assert plan.num_blocks == 0, "ten seconds for what takes a third of one to compute"
                refusals += 1
                await asyncio.sleep(0.001)
            assert refusals < 40, "one of them was tried beside the computation"
            await eventually(lambda: client.num_in_host(run.ids) == 20, "brought up")

    run_leak_checked(check())


def test_a_client_that_sends_nonsense_is_cut_off_and_harms_nobody(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            run = piece("a", 4)
            await client.offer(run, payloads(run))
            for nonsense in (b"\xff\xff\xff\xff", b"\4\0\0\0abcd", wire.encode(wire.AskStatus(1))):
                reader, writer = await asyncio.open_unix_connection(node.path)
                writer.write(nonsense)
                assert await reader.read() == b""
                writer.close()
                await writer.wait_closed()
            with pytest.raises(StoreError, match="16 bytes each"):
                await client._ask(wire.Locate(0, wire.Chain(run.family, b"odd", 0, ROOT), 0.0), wire.Located)
            with pytest.raises(StoreError, match="no object tier"):
                await client.list_blocks("object")
            assert await load(client, run) == 4

    run_leak_checked(check())


def test_what_is_in_memory_is_read_without_asking(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            writer, reader = await node.client("writer"), await node.client("reader")
            run = piece("a", 10)
            await writer.offer(run, payloads(run))
            assert await load(reader, run) == 10, "the first one asks"
            asked = node.host.ledger._next_ticket
            assert await load(reader, run) == 10
            assert await load(writer, run) == 10
            assert node.host.ledger._next_ticket == asked
            await eventually(lambda: node.host.usage().num_hits == 30, "it counts as use all the same")

    run_leak_checked(check())


def test_a_place_that_was_given_to_another_block_meanwhile_is_noticed(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            before, after = piece("before", 10), piece("after", 10)
            await client.offer(before, payloads(before))
            assert client._link.pool is not None
            stale = [memoryview(bytearray(view)) for view in (client._link.pool.records, client._link.pool.index)]
            await client.remove(before.ids)
            assert await client.offer(after, payloads(after)) == 10
            present, client._link.table = client._link.table, BlockTable(*stale)
            assert client.num_in_host(before.ids) == 10, "as a reader sees it who looked just before"
            assert await load(client, before) == 0
            assert client.num_damaged == 0
            client._link.table = present
            assert await load(client, after) == 10

    run_leak_checked(check())


@pytest.mark.parametrize("wrong", [SIZE - 1, SIZE + 1, 2 * SIZE])
def test_buffers_of_another_size_are_refused_and_harm_no_neighbour(tmp_path: Path, wrong: int) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            run = piece("a", 10)
            assert await client.offer(run, payloads(run)) == 10
            with pytest.raises(ValueError, match=r"does not fit|different structures"):
                await client.offer(piece("b", 2), buffers(2, wrong))
            with pytest.raises(ValueError, match=r"does not fit|different structures"):
                await client.load(run, buffers(10, wrong), timeout_s=1.0)
            assert client.num_damaged == 0
            assert await load(client, run) == 10

    run_leak_checked(check())


def test_blocks_past_their_time_are_not_read_without_asking_either(tmp_path: Path) -> None:
    async def check() -> None:
        options = TierOptions(4 << 20, min_block_bytes=4096, rules=Rules(ttl_s=0.5))
        async with running(tmp_path, options) as node:
            client = await node.client()
            run = piece("a", 3)
            await client.offer(run, payloads(run))
            assert await load(client, run) == 3
            await asyncio.sleep(2.1)
            assert await load(client, run) == 0

    run_leak_checked(check())
