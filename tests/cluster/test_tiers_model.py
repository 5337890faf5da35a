"""The real model with a small device cache over a real store: the same tokens as without, whatever comes from where."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from handoff_bench import Member, prompt_of, request, workers

from headwater.clock import RealClock
from headwater.config.schema import EngineConfig
from headwater.engines.base import Engine
from headwater.engines.native.engine import NativeEngine
from headwater.kv.identity import split_block_ids
from headwater.kv.node.open import NodeOptions, open_store
from headwater.kv.node.prices import NodePrices
from headwater.kv.node.server import Server
from headwater.kv.node.store import NodeStore
from headwater.kv.stores.disk import DiskOptions
from headwater.kv.stores.ledgered import TierOptions
from headwater.protocol.events import BlocksStored
from headwater.protocol.request import EngineRequest, StructuredSpec
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.tiers import offload, onload
from headwater.tiers.service import KvTiers
from object_servers import ObjectServer

pytestmark = pytest.mark.model

SIZES = EngineConfig(
    device="cpu", threads=1, num_kv_blocks=20, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=132
)
SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}})
BLOCK = 737_280


@pytest.fixture(autouse=True)
def _loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: what is loaded is not to depend on it here."""
    monkeypatch.setattr(KvTiers, "_prefill_ms", lambda self, new_tokens, cached_tokens: 1000.0 * new_tokens)
    monkeypatch.setattr(onload, "_ANSWER_S", 10.0)


def native() -> Engine:
    return NativeEngine(SIZES)


@asynccontextmanager
async def store_at(
    folder: Path, host_blocks: int = 400, disk_blocks: int = 0, object_url: str = ""
) -> AsyncIterator[NodeStore]:
    clock = RealClock()
    disk = DiskOptions(folder / "disk", TierOptions(disk_blocks * BLOCK)) if disk_blocks else None
    options = NodeOptions(TierOptions(host_blocks * BLOCK), disk, object_url=object_url, admission="all")
    store = open_store(options, clock)
    server = Server(store, folder / "kv.sock", clock)
    store.start()
    server.start()
    try:
        yield store
    finally:
        await server.close()
        store.host.ledger.check()
        await store.close()


def asked(first: int) -> list[EngineRequest]:
    """Documents with questions: together far more than the device holds. `first` numbers the streams."""
    documents = [prompt_of(120, letter) for letter in (1, 2, 3)]
    plain = [request(first + n, [*document, 7, 8, 9], 4) for n, document in enumerate(documents)]
    return [
        *plain,
        request(first + 3, [*documents[0], 11], 8, temperature=0.9, seed=5, top_p=0.9),
        request(first + 4, [*documents[1], 12], 8, structured=StructuredSpec("json_schema", SCHEMA)),
        request(first + 5, [*documents[2][:60], 13], 6, repetition_penalty=1.2),
    ]


async def one_by_one(worker: Member, requests: list[EngineRequest]) -> list[list[int]]:
    return [(await worker.run(one))[0] for one in requests]


async def all_stored(worker: Member, least: int) -> None:
    await eventually(lambda: worker.stored.stored >= least, f"{least} blocks are stored", 30)


def test_tokens_are_the_same_and_prefixes_come_from_the_host_tier(run_folder: Path) -> None:
    async def check() -> None:
        async with workers({"alone": native()}) as cluster:
            expected = await one_by_one(cluster["alone"], asked(1))
        async with store_at(run_folder), workers({"w": native()}, kv_socket=run_folder / "kv.sock") as cluster:
            worker = cluster["w"]
            assert await one_by_one(worker, asked(1)) == expected
            await all_stored(worker, 7)
            assert await one_by_one(worker, asked(101)) == expected
            assert sum(worker.cached[stream] for stream in range(101, 104)) >= 112
            await eventually(lambda: worker.stored.loaded >= 7, "loads are reported", 10)
            # Side by side: loads and computing of neighbours, with preemptions.
            assert await worker.run(*asked(201)) == expected
            await worker.all_free()

    run_leak_checked(check())


