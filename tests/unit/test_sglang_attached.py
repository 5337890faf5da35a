"""SGLang servers that are attached to: what they are asked, what is done about what they are not, gaps and restarts."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from attached_stage import AttachedStage
from headwater.engines.attached import engine as attached
from headwater.engines.attached.dialects.sglang import SglangDialect
from headwater.engines.attached.engine import AttachedEngine
from headwater.engines.suite import SIZES, prompt_of
from headwater.engines.watched import Recorder
from headwater.errors import ConfigError
from headwater.kv.identity import namespace
from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.runtime.conformance import eventually
from sglang_double import ADAPTER, MODEL, SglangDouble
from sglang_pair_double import PairedDouble

Stage = AttachedStage[SglangDouble]
Scenario = Callable[[Stage], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    stage = AttachedStage(tmp_path, SglangDouble)
    return lambda scenario: stage.play(scenario(stage))


def test_it_is_recognised_and_its_sizes_are_its_own(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached(max_num_seqs=64, max_num_batched_tokens=None) as bench:
            info, card = bench.info, bench.info.card
            assert (info.engine, info.kv_blocks, info.max_num_seqs, info.max_num_batched_tokens) == (
                "attached-sglang",
                48,
                4,
                64,
            )
            assert (card.name, card.served_names, card.adapters) == (MODEL, [MODEL, ADAPTER], [ADAPTER])
            assert (card.block_size, card.max_model_len) == (16, 512)
            assert (info.role, info.paired, info.bootstrap) == (None, False, "")

    play(scenario)


def test_an_abort_is_told_by_a_name_that_no_other_begins_with(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            bench._streams = 0
            streams = [bench.request(prompt_of(20, letter), 400) for letter in range(12)]
            bench.engine.submit([streams[0], streams[9], streams[10]])  # 1, 10 and 11
            await eventually(lambda: len(bench.recorder.outputs) == 3, "all run")
            bench.engine.abort([1])
            await eventually(lambda: stage.double.num_open == 2, "the server knows at once", 1.5)
            assert len(stage.double.aborted) == 1
            bench.engine.abort([10, 11])
            await eventually(lambda: stage.double.num_open == 0, "of all")

    play(scenario)


def test_what_comes_to_its_end_is_not_aborted(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(20)), bench.request(prompt_of(20)))
            await asyncio.sleep(0.05)
            assert stage.double.aborted == []

    play(scenario)


def test_a_stop_token_ends_what_ignores_the_end_and_the_server_is_told(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            (tokens,) = await bench.run(bench.request(prompt_of(20), 30))
            (shorter,) = await bench.run(bench.request(prompt_of(20), 300, stop_token_ids=[tokens[9]]))
            assert shorter == tokens[: tokens.index(tokens[9])]
            await eventually(lambda: len(stage.double.aborted) == 1, "it is left", 1.5)
            await eventually(lambda: stage.double.num_open == 0, "it stops", 1.5)

    play(scenario)


def test_an_adapter_and_a_salt_keep_to_themselves(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            key = namespace(bench.info.card.fingerprint, bench.info.card.kv_layout, salt="tenant")
            await bench.run(bench.request(prompt_of(40), adapter=ADAPTER), bench.request(prompt_of(40), namespace=key))
            tuned, salted = sorted(stage.double.raw, key=lambda body: "cache_salt" in body)
            assert (tuned["lora_path"], "cache_salt" in tuned) == (ADAPTER, False)
            assert salted["cache_salt"] == salted["extra_key"] == "hw:" + key.hex()
            await eventually(lambda: len(bench.engine.resident_blocks()) == 2, "both are told of")
            bench.engine.submit([bench.request(prompt_of(5), adapter="unknown")])
            await eventually(lambda: bench.recorder.ended(3), "it is answered")
            assert "not loaded" in bench.recorder.error(3).message

    play(scenario)


def test_a_gap_in_the_events_heals_and_a_new_life_begins_anew(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            engine = bench.engine
            assert isinstance(engine, AttachedEngine)
            assert engine._following is not None
            (feed,) = engine._following.feeds  # type: ignore[union-attr]
            await eventually(lambda: not feed.order._asking, "nothing came before us")
            publish, stage.double.publisher.publish = stage.double.publisher.publish, stage.double.publisher.lose  # type: ignore[method-assign]
            await bench.run(bench.request(prompt_of(40)))
            stage.double.publisher.publish = publish  # type: ignore[method-assign]
            await bench.run(bench.request(prompt_of(40, 2)))
            await eventually(lambda: len(bench.engine.resident) == 4, "the lost ones are asked for")
            assert (feed.order.num_gaps, feed.order.num_lost) == (1, 0)
            await stage.double.stop()
            await eventually(lambda: engine.paused, "the engine knows")
            assert engine.resident_blocks() == []
            await stage.double.start()
            await eventually(lambda: not engine.paused, "it is back")
            await bench.run(bench.request(prompt_of(40, 3)))
            await eventually(lambda: len(engine.resident) == 2, "blocks are told of again")
            assert engine.resident_blocks() == bench.recorder.resident.snapshot()

    play(scenario)


def test_pages_that_are_too_small_are_not_followed_and_the_log_says_what_to_do(
    play: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.page_size = 1
        async with stage.attached() as bench:
            assert bench.info.card.block_size == 16
            await bench.run(bench.request(prompt_of(40)))
            assert bench.engine.resident_blocks() == []
            assert bench.recorder.outputs[1][0].num_cached_tokens == 0, "SGLang says it itself"

    play(scenario)
    assert "sends no KV events" in caplog.text
    assert "--page-size 16" in caplog.text


def test_an_older_server_is_served_by_what_it_has(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "_PROBE_S", 0.02)
    monkeypatch.setattr(attached, "_PATIENCE_S", 0.1)

    async def scenario(stage: Stage) -> None:
        await stage.double.stop()
        stage.double.older = True
        await stage.double.start()
        async with stage.attached() as bench:
            assert (bench.info.engine, bench.info.kv_blocks) == ("attached-sglang", 48)
            await asyncio.sleep(0.3)
            assert not bench.engine.paused, "what it does not say is no trouble"
            (tokens,) = await bench.run(bench.request(prompt_of(40)))
            assert len(tokens) == 8

    play(scenario)


def test_without_events_the_log_says_how_to_have_them(
    play: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.double.close()
        stage.double = SglangDouble(stage.config, events=False)
        await stage.double.start()
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(40)))

    play(scenario)
    assert "start SGLang with --kv-events-config" in caplog.text


@pytest.mark.parametrize(("status", "code"), [(503, "overloaded"), (500, "worker_lost"), (400, "invalid_value")])
def test_refusals_of_the_server(play: Callable[[Scenario], None], status: int, code: str) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            stage.double.status = status
            bench.engine.submit([bench.request(prompt_of(20))])
            await eventually(lambda: bench.recorder.ended(1), "it is answered")
            assert bench.recorder.error(1).code == code
            assert stage.double.aborted == [], "there is nothing to abort"

    play(scenario)


def test_an_answer_that_breaks_off_is_a_lost_worker(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            stage.double.keeps_the_end = True
            bench.engine.submit([bench.request(prompt_of(20))])
            await eventually(lambda: bench.recorder.ended(1), "it is answered")
            assert (bench.recorder.error(1).code, bench.recorder.error(1).retryable) == ("worker_lost", True)

    play(scenario)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_half_of_a_pair_needs_token_ids(tmp_path: Path, mode: str) -> None:
    async def scenario() -> None:
        stage = AttachedStage(tmp_path, SglangDouble)
        double = PairedDouble(stage.config, mode)
        await double.start()
        config = msgspec.structs.replace(SIZES, attach=(double.url,))
        engine = AttachedEngine(config)
        with pytest.raises(ConfigError, match=f"does {mode} alone"):
            await engine.start(Recorder(), lambda _: None)
        await engine.close()
        with_texts = AttachedEngine(msgspec.structs.replace(config, tokenizer=str(stage.tokenizer)))
        info = await with_texts.start(Recorder(), lambda _: None)
        assert (info.role, info.paired) == (mode, True)
        assert info.bootstrap == (f"127.0.0.1:{double._bootstrap_port}" if mode == "prefill" else "")
        await with_texts.close()
        await double.close()

    uvloop.run(asyncio.wait_for(scenario(), 30))


def test_names_of_requests_do_not_begin_with_each_other() -> None:
    dialect = SglangDialect()
    requests = [EngineRequest(stream, "r", "m", bytes(4), SamplingParams()) for stream in range(1, 200)]
    names = [json.loads(dialect.abort(request)[1])["rid"] for request in requests]
    assert not any(one != other and other.startswith(one) for one in names for other in names)
    assert json.loads(dialect.request("m", requests[3], [1], None)[1])["rid"] == names[3]
