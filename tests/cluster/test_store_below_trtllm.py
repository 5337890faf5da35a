"""The node's store below TensorRT-LLM in the worker: what its connector keeps there has the names that routers know."""

import os
import sys
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
from headwater.engines.watched import Recorder
from headwater.errors import ConfigError
from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.pricing import ComputeRate
from headwater.protocol.request import EngineRequest
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.tiers import followed
from headwater.tiers.service import KvTiers
from kv_process import client_of, store_process
from trtllm_llm import LLM, Connected, package
from trtllm_model import Fabric
from word_tokenizer import write_word_tokenizer

SIZES = EngineConfig(
    block_size=16, num_kv_blocks=48, max_num_seqs=4, max_num_batched_tokens=64, max_waiting=8, max_model_len=512
)
PROMPT = prompt_of(100)
KEY = namespace("print", "layout", salt="4:acme:")
CONNECTOR = "headwater.kv.connectors.trtllm"


class Stage:
    def __init__(self, config: EngineConfig, path: Path) -> None:
        self._config, self.path = config, path

    def engine(self, *words: str) -> Engine:
        words = ("--kv-cache-config.tokens-per-block", "16", *words)
        return create_engine(msgspec.structs.replace(self._config, engine_args=words), Placement(store=self.path))

    def play(self, scenario: Callable[[Workers], Coroutine[Any, Any, None]], *words: str) -> None:
        """With one worker, "w"."""

        async def whole() -> None:
            async with workers({"w": self.engine(*words)}, kv_socket=self.path) as cluster:
                await scenario(cluster)

        run_leak_checked(whole())
        assert not [name for name in os.environ if name.startswith("TRTLLM")]

    def refused(self, why: str) -> None:
        async def whole() -> None:
            engine = self.engine()
            try:
                with pytest.raises(ConfigError, match=why):
                    await engine.start(Recorder(), lambda progress: None)
            finally:
                await engine.close()

        run_leak_checked(whole())
        assert not [name for name in os.environ if name.startswith("TRTLLM")]