def test_a_prompt_that_is_to_be_computed_elsewhere_comes_from_the_store_where_that_is_cheaper(
    run_folder: Path,
) -> None:
    """The decode worker keeps what leaves it little to compute; the prefill worker loads what it then hands over."""

    async def check() -> None:
        document = prompt_of(120, 1)
        async with workers({"alone": native()}) as cluster:
            alone = cluster["alone"]
            expected = await one_by_one(alone, [request(1, document, 8), request(2, [*document[:64], *range(40)], 8)])
        async with store_at(run_folder):
            async with workers({"first": native()}, kv_socket=run_folder / "kv.sock") as cluster:
                await cluster["first"].run(request(1, document, 8))
                await all_stored(cluster["first"], 7)
            async with workers({"p": native(), "d": native()}, kv_socket=run_folder / "kv.sock") as cluster:
                prefill, decode, where = cluster["p"], cluster["d"], cluster.prefill_at("p")
                half = await decode.run(request(2, [*document[:64], *range(40)], 8, prefill=where))
                await eventually(lambda: decode.counts.done == 1, "it was handed over")
                assert (half, decode.counts.blocks_moved) == ([expected[1]], 7)
                await eventually(
                    lambda: prefill.stored.loaded == 4, "the prefill worker took its prefix from the store"
                )
                whole = await decode.run(request(1, document, 8, prefill=where))
                await eventually(lambda: decode.stored.loaded == 3, "what the device lacked came from the store")
                assert (whole, decode.counts.done) == ([expected[0]], 1)
                await prefill.all_free()
                await decode.all_free()

    run_leak_checked(check())


def test_a_new_worker_goes_on_with_what_another_left_behind(run_folder: Path) -> None:
    async def check() -> None:
        async with store_at(run_folder) as store:
            async with workers({"first": native()}, kv_socket=run_folder / "kv.sock") as cluster:
                expected = await one_by_one(cluster["first"], asked(1))
                await all_stored(cluster["first"], 7)
            async with workers({"second": native()}, kv_socket=run_folder / "kv.sock") as cluster:
                second = cluster["second"]
                assert await one_by_one(second, asked(1)) == expected
                assert sum(second.cached[stream] for stream in (1, 2, 3)) >= 112
                assert store.host.usage().num_hits > 0
                assert len(in_tier(second, "host")) >= 7, "the router is not told"

    run_leak_checked(check())


def test_a_damaged_block_in_shared_memory_is_computed_again(run_folder: Path) -> None:
    async def check() -> None:
        async with store_at(run_folder) as store, workers({"w": native()}, kv_socket=run_folder / "kv.sock") as cluster:
            worker = cluster["w"]
            expected = await one_by_one(worker, asked(1)[:3])
            await all_stored(worker, 7)
            flip_a_bit_everywhere(store)
            assert await one_by_one(worker, asked(101)[:3]) == expected
            assert store.host.usage().num_damaged > 0

    run_leak_checked(check())


def test_a_store_that_goes_and_comes_back_costs_nothing_but_time(run_folder: Path) -> None:
    async def check() -> None:
        async with workers({"w": native()}, kv_socket=run_folder / "kv.sock") as cluster:
            worker = cluster["w"]
            expected = await one_by_one(worker, asked(1)[:3])
            async with store_at(run_folder):
                await eventually(lambda: worker.shell._tiers._client.problem == "", "it is found", 30)  # type: ignore[union-attr]
                assert await one_by_one(worker, asked(101)[:3]) == expected
                await all_stored(worker, 1)
            assert await one_by_one(worker, asked(201)[:3]) == expected
            await worker.all_free()

    run_leak_checked(check())


