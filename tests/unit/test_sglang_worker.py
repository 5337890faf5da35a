"""SGLang in the worker: its flags, its version, its failures, and what runs on the thread that it is given."""

import asyncio
import json
import platform
import socket
import threading
from collections.abc import Callable, Coroutine
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headwater.cli.engine_flags import take_engine_words
from headwater.cli.verbs import parser_of
from headwater.config.schema import EngineConfig
from headwater.engines.base import Placement
from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.registry import create_engine
from headwater.engines.sglang import installed as installation
from headwater.engines.sglang.arguments import SglangArguments, sglang_arguments
from headwater.engines.sglang.engine import SglangEngine
from headwater.engines.suite import SIZES, prompt_of
from headwater.engines.watched import Bench, Recorder
from headwater.errors import ConfigError, HeadwaterError, ModelError
from headwater.runtime.conformance import eventually
from sglang_double import ADAPTER
from sglang_engine_double import Engine, ServerArgs, installed
from word_tokenizer import write_word_tokenizer


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    tokenizer = write_word_tokenizer(tmp_path)
    mocker = msgspec.structs.replace(SIZES, tokenizer=str(tokenizer), mocker_decode_base_ms=3.0)
    installed(monkeypatch, mocker)
    return msgspec.structs.replace(SIZES, tokenizer=str(tokenizer), model="a/model", engine="sglang")