@pytest.fixture
def stage(tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name, module in package().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, CONNECTOR, None)
    monkeypatch.delitem(sys.modules, CONNECTOR)
    tokenizer = str(write_word_tokenizer(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(LLM, "made", [])
    monkeypatch.setattr(LLM, "fabric", Fabric())
    monkeypatch.setattr(LLM, "mocker", EngineConfig(tokenizer=tokenizer, mocker_speedup=0.0))
    path = run_folder / "kv.sock"
    config = msgspec.structs.replace(SIZES, tokenizer=tokenizer, model="double", engine="trtllm")
    with store_process(path, "--disk", f"{run_folder}/tier:32MiB", "--admission", "all", "--min-block", "4KiB"):
        yield Stage(config, path)


def asked(stream: int, key: bytes = KEY, tenant: str = "acme", **fields: Any) -> EngineRequest:
    return msgspec.structs.replace(request(stream, PROMPT, 4), namespace=key, tenant=tenant, **fields)


def ids_of(key: bytes) -> bytes:
    return chain_block_ids(key, array("I", PROMPT).tobytes(), 16)


def loaded() -> list[int]:
    """Prompt tokens that came out of the store, by request."""
    connected = LLM.made[-1].connected
    assert connected is not None
    return connected.loaded


def test_routers_know_what_it_stores_and_a_restarted_one_finds_it(stage: Stage) -> None:
    async def first(cluster: Workers) -> None:
        worker = cluster["w"]
        await worker.run(asked(1))
        await eventually(lambda: told(worker, ids_of(KEY), "host") == 6, "the router is told")
        await eventually(lambda: told(worker, ids_of(KEY), "disk") == 6, "of all tiers")
        async with client_of(stage.path) as client:
            families = (await client.status()).tiers[0].families
        assert {(one.model, one.tenant) for one in families} == {(worker.engine.info.card.fingerprint, "acme")}

    async def again(cluster: Workers) -> None:
        worker = cluster["w"]
        await eventually(lambda: told(worker, ids_of(KEY), "host") == 6, "before the first request")
        await worker.run(asked(1))
        assert loaded()[-1] == 96

    stage.play(first)
    stage.play(again)


@pytest.mark.parametrize("manager", ["false", "true"])
def test_tenants_share_nothing_and_their_limits_reach_the_store(stage: Stage, manager: str) -> None:
    other = namespace("print", "layout", salt="5:other:")

    async def scenario(cluster: Workers) -> None:
        worker = cluster["w"]
        own = worker.engine.info.card
        plain = namespace(own.fingerprint, own.kv_layout)
        await worker.run(asked(1, kv_share=0.25))
        await worker.run(asked(2, other, "other"))
        await worker.run(request(3, PROMPT, 4))
        assert loaded()[-3:] == [0, 0, 0]
        for key in (KEY, other, plain):
            await eventually(lambda k=key: told(worker, ids_of(k), "host") == 6, "each is told of its own")
            if manager == "false":  # the second one names no salts, and these began alike at once
                await eventually(lambda k=key: told(worker, ids_of(k), "device") == 6, "on the device as well")
        for stream, key, tenant in ((4, KEY, "acme"), (5, other, "other"), (6, plain, "")):
            await worker.run(asked(stream, key, tenant))
        assert loaded()[-3:] == [96, 96, 96]
        async with client_of(stage.path) as client:
            host = (await client.status()).tiers[0]
        assert {family.tenant for family in host.families} == {"acme", "other", ""}
        assert ("acme", 0.25) in [(one.tenant, one.limit) for one in host.tenants]

    stage.play(scenario, "--kv-cache-config.use-kv-cache-manager-v2", manager)


def test_blocks_that_would_come_too_late_are_computed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "_ASK_S", 0.02)
    cost_ms = [1.0]
    monkeypatch.setattr(KvTiers, "_rate", lambda tiers, size: ComputeRate(cost_ms[0], 0.0, size))

    async def scenario(cluster: Workers) -> None:
        worker = cluster["w"]
        for stream, token_ms, expected in ((1, 1.0, 0), (2, 1e-9, 0), (3, 1.0, 96)):
            cost_ms[0] = token_ms
            names = LLM.made[-1].connected.executor.scheduler._shared.names
            await eventually(lambda ms=token_ms, of=names: of.rate().token_ms == ms, "what computing costs is told")
            await worker.run(asked(stream))
            assert loaded()[-1] == expected
            await eventually(lambda: told(worker, ids_of(KEY), "host") == 6, "it is stored")

    stage.play(scenario)


def test_requests_for_adapters_are_left_to_its_own_cache(stage: Stage, tmp_path: Path) -> None:
    async def scenario(cluster: Workers) -> None:
        worker = cluster["w"]
        for stream in (1, 2):
            await worker.run(asked(stream, adapter="tuned"))
        assert loaded()[-2:] == [0, 0]
        async with client_of(stage.path) as client:
            assert (await client.status()).tiers[0].num_blocks == 0

    stage.play(scenario, "--lora-modules", f"tuned={tmp_path}")


def test_what_the_operator_has_attached_stays_as_it_is(stage: Stage) -> None:
    """It names blocks by itself, and no router is told."""

    async def scenario(cluster: Workers) -> None:
        worker = cluster["w"]
        assert not worker.engine.info.store
        assert worker.engine.info.card.kv_layout == "trtllm.auto.b16"
        await worker.run(asked(1))
        assert told(worker, ids_of(KEY), "host") == 0

    words = [f"--kv-connector-config.connector-{name}" for name in ("module", "scheduler-class", "worker-class")]
    values = (CONNECTOR, "HeadwaterScheduler", "HeadwaterWorker")
    stage.play(scenario, *(word for pair in zip(words, values, strict=True) for word in pair))


def test_a_release_without_salts_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate_async(self: LLM, inputs: list[int], sampling_params: Any = None, streaming: bool = False) -> Any: ...

    monkeypatch.setattr(LLM, "generate_async", generate_async)
    stage.refused("takes no cache salt")


def test_an_executor_that_does_not_hear_of_the_store_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connected, "passed_on", ("XDG_",))
    stage.refused("runs where the environment of this worker does not reach")