def test_a_store_that_came_late_or_came_back_empty_gets_what_the_device_has(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_MAX_AGAIN", 1)

    async def check() -> None:
        async with workers({"w": native()}, kv_socket=run_folder / "kv.sock") as cluster:
            worker = cluster["w"]
            ask = request(1, prompt_of(120, 1), 4)
            expected = await worker.run(ask)
            for life in (1, 2):
                async with store_at(run_folder) as store:
                    await eventually(lambda: worker.shell._tiers._client.problem == "", "it is found", 30)  # type: ignore[union-attr]
                    assert store.host.usage().num_blocks == 0
                    for number in range(3):
                        stream = 10 * life + number
                        assert await worker.run(msgspec.structs.replace(ask, stream=stream)) == expected
                        assert worker.cached[stream] == 112, "the device has it"
                        await eventually(lambda s=store: s.host.usage().num_blocks >= 7, "it is in the host tier", 30)
                    assert store.host.usage().num_stored == 7, "it is offered once"
                    assert await worker.run(request(10 * life + 5, prompt_of(120, life + 1), 2))
                    await eventually(lambda s=store: s.host.usage().num_blocks == 14, "what is new is stored too", 30)
                    await store.host.clear()
                    assert await worker.run(msgspec.structs.replace(ask, stream=10 * life + 6)) == expected
                    other = request(10 * life + 7, prompt_of(120, 8), 1)
                    await worker.run(msgspec.structs.replace(other, namespace=bytes([life]) * 32, tenant="other"))
                    await eventually(lambda s=store: held(s, "other") == 7, "that is stored", 30)
                    assert held(store, "") == 0, "what the store has given up is not offered again"
                await eventually(lambda: worker.shell._tiers._client.problem != "", "it is missed", 30)  # type: ignore[union-attr]
            await worker.all_free()

    run_leak_checked(check())


def test_what_was_written_to_disk_is_there_after_all_else_ended(run_folder: Path) -> None:
    async def check() -> None:
        async with store_at(run_folder, disk_blocks=400) as store:
            async with workers({"first": native()}, kv_socket=run_folder / "kv.sock") as cluster:
                expected = await one_by_one(cluster["first"], asked(1)[:3])
                await all_stored(cluster["first"], 7)
            await eventually(lambda: store.lower[0].tier.usage().num_blocks >= 7, "all is on disk", 30)
        async with (
            store_at(run_folder, disk_blocks=400),
            workers({"second": native()}, kv_socket=run_folder / "kv.sock") as cluster,
        ):
            second = cluster["second"]
            assert await one_by_one(second, asked(1)[:3]) == expected
            await eventually(lambda: second.stored.loaded > 0, "blocks were loaded", 10)
            assert 0 < second.stored.token_ms["disk"] < 1e3, "what a token takes is told to routers"

    run_leak_checked(check())


def test_two_tenants_share_no_block(run_folder: Path) -> None:
    async def check() -> None:
        async with store_at(run_folder), workers({"w": native()}, kv_socket=run_folder / "kv.sock") as cluster:
            worker = cluster["w"]
            ours = request(1, prompt_of(120, 1), 4)
            theirs = msgspec.structs.replace(request(2, prompt_of(120, 1), 4), namespace=b"x" * 32, tenant="other")
            expected = await worker.run(ours)
            await all_stored(worker, 7)
            assert await worker.run(theirs) == expected
            assert worker.cached == {1: 0, 2: 0}

    run_leak_checked(check())


def test_tokens_are_the_same_while_every_tier_evicts_and_serves(
    run_folder: Path, s3_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven documents of eleven blocks. The device holds one, host tier two, disk tier three, bucket six."""
    monkeypatch.setattr(onload, "_MIN_PATIENCE_S", 20.0)
    monkeypatch.setattr(NodePrices, "pays", lambda *_: True)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = s3_server.url(run_folder.name, more=f"cap={70 * BLOCK}")
    sampling = [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.2}]

    def ask(stream: int, document: int) -> EngineRequest:
        return request(stream, [*prompt_of(180, document), stream], 3, **sampling[document % 3])

    asks = [ask(stream, document) for stream, document in enumerate([*range(7), 6, 5, 4, 2, 0], start=1)]
    expected: list[list[int]] = []

    async def without() -> None:
        async with workers({"alone": native()}) as cluster:
            expected.extend(await one_by_one(cluster["alone"], asks))

    async def check() -> None:
        async with (
            store_at(run_folder, 44, 60, bucket) as store,
            workers({"w": native()}, kv_socket=run_folder / "kv.sock") as cluster,
        ):
            worker = cluster["w"]
            for number, one in enumerate(asks[:7], start=1):
                assert (await worker.run(one))[0] == expected[number - 1]
                await eventually(lambda n=number: written(store, 11 * n), "it is in every tier", 30)
            usages = {tier.tier: tier.usage() for tier in store.tiers}
            assert all(usage.num_evicted > 0 for usage in usages.values()), usages
            served = [(tier.tier, tier.usage().num_hits) for tier in store.tiers]
            for one, source in zip(asks[7:], ("device", "host", "disk", "object", ""), strict=True):
                before = dict(served)
                assert (await worker.run(one))[0] == expected[one.stream - 1]
                await eventually(lambda: not any(tier.spilling for tier in store.lower), "it is quiet", 30)
                served = [(tier.tier, tier.usage().num_hits) for tier in store.tiers]
                used = {tier for tier, hits in served if hits > before[tier]}
                assert (worker.cached[one.stream] >= 160) == bool(source), (source, worker.cached)
                assert source in used or source in ("device", "")
                assert "object" not in used or source == "object"

    run_leak_checked(without())
    run_leak_checked(check())


def written(store: NodeStore, count: int) -> bool:
    """So many blocks have come to every tier by now, and nothing is on its way."""
    stored = all(tier.usage().num_stored >= count for tier in store.tiers)
    return stored and not any(tier.spilling for tier in store.lower)


def test_a_tenant_that_floods_keeps_to_its_share_of_the_store(run_folder: Path) -> None:
    async def check() -> None:
        async with (
            store_at(run_folder, host_blocks=44) as store,
            workers({"w": native()}, kv_socket=run_folder / "kv.sock") as cluster,
        ):
            worker = cluster["w"]

            async def fill(tenant: str, share: float, first: int, count: int) -> None:
                for number in range(first, first + count):
                    ask = msgspec.structs.replace(
                        request(number, prompt_of(120, number), 1), namespace=tenant.encode().ljust(32), tenant=tenant
                    )
                    await worker.run(msgspec.structs.replace(ask, kv_share=share))
                    await eventually(lambda n=number: store.host.usage().num_stored == 7 * n, "it is stored", 30)

            await fill("ours", 1.0, 1, 6)
            room = held(store, "ours")
            assert room < 42, "the tier is full"
            await fill("flood", 0.2, 7, 8)
            assert 0.1 * room < held(store, "flood") <= 0.2 * room + 2
            assert held(store, "ours") >= 0.75 * room

    run_leak_checked(check())


def held(store: NodeStore, tenant: str) -> int:
    """Blocks of a tenant in the host tier."""
    return sum(blocks for family, blocks, _ in store.host.ledger.families.usage() if family.tenant == tenant)


def in_tier(worker: Member, tier: str) -> set[bytes]:
    """What a subscriber that joined late knows about a tier."""
    stored = [event for snapshot in worker.snapshots for event in snapshot.stored]
    stored += [event for batch in worker.batches for event in batch.events if isinstance(event, BlocksStored)]
    return {block for event in stored if event.tier == tier for block in split_block_ids(event.block_ids)}


def flip_a_bit_everywhere(store: NodeStore) -> None:
    ledger = store.host.ledger
    for number in ledger.table.numbers():
        place = store.host.pool.view(ledger.table.offset_of(number), 1)
        place[0] ^= 1
