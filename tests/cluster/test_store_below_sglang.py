"""The node's store below SGLang in the worker: what HiCache writes there has the names that routers know."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handoff_bench import Workers, prompt_of, request, workers
from told import told

from headwater.config.schema import EngineConfig
from headwater.engines.base import Engine, Placement
from headwater.engines.registry import create_engine
from headwater.kv.connectors import names
from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.pricing import ComputeRate
from headwater.protocol.request import EngineRequest
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.tiers import followed
from headwater.tiers.service import KvTiers
from headwater.types import BLOCK_ID_BYTES
from kv_process import client_of, store_process
from sglang_double import ADAPTER
from sglang_engine_double import Engine as Sglang
from sglang_engine_double import installed
from word_tokenizer import write_word_tokenizer

SIZES = EngineConfig(
    block_size=16, num_kv_blocks=48, max_num_seqs=4, max_num_batched_tokens=64, max_waiting=8, max_model_len=512
)
PROMPT = prompt_of(300)
"""Long enough for SGLang to look below."""
KEY = namespace("print", "layout", salt="4:acme:")
Play = Callable[[Callable[[Workers], Coroutine[Any, Any, None]]], None]


class Stage:
    def __init__(self, config: EngineConfig, path: Path) -> None:
        self._config, self.path = config, path

    def engine(self, *words: str, **changes: Any) -> Engine:
        own = msgspec.structs.replace(self._config, engine_args=words, **changes)
        return create_engine(own, Placement(store=self.path))

    def play(self, scenario: Callable[[Workers], Coroutine[Any, Any, None]], *words: str, **changes: Any) -> None:
        """With one worker, "w"."""

        async def whole() -> None:
            async with workers({"w": self.engine(*words, **changes)}, kv_socket=self.path) as cluster:
                await scenario(cluster)

        run_leak_checked(whole())


@pytest.fixture
def stage(tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    tokenizer = str(write_word_tokenizer(tmp_path))
    installed(monkeypatch, msgspec.structs.replace(SIZES, tokenizer=tokenizer, mocker_speedup=0.0))
    path = run_folder / "kv.sock"
    config = msgspec.structs.replace(SIZES, tokenizer=tokenizer, model="a/model", engine="sglang")
    with store_process(path, "--disk", f"{run_folder}/tier:32MiB", "--admission", "all", "--min-block", "4KiB"):
        yield Stage(config, path)


def asked(stream: int, prompt: list[int], key: bytes = KEY, tenant: str = "acme", **fields: Any) -> EngineRequest:
    return msgspec.structs.replace(request(stream, prompt, 20), namespace=key, tenant=tenant, **fields)


def ids_of(key: bytes, tokens: list[int]) -> bytes:
    return chain_block_ids(key, array("I", tokens).tobytes(), 16)


def test_routers_know_what_it_stores_and_a_restarted_one_finds_it(stage: Stage) -> None:
    answer: list[int] = []

    async def first(cluster: Workers) -> None:
        worker = cluster["w"]
        answer.extend((await worker.run(asked(1, PROMPT)))[0])
        whole = ids_of(KEY, [*PROMPT, *answer[:-1]])
        assert len(whole) // BLOCK_ID_BYTES == 19, "the answer fills a block"
        await eventually(lambda: told(worker, whole, "host") == 19, "the router is told")
        await eventually(lambda: told(worker, whole, "disk") == 19, "of all tiers")
        assert told(worker, ids_of(namespace("print", "layout"), PROMPT), "host") == 0
        assert Sglang.made[-1].hicache.not_written == 0
        async with client_of(stage.path) as client:
            found = {
                (one.model, one.tenant, one.parts, one.beside) for one in (await client.status()).tiers[0].families
            }
        assert found == {(worker.engine.info.card.fingerprint, "acme", 1, False)}

    async def again(cluster: Workers) -> None:
        worker = cluster["w"]
        whole = ids_of(KEY, [*PROMPT, *answer[:-1]])
        await eventually(lambda: told(worker, whole, "host") == 19, "before the first request")
        longer = [*PROMPT, *answer, *prompt_of(20, 3)]
        await worker.run(asked(1, longer))
        assert Sglang.made[-1].hicache.loaded == [19]

    stage.play(first)
    stage.play(again)


def test_tenants_share_nothing_and_their_limits_reach_the_store(stage: Stage) -> None:
    other = namespace("print", "layout", salt="5:other:")

    async def scenario(cluster: Workers) -> None:
        worker = cluster["w"]
        await worker.run(asked(1, PROMPT, kv_share=0.25))
        await worker.run(asked(2, PROMPT, other, "other"))
        await worker.run(request(3, PROMPT, 20))
        own = worker.engine.info.card
        plain = namespace(own.fingerprint, own.kv_layout)
        assert Sglang.made[-1].hicache.loaded == [0, 0, 0]
        await worker.run(asked(4, PROMPT), asked(5, PROMPT, other, "other"))
        assert Sglang.made[-1].hicache.loaded == [0, 0, 0, 18, 18]
        for key in (KEY, other, plain):
            await eventually(lambda k=key: told(worker, ids_of(k, PROMPT), "host") == 18, "each is told of its own")
        async with client_of(stage.path) as client:
            host = (await client.status()).tiers[0]
        assert {family.tenant for family in host.families} == {"acme", "other", ""}
        assert ("acme", 0.25) in [(one.tenant, one.limit) for one in host.tenants]

    stage.play(scenario)


def test_what_lies_below_the_device_the_store_tells_alone(stage: Stage) -> None:
    """HiCache has a copy in host memory of its own, which comes and goes."""

    async def scenario(cluster: Workers) -> None:
        worker = cluster["w"]
        await worker.run(asked(1, PROMPT))
        await eventually(lambda: told(worker, ids_of(KEY, PROMPT), "host") == 18, "it is stored")
        await eventually(lambda: told(worker, ids_of(KEY, PROMPT), "device") == 18, "and on the device")
        await worker.run(asked(2, prompt_of(400, 2)), asked(3, prompt_of(400, 3)))
        await eventually(lambda: told(worker, ids_of(KEY, PROMPT), "device") == 0, "others took its place")
        assert told(worker, ids_of(KEY, PROMPT), "host") == 18

    stage.play(scenario)


def test_ranks_keep_a_part_of_a_block_each(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "_ASK_S", 0.05)

    async def scenario(cluster: Workers) -> None:
        worker = cluster["w"]
        await worker.run(asked(1, PROMPT))
        await eventually(lambda: told(worker, ids_of(KEY, PROMPT), "host") == 18, "the router is told once")
        async with client_of(stage.path) as client:
            while True:
                families = (await client.status()).tiers[0].families
                if [one.num_blocks >= 18 for one in families] == [True, True]:
                    break
                await asyncio.sleep(0.02)  # the other rank may be later
        await worker.run(asked(2, PROMPT))
        assert Sglang.made[-1].hicache.loaded == [0, 18], "each rank has found its own"
        assert {(one.parts, one.beside) for one in families} == {(2, False), (2, True)}
        assert len({one.layout for one in families}) == 1
        await eventually(lambda: worker.stored.token_ms.keys() == {"host", "disk"}, "tiers are priced", 10)

    stage.play(scenario, "--tp-size", "2")


def test_pages_that_would_come_too_late_are_computed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "_ASK_S", 0.02)
    cost_ms = [1.0]
    monkeypatch.setattr(KvTiers, "_rate", lambda tiers, size: ComputeRate(cost_ms[0], 0.0, size))

    async def scenario(cluster: Workers) -> None:
        worker, hicache = cluster["w"], Sglang.made[-1].hicache
        for stream, token_ms, loaded in ((1, 1.0, 0), (2, 1e-9, 0), (3, 1.0, 18)):
            cost_ms[0] = token_ms
            await eventually(lambda ms=token_ms: hicache.rate_ms() == ms, "what computing costs is told")
            await worker.run(asked(stream, PROMPT))
            assert hicache.loaded[-1] == loaded

    stage.play(scenario)


def test_what_no_worker_has_named_is_left_alone(stage: Stage) -> None:
    async def scenario(cluster: Workers) -> None:
        worker, engine = cluster["w"], Sglang.made[-1]
        await worker.run(asked(1, PROMPT, adapter=ADAPTER))
        await eventually(lambda: engine.hicache.not_written > 0, "it has tried to write")
        assert engine.hicache.loaded == [0]
        async with client_of(stage.path) as client:
            assert (await client.status()).tiers[0].num_blocks == 0

    stage.play(scenario, "--lora-paths", f"{ADAPTER}=/somewhere")


def test_names_that_were_given_up_are_told_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names.NameLog.__init__, "__defaults__", (30,))

    async def scenario(cluster: Workers) -> None:
        worker = cluster["w"]
        for stream in range(1, 5):
            await worker.run(asked(stream, prompt_of(300, stream)))
        assert Sglang.made[-1].hicache.not_written == 0
        await worker.run(asked(5, prompt_of(300, 1)))
        assert Sglang.made[-1].hicache.loaded[-1] == 18

    stage.play(scenario)


def test_the_operators_words_go_along(stage: Stage) -> None:
    async def scenario(cluster: Workers) -> None:
        worker = cluster["w"]
        for stream in (1, 2):
            await worker.run(asked(stream, prompt_of(40)))
        assert Sglang.made[-1].hicache.loaded == [0, 2], "shorter than SGLang looks for by itself"
        assert Sglang.made[-1].server_args.hicache_ratio == 1.5

    words = ("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 32}', "--hicache-ratio", "1.5")
    stage.play(scenario, *words)


def test_a_store_that_is_not_there_is_a_miss(stage: Stage, run_folder: Path) -> None:
    stage.path = run_folder / "nobody.sock"

    async def scenario(cluster: Workers) -> None:
        assert len((await cluster["w"].run(asked(1, PROMPT)))[0]) == 20
        assert told(cluster["w"], ids_of(KEY, PROMPT), "host") == 0

    stage.play(scenario)
