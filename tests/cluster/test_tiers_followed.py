"""A worker whose engine goes to the node's store by itself, as vLLM does: the cluster knows what the store has."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from handoff_bench import Member, prompt_of, request, workers
from told import counted_on, told

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo, EngineListener, ProgressSink
from headwater.engines.mocker.engine import MockerEngine
from headwater.kv.block import ROOT, Family
from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import Piece
from headwater.kv.pricing import ComputeRate
from headwater.protocol.events import BlocksCleared
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.tiers import followed
from headwater.types import Tier
from kv_process import client_of, store_process

PAYLOAD = 4096
PROMPT = prompt_of(100)


class OwnStore(MockerEngine):
    """Says that it goes to the store by itself; the tests do, in its stead."""

    async def start(self, listener: EngineListener, progress: ProgressSink) -> EngineInfo:
        self.told = listener
        info = await super().start(listener, progress)
        self.card = info.card
        return replace(info, store=True, num_ranks=2)


@pytest.fixture
def engine(tmp_path: Path) -> OwnStore:
    path = tmp_path / "tokenizer.json"
    vocab = {"<s>": 0, **{f"Ġword{number}": number for number in range(1, 200)}}
    path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return OwnStore(EngineConfig(engine="mocker", tokenizer=str(path), mocker_speedup=0.0, num_kv_blocks=64))


KEY = namespace("print", "layout", salt="4:acme:")
ASKED = msgspec.structs.replace(request(1, PROMPT, 4), namespace=KEY, tenant="acme")
CHAIN = Piece(Family("print", "layout", "acme", PAYLOAD), chain_block_ids(KEY, ASKED.prompt, 16), 0, ROOT)
"""As the engine names the blocks of that request, and a frontend does."""


def saved(worker: Member, tier: Tier | None = None) -> int:
    """Prompt tokens that a router counts on at this worker, or blocks in one tier, from all that it was told."""
    return told(worker, CHAIN.ids, tier) if tier is not None else counted_on(worker, CHAIN.ids, len(PROMPT))


async def offered(client: StoreClient, chain: Piece) -> None:
    payloads = [memoryview(bytes(PAYLOAD)) for _ in range(chain.num_blocks)]
    assert await client.offer(chain, payloads) == chain.num_blocks


async def has_shares(client: StoreClient, expected: dict[str, tuple[float, bool]]) -> None:
    """Limits of tenants in the host tier, and whether anything counts as theirs: what is there already follows."""
    async with asyncio.timeout(20):
        while True:
            tenants = (await client.status()).tiers[0].tenants
            if {one.tenant: (one.limit, one.used_bytes > 0) for one in tenants} == expected:
                return
            await asyncio.sleep(0.05)


def test_routers_are_told_what_the_store_has(run_folder: Path, engine: OwnStore) -> None:
    path = run_folder / "kv.sock"

    async def check() -> None:
        async with client_of(path) as client, workers({"w": engine}, kv_socket=path) as cluster:
            worker = cluster["w"]
            assert saved(worker) == 0
            await offered(client, CHAIN)
            await eventually(lambda: saved(worker, "host") == 6, "the host tier is told of")
            await eventually(lambda: saved(worker, "disk") == 6, "and what is below it")
            assert saved(worker) == int(6 * 16 * 0.9), "worth a part of what the device would be"
            late = Member("late", engine, worker.shell)
            subscriber = cluster.planes.subscriber()
            await subscriber.subscribe(cluster.store.feed.instances["w"].event_address, late.on_batch, late.on_snapshot)
            await eventually(lambda: saved(late, "disk") == 6, "whoever joins is told as well")
            await subscriber.close()
            engine.told.on_events([BlocksCleared()])
            await eventually(lambda: any(BlocksCleared() in batch.events for batch in worker.batches), "it is cleared")
            assert saved(worker, "host") == saved(worker, "disk") == 6, "what the engine forgot the store has still"
            assert await client.remove(CHAIN.ids[-16:]) == 2
            await eventually(lambda: saved(worker, "disk") == saved(worker, "host") == 5, "what goes is told of")
            store.kill()
            await eventually(lambda: saved(worker) == 0, "a store that is gone has nothing", 10)
            assert (await worker.run(ASKED))[0], "and nobody waits for it"

    flags = ("--disk", f"{run_folder}/tier:16MiB", "--admission", "all", "--min-block", "4KiB")
    with store_process(path, *flags) as store:
        run_leak_checked(check())


def test_routers_are_told_what_loads_take_and_the_store_what_computing_costs(
    run_folder: Path, engine: OwnStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_folder / "kv.sock"
    monkeypatch.setattr(followed, "_ASK_S", 0.05)
    told: list[tuple[Family, ComputeRate]] = []
    describe = StoreClient.describe

    async def noted(client: StoreClient, family: Family, rate: ComputeRate) -> None:
        told.append((family, rate))
        await describe(client, family, rate)

    monkeypatch.setattr(StoreClient, "describe", noted)

    async def check() -> None:
        async with client_of(path) as client, workers({"w": engine}, kv_socket=path) as cluster:
            worker, card = cluster["w"], engine.card
            own = CHAIN.family
            family = msgspec.structs.replace(own, model=card.fingerprint, parts=8)
            await offered(client, CHAIN._replace(family=own, ids=CHAIN.ids[::-1]))
            await offered(client, CHAIN._replace(family=family))
            await eventually(lambda: worker.stored.token_ms.keys() == {"host", "disk"}, "tiers are priced", 10)
            per_mib = (await client.status()).tiers[1].load_ms_per_mib
            assert worker.stored.token_ms["disk"] == pytest.approx(per_mib * 4 * PAYLOAD / 16 / (1 << 20)), (
                "of 8 parts a rank loads 4"
            )
            assert worker.stored.token_ms["host"] < worker.stored.token_ms["disk"]
            assert {one for one, _ in told} == {family}, "of this model alone"
            assert all(rate.block_tokens == 16 and rate.token_ms > 0 for _, rate in told)
            store.kill()
            await asyncio.sleep(0.2)
            assert worker.stored.token_ms, "a store that is gone changes nothing of that"

    flags = ("--disk", f"{run_folder}/tier:16MiB", "--admission", "all", "--min-block", "4KiB")
    with store_process(path, *flags) as store:
        run_leak_checked(check())


def test_the_engine_is_left_to_load_and_the_store_is_told_of_shares(run_folder: Path, engine: OwnStore) -> None:
    path = run_folder / "kv.sock"

    async def check() -> None:
        async with client_of(path) as client, workers({"w": engine}, kv_socket=path) as cluster:
            worker = cluster["w"]
            await offered(client, CHAIN)
            asked = msgspec.structs.replace(ASKED, kv_share=0.25)
            await worker.run(asked)
            assert worker.cached[1] == 0, "nothing of the store was put into the engine's memory by the worker"
            host = (await client.status()).tiers[0]
            assert [(one.tenant, one.limit) for one in host.tenants] == [("", 1.0), ("acme", 0.25)]
            assert host.num_blocks == 6, "nor did it offer what the engine has computed"
            for stream, share in ((2, 0.5), (3, 1.0), (4, 0.125)):
                await worker.run(msgspec.structs.replace(ASKED, stream=stream, kv_share=share))
                await has_shares(client, {"": (1.0, True)} if share == 1 else {"": (1.0, False), "acme": (share, True)})

    with store_process(path, "--min-block", "4KiB"):
        run_leak_checked(check())