def play(config: EngineConfig, scenario: Callable[[Bench, Engine], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with Bench.running(create_engine(config)) as bench:
            await scenario(bench, Engine.made[-1])
        assert Engine.made[-1].down

    uvloop.run(asyncio.wait_for(whole(), 30))


# ---- whether it is there


def test_another_release_is_refused_and_the_error_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("0.5.22", "0.6.0", "0.5.23rc1", "0.5.23.dev4", "nightly"):
        monkeypatch.setattr(installation, "version", lambda _, found=found: found)
        with pytest.raises(ConfigError, match=r"written for 0\.5\.23 alone") as caught:
            installation.check_installed()
        assert found in str(caught.value)
        assert "sglang==0.5.23" in str(caught.value.hint)
    for found in ("0.5.23", "0.5.23.post1", "0.5.23+cu130"):
        monkeypatch.setattr(installation, "version", lambda _, found=found: found)
        assert installation.check_installed() == found


def test_without_it_the_error_says_how_to_have_it(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(installation, "version", missing)

    async def start() -> None:
        engine = create_engine(config)
        try:
            await engine.start(Recorder(), lambda _: None)
        finally:
            await engine.close()

    with pytest.raises(ConfigError, match="not installed here") as caught:
        uvloop.run(start())
    assert "pip install 'sglang==0.5.23'" in str(caught.value.hint)


# ---- flags


def words_of(config: EngineConfig, **changes: object) -> ServerArgs:
    found = sglang_arguments(msgspec.structs.replace(config, **changes), "a/model", Path("/run/x")).server
    assert isinstance(found, ServerArgs)
    return found


def test_our_words_become_its_flags(config: EngineConfig) -> None:
    given = words_of(config, dtype="bfloat16", tensor_parallel_size=2, revision="v2", block_size=32, num_kv_blocks=10)
    assert (given.model_path, given.dtype, given.tp_size, given.revision) == ("a/model", "bfloat16", 2, "v2")
    assert (given.page_size, given.max_total_tokens) == (32, 320)
    assert (given.context_length, given.max_running_requests, given.chunked_prefill_size) == (512, 4, 64)
    assert given.incremental_streaming_output
    events = json.loads(given.kv_events_config or "")
    assert events == {"publisher": "zmq", "endpoint": "ipc:///run/x/events", "replay_endpoint": "ipc:///run/x/replay"}


def test_its_own_words_win(config: EngineConfig) -> None:
    args = (
        "--page-size=64",
        "--max-running-requests",
        "9",
        "--tensor-parallel-size",
        "4",
        "--mem-fraction-static",
        "0.5",
    )
    given = words_of(config, engine_args=args, tensor_parallel_size=2)
    assert (given.page_size, given.max_running_requests, given.tp_size) == (64, 9, 4)
    assert given.mem_fraction_static == 0.5
    assert words_of(EngineConfig(model="a/model")).page_size == 16
    assert words_of(EngineConfig(model="a/model")).max_running_requests is None, "SGLang's default holds"


def test_engines_of_one_host_have_gpus_and_ports_of_their_own(config: EngineConfig) -> None:
    def second(*words: str) -> ServerArgs:
        own = msgspec.structs.replace(config, engine_args=words, tensor_parallel_size=2)
        found = sglang_arguments(own, "a/model", Path("/run/x"), Placement(1, 4)).server
        assert isinstance(found, ServerArgs)
        return found

    assert (second().base_gpu_id, second().disaggregation_bootstrap_port) == (2, 8999)
    assert second("--pp-size", "2").base_gpu_id == 4
    assert second("--base-gpu-id", "7").base_gpu_id == 7
    assert second("--disaggregation-bootstrap-port", "9100").disaggregation_bootstrap_port == 9101


@pytest.mark.parametrize(
    ("words", "bootstrap"),
    [
        (("--disaggregation-mode", "prefill"), "127.0.0.1:8998"),
        (("--disaggregation-mode", "prefill", "--host", "10.0.0.4"), "10.0.0.4:8998"),
        (("--disaggregation-mode", "prefill", "--host", "0.0.0.0"), f"{socket.gethostname()}:8998"),
        (("--disaggregation-mode", "decode"), ""),
    ],
)
def test_half_of_a_pair_in_the_worker(config: EngineConfig, words: tuple[str, ...], bootstrap: str) -> None:
    async def scenario(bench: Bench, _: Engine) -> None:
        assert (bench.info.role, bench.info.paired, bench.info.bootstrap) == (words[1], True, bootstrap)
        bench.engine.submit([bench.request(prompt_of(20))])
        await eventually(lambda: bench.recorder.ended(1), "it is answered")
        assert bench.recorder.error(1).code == ("unavailable" if words[1] == "prefill" else "handoff_failed")

    play(msgspec.structs.replace(config, engine_args=words), scenario)


def test_step_times_are_pooled_by_the_number_of_its_devices(config: EngineConfig) -> None:
    async def scenario(bench: Bench, _: Engine) -> None:
        assert bench.info.hardware == f"sglang-{platform.machine()}x4"

    play(msgspec.structs.replace(config, engine_args=("--tp-size", "2", "--pp-size", "2")), scenario)


def test_without_prefix_caching_there_are_no_events(config: EngineConfig) -> None:
    given = words_of(config, enable_prefix_caching=False)
    assert given.disable_radix_cache
    assert given.kv_events_config is None


def test_events_are_followed_where_the_operator_has_them_published(config: EngineConfig, tmp_path: Path) -> None:
    told = {"publisher": "zmq", "endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}

    async def scenario(bench: Bench, _: Engine) -> None:
        await bench.run(bench.request(prompt_of(40)))
        await eventually(lambda: len(bench.engine.resident) >= 2, "its blocks are told of")

    words = ("--kv-events-config", json.dumps(told | {"topic": "kv"}))
    play(msgspec.structs.replace(config, engine_args=words), scenario)


def test_ranks_publish_at_ports_of_their_own_and_nowhere_by_themselves(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def ranks(*words: str) -> SglangArguments:
        own = msgspec.structs.replace(config, engine_args=("--dp-size", "2", *words))
        return sglang_arguments(own, "a/model", Path("/run/x"))

    told = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
    assert ranks("--kv-events-config", told).feeds == [
        FeedAddress("tcp://127.0.0.1:5557", "", "tcp://127.0.0.1:5657"),
        FeedAddress("tcp://127.0.0.1:5558", "", "tcp://127.0.0.1:5658"),
    ]
    assert ranks("--kv-events-config", '{"publisher": "null"}').feeds == []
    assert caplog.text == ""
    alone = ranks()
    assert (alone.feeds, alone.server.kv_events_config) == ([], None)
    assert "only be guessed" in caplog.text
    with pytest.raises(ConfigError, match="--kv-events-config moon"):
        ranks("--kv-events-config", "moon")


@pytest.mark.parametrize("words", [("--no-such-flag",), ("--page-size", "many"), ("--dtype", "int3")])
def test_what_its_parser_says_is_what_the_operator_sees(config: EngineConfig, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="SGLang: ") as caught:
        words_of(config, engine_args=words)
    assert words[-1].lstrip("-") in str(caught.value)


def test_bytes_of_storage_have_no_flag(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory") as caught:
        words_of(config, kv_cache_memory=1 << 30)
    assert "--mem-fraction-static" in str(caught.value.hint)


def test_unknown_flags_on_the_command_line_are_its_own() -> None:
    arguments = ["a/model", "--engine", "sglang", "--mem-fraction-static", "0.8", "--max-num-seqs", "32"]
    own, words = take_engine_words(parser_of("serve"), arguments)
    assert words == ["--mem-fraction-static", "0.8"]
    assert own == ["a/model", "--engine", "sglang", "--max-num-seqs", "32"]


# ---- life


def test_it_has_a_thread_of_its_own_and_takes_no_signals(config: EngineConfig) -> None:
    async def scenario(bench: Bench, engine: Engine) -> None:
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("sglang") == 1
        assert engine.loop is not asyncio.get_running_loop()
        await bench.run(bench.request(prompt_of(20)), bench.request(prompt_of(20, 2), temperature=1.0, seed=4))
        assert {body.sampling_params.sampling_seed for body in engine.bodies} == {None, 4}
        assert all(body.extra_key is None for body in engine.bodies)

    play(config, scenario)
    assert "sglang" not in [thread.name for thread in threading.enumerate()]


def test_an_adapter_is_a_model_of_its_own(config: EngineConfig) -> None:
    async def scenario(bench: Bench, engine: Engine) -> None:
        assert bench.info.card.adapters == [ADAPTER]
        await bench.run(bench.request(prompt_of(20), adapter=ADAPTER))
        assert engine.bodies[0].lora_path == ADAPTER

    play(msgspec.structs.replace(config, engine_args=("--lora-paths", f"{ADAPTER}=/somewhere")), scenario)


def test_a_refusal_of_its_own_is_the_clients_and_the_rest_goes_on(config: EngineConfig) -> None:
    async def scenario(bench: Bench, _: Engine) -> None:
        bench.engine.submit([bench.request(prompt_of(20), top_p=0.0), bench.request(prompt_of(20, 2))])
        await eventually(lambda: bench.recorder.ended(1, 2), "both are answered")
        assert (bench.recorder.error(1).code, bench.recorder.error(1).retryable) == ("invalid_value", False)
        assert "top_p" in bench.recorder.error(1).message
        assert len(bench.recorder.tokens(2)) == 8

    play(config, scenario)


def test_an_abort_reaches_what_it_is_still_tokenizing(config: EngineConfig) -> None:
    async def scenario(bench: Bench, engine: Engine) -> None:
        bench.engine.submit([bench.request(prompt_of(20), 400)])
        bench.engine.abort([1])
        await eventually(lambda: len(engine.tokenizer_manager.aborted) == 1, "it is told until it knows")
        await eventually(lambda: engine.num_open == 0, "and stops")

    play(config, scenario)


def test_a_request_that_it_chokes_on_fails_alone(config: EngineConfig) -> None:
    async def scenario(bench: Bench, engine: Engine) -> None:
        whole = engine.generate

        async def choking(body: Any) -> Any:
            if len(body.input_ids) == 13:
                raise KeyError("no such thing")
            async for chunk in whole(body):
                yield chunk

        engine.generate = choking  # type: ignore[method-assign]
        bench.engine.submit([bench.request(prompt_of(13)), bench.request(prompt_of(20, 2))])
        await eventually(lambda: bench.recorder.ended(1, 2), "both are answered")
        assert bench.recorder.error(1).code == "internal_error"
        assert len(bench.recorder.tokens(2)) == 8
        assert bench.recorder.failures == []

    play(config, scenario)


def test_one_that_falls_silent_about_itself_has_failed(config: EngineConfig) -> None:
    async def scenario(bench: Bench, engine: Engine) -> None:
        bench.engine.submit([bench.request(prompt_of(20), 400)])
        await eventually(lambda: bool(bench.recorder.tokens(1)), "it runs")
        engine.tokenizer_manager.failing = True
        await eventually(lambda: bool(bench.recorder.failures), "the failure is told")
        assert bench.recorder.error(1).code == "engine_failed"

    play(config, scenario)


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (ValueError("tp_size must divide"), ConfigError),
        (RuntimeError("out of memory"), ModelError),
        (SystemExit(1), ModelError),
    ],
)
def test_one_that_does_not_start_says_why(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, refusal: BaseException, kind: type[HeadwaterError]
) -> None:
    monkeypatch.setattr(Engine, "refusal", refusal)

    async def start() -> None:
        engine = create_engine(config)
        try:
            await engine.start(Recorder(), lambda _: None)
        finally:
            await engine.close()
            assert isinstance(engine, SglangEngine)
            assert engine._folder is not None
            assert not engine._folder.path.exists()

    with pytest.raises(kind, match="SGLang"):
        uvloop.run(start())


def test_one_that_is_closed_while_it_loads_is_shut_down(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, go, whole = threading.Event(), threading.Event(), Engine.__init__

    def slow(self: Engine, **kwargs: Any) -> None:
        loading.set()
        go.wait(10)
        whole(self, **kwargs)

    monkeypatch.setattr(Engine, "__init__", slow)

    async def scenario() -> None:
        engine = create_engine(config)
        start = asyncio.ensure_future(engine.start(Recorder(), lambda _: None))
        await asyncio.to_thread(loading.wait, 10)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0.01)
        go.set()
        await closing
        assert Engine.made[-1].down

    uvloop.run(asyncio.wait_for(scenario(), 30))
    assert "sglang" not in [thread.name for thread in threading.enumerate()]
