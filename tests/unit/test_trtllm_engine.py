"""TensorRT-LLM in the worker, over a stand-in for its package: flags, sampling, adapters, hand-offs, and its deaths."""

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headwater.config.schema import EngineConfig
from headwater.engines.suite import SIZES, prompt_of
from headwater.engines.trtllm import engine as trtllm
from headwater.engines.trtllm.arguments import trtllm_arguments
from headwater.engines.trtllm.engine import TrtllmEngine
from headwater.engines.trtllm.installed import load_installed
from headwater.engines.trtllm.sampling import trtllm_sampling
from headwater.engines.watched import Bench
from headwater.errors import ConfigError, InvalidRequest, WorkerLost
from headwater.kv.identity import chain_block_ids, namespace, split_block_ids
from headwater.protocol.request import EngineRequest, ExportOrder, SamplingParams, SequenceOutput, StructuredSpec
from headwater.runtime.conformance import eventually
from trtllm_llm import LLM, package
from trtllm_model import Fabric
from word_tokenizer import write_word_tokenizer

Scenario = Callable[["Stage"], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, package())
    monkeypatch.setattr(LLM, "made", [])
    monkeypatch.setattr(LLM, "fabric", Fabric())


def put_in_place(monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


class Stage:
    """Makes engines."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = write_word_tokenizer(folder)
        LLM.mocker = EngineConfig(tokenizer=str(self.tokenizer), mocker_decode_base_ms=2.0)

    @asynccontextmanager
    async def engine(self, *words: str, **changes: Any) -> AsyncIterator[Bench]:
        own = msgspec.structs.replace(SIZES, engine="trtllm", model="double", tokenizer=str(self.tokenizer), **changes)
        words = ("--kv-cache-config.tokens-per-block", str(own.block_size), *words)
        async with Bench.running(TrtllmEngine(msgspec.structs.replace(own, engine_args=words))) as bench:
            yield bench


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        uvloop.run(asyncio.wait_for(scenario(Stage(tmp_path)), 30))

    return run


# ---- what is installed


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ConfigError, match="needs TensorRT-LLM") as refused:
        load_installed()
    assert refused.value.hint is not None
    assert "headwater[trtllm]" in refused.value.hint


@pytest.mark.parametrize("version", ["1.2.1", "0.21.0", "1.5.0rc1", "2.0.0", "nightly"])
def test_releases_that_it_was_not_written_for_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, package(version))
    with pytest.raises(ConfigError, match=f"TensorRT-LLM {version} is installed"):
        load_installed()


@pytest.mark.parametrize("version", ["1.3.0", "1.4.0rc4", "1.4.2+cu13"])
def test_releases_that_it_was_written_for_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, package(version))
    assert load_installed().version == version


def test_a_package_without_what_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = package()
    del modules["tensorrt_llm.llmapi"].GuidedDecodingParams
    put_in_place(monkeypatch, modules)
    with pytest.raises(ConfigError, match="GuidedDecodingParams"):
        load_installed()


# ---- flags


def arguments(*words: str, **fields: Any) -> dict[str, Any]:
    return trtllm_arguments(msgspec.structs.replace(EngineConfig(engine_args=words), **fields), "model").llm


def test_what_is_needed_here_is_set_and_can_be_overruled() -> None:
    llm = arguments()
    assert llm["kv_cache_config"] == {"enable_block_reuse": True, "event_buffer_max_size": 65_536}
    assert llm["enable_iter_perf_stats"] is True
    assert llm["guided_decoding_backend"] == "xgrammar"
    assert arguments("--guided-decoding-backend", "llguidance")["guided_decoding_backend"] == "llguidance"
    assert arguments("--kv-cache-config.event-buffer-max-size=7")["kv_cache_config"]["event_buffer_max_size"] == 7


def test_our_words_are_passed_on_where_they_were_said() -> None:
    llm = arguments(max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=512, dtype="bfloat16", block_size=64)
    assert (llm["max_seq_len"], llm["max_batch_size"], llm["max_num_tokens"], llm["dtype"]) == (
        4096,
        8,
        512,
        "bfloat16",
    )
    assert llm["kv_cache_config"]["tokens_per_block"] == 64
    assert "max_batch_size" not in arguments()
    assert arguments("--max-batch-size", "9", max_num_seqs=8)["max_batch_size"] == 9
    kv = arguments(num_kv_blocks=10, block_size=32, enable_prefix_caching=False)["kv_cache_config"]
    assert kv == {"enable_block_reuse": False, "tokens_per_block": 32, "max_tokens": 320}


def test_flags_are_arguments_of_llm_members_and_the_servers_names() -> None:
    llm = arguments(
        *("--tp_size", "4", "--enable-chunked-prefill", "--no-trust-remote-code", "--moe-config.backend", "CUTLASS"),
        *("--kv_cache_free_gpu_memory_fraction", "0.8", "--host", "0.0.0.0", "--scheduler-config.x", "[1, 2]"),
    )
    assert llm["tensor_parallel_size"] == 4
    assert (llm["enable_chunked_prefill"], llm["trust_remote_code"]) == (True, False)
    assert llm["moe_config"] == {"backend": "CUTLASS"}
    assert llm["kv_cache_config"]["free_gpu_memory_fraction"] == 0.8
    assert llm["scheduler_config"] == {"x": [1, 2]}
    assert "host" not in llm


def test_the_store_is_attached_by_flags() -> None:
    """As docs/trtllm.md has it."""
    llm = arguments(
        *("--kv-connector-config.connector-module", "headwater.kv.connectors.trtllm"),
        *("--kv-connector-config.connector-scheduler-class", "HeadwaterScheduler"),
        *("--kv-connector-config.connector-worker-class", "HeadwaterWorker"),
    )
    assert llm["kv_connector_config"] == {
        "connector_module": "headwater.kv.connectors.trtllm",
        "connector_scheduler_class": "HeadwaterScheduler",
        "connector_worker_class": "HeadwaterWorker",
    }


def test_an_options_file_is_merged(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("kv_cache_config:\n  dtype: fp8\ncuda_graph_config: null\n")
    llm = arguments("--extra-llm-api-options", str(file), "--kv-cache-config.free-gpu-memory-fraction", "0.5")
    assert llm["kv_cache_config"]["dtype"] == "fp8"
    assert llm["kv_cache_config"]["enable_block_reuse"] is True
    assert llm["cuda_graph_config"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stray",), "belongs to no flag"),
        (("--extra_llm_api_options", "/nowhere.yaml"), "cannot be read"),
        (("--lora-modules", "tuned"), "NAME=FOLDER"),
        (("--max-batch-size", "[1"), "no YAML"),
        (("--kv-cache-config", "3", "--kv-cache-config.dtype", "fp8"), "given as a whole"),
    ],
)
def test_flags_that_make_no_sense_are_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        arguments(*words)


def test_what_llm_does_not_know_ends_the_start_with_its_words(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        with pytest.raises(ConfigError, match="LLM got invalid argument: swap_spce"):
            async with stage.engine("--swap-spce", "4"):
                pass

    play(scenario)


# ---- sampling


def request_of(**fields: Any) -> EngineRequest:
    own = {name: fields.pop(name) for name in list(fields) if name in EngineRequest.__struct_fields__}
    prompt = array("I", [1, 2, 3]).tobytes()
    return EngineRequest(1, "r", "m", prompt, SamplingParams(**({"max_tokens": 9} | fields)), **own)


def sampled(**fields: Any) -> Any:
    return trtllm_sampling(load_installed(), request_of(**fields), [2, 7], 300)


def test_every_sampling_field_has_its_place() -> None:
    found = sampled(
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=5,
        logprobs=4,
        stop_token_ids=[11],
        logit_bias={4: -3.0},
    )
    assert (found.max_tokens, found.min_tokens, found.temperature, found.top_p, found.top_k) == (9, 3, 0.5, 0.9, 40)
    assert (found.min_p, found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (
        0.1,
        0.2,
        0.3,
        1.1,
    )
    assert (found.seed, found.logprobs, found.stop_token_ids) == (5, 4, [11, 7])
    assert (found.end_id, found.ignore_eos, found.detokenize) == (2, False, False)
    assert found.embedding_bias[4] == -3.0
    assert found.embedding_bias.shape == (300,)
    assert found.include_stop_str_in_output


def test_what_is_not_asked_for_stays_unsaid() -> None:
    found = sampled(seed=5, seed_drawn=True, top_k=0, ignore_eos=True)
    assert (found.seed, found.top_k, found.stop_token_ids, found.ignore_eos) == (None, None, None, True)
    greedy = sampled(temperature=0.0)
    assert (greedy.temperature, greedy.top_k) == (0.0, 1)
    assert sampled(logprobs=0).logprobs == 1


def test_a_resumed_sequence_asks_for_the_rest() -> None:
    found = sampled(resumed_tokens=array("I", [1, 2]).tobytes(), min_tokens=3, seed=5)
    assert (found.max_tokens, found.min_tokens, found.seed) == (7, 1, 7)


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        (StructuredSpec("json_object"), "json_object", True),
        (StructuredSpec("json_schema", '{"type": "object", "schema": {}}'), "json", {"type": "object", "schema": {}}),
        (StructuredSpec("regex", "(ab)+"), "regex", "(ab)+"),
        (StructuredSpec("choice", '["a.b", "c"]'), "regex", r"(a\.b|c)"),
        (StructuredSpec("grammar", "root ::= 'x'"), "grammar", "root ::= 'x'"),
    ],
)
def test_structured_output(spec: StructuredSpec, field: str, value: object) -> None:
    found = sampled(structured=spec, ignore_eos=True)
    assert getattr(found.guided_decoding, field) == value
    assert not found.ignore_eos, "a complete document ends the output"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured": StructuredSpec("json_object", param="x"), "resumed_tokens": b"\1\0\0\0"}, "x"),
        ({"structured": StructuredSpec("json_schema", "true", "guided_json")}, "guided_json"),
        ({"structured": StructuredSpec("json_schema", "{", "tools")}, "tools"),
        ({"logit_bias": {300: 1.0}}, "logit_bias"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampled(**fields)
    assert refused.value.param == param


# ---- requests


def test_adapters_salts_and_priority_go_along(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine("--lora-modules", "tuned=/adapters/tuned") as bench:
            card = bench.info.card
            assert card.adapters == ["tuned"]
            own = namespace(card.fingerprint, card.kv_layout, adapter="tuned")
            theirs = namespace(card.fingerprint, card.kv_layout, adapter="tuned", salt="tenant")
            await bench.run(bench.request(prompt_of(20), adapter="tuned", namespace=own, priority=3))
            await bench.run(bench.request(prompt_of(20), adapter="tuned", namespace=theirs))
            first, second = [options for _, options in LLM.made[0].requests[-2:]]
            assert (first["lora_request"].lora_name, first["lora_request"].lora_path) == ("tuned", "/adapters/tuned")
            assert first["cache_salt"] is None
            assert second["cache_salt"] == f"hw:{theirs.hex()}"
            assert (first["priority"], second["priority"]) == (0.875, 0.5)
            bench.engine.submit([bench.request(prompt_of(20), adapter="unknown")])
            await eventually(lambda: bench.recorder.ended(3), "it is refused")
            assert "no adapter 'unknown': tuned" in bench.recorder.error(3).message

    play(scenario)


@pytest.fixture(params=["false", "true"], ids=["salts named", "not named"])
def manager(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Flags for either manager of KV blocks: the second one's events name no salts."""
    return "--kv-cache-config.use-kv-cache-manager-v2", request.param


def blocks_of(bench: Bench, prompt: list[int], salt: str) -> tuple[bytes, set[bytes]]:
    """The namespace, and the ids."""
    card = bench.info.card
    key = namespace(card.fingerprint, card.kv_layout, salt=salt)
    return key, set(split_block_ids(chain_block_ids(key, array("I", prompt).tobytes(), card.block_size)))


def told_blocks(bench: Bench) -> set[bytes]:
    return {one for event in bench.recorder.resident.snapshot() for one in split_block_ids(event.block_ids)}


def test_tenants_share_no_block_and_are_told_of_their_own(
    manager: tuple[str, str], play: Callable[[Scenario], None]
) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine(*manager) as bench:
            prompt, expected = prompt_of(100), set[bytes]()
            tenants = [blocks_of(bench, prompt, salt) for salt in ("ann", "bob", "")]
            for key, own in (*tenants, *tenants):
                await bench.run(bench.request(prompt, 1, namespace=key))
                expected.update(own)
                await eventually(lambda: told_blocks(bench) == expected, "it is told of")
            cached = [bench.recorder.outputs[stream][0].num_cached_tokens for stream in range(1, 7)]
            assert cached == [0, 0, 0, 96, 96, 96]

    play(scenario)


def test_blocks_of_tenants_that_begin_alike_at_once_are_given_to_nobody_else(
    manager: tuple[str, str], play: Callable[[Scenario], None]
) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine(*manager) as bench:
            prompts = [prompt_of(40) + [other] * 20 for other in (30, 31)]
            (ann, anns), (bob, bobs) = [blocks_of(bench, *pair) for pair in zip(prompts, ("ann", "bob"), strict=True)]
            await bench.run(bench.request(prompts[0], 1, namespace=ann), bench.request(prompts[1], 1, namespace=bob))
            translator = bench.engine._draining_events._translator
            if manager[1] == "true":
                await eventually(lambda: translator.num_orphans == 6, "all blocks are told of")
            else:
                await eventually(lambda: told_blocks(bench) == anns | bobs, "all blocks are told of")
            assert told_blocks(bench) == (set() if manager[1] == "true" else anns | bobs)

    play(scenario)


def test_whose_blocks_are_is_forgotten_after_each_request(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine() as bench:
            owners = bench.engine._owners
            await bench.run(bench.request(prompt_of(40), 1))
            for moment in (0, 0.05):
                aborted = bench.request(prompt_of(40), 400)
                bench.engine.submit([aborted])
                await asyncio.sleep(moment)  # before its task has run, and after
                bench.engine.abort([aborted.stream])
            assert owners._begun.keys() == {1, 2, 3}
            await eventually(lambda: [stream for _, stream in owners._ended] == [1, 2, 3], "each once")

    play(scenario)


def test_an_empty_salt_would_be_refused_by_it() -> None:
    """The double is as strict as it is."""
    llm = LLM("double", kv_cache_config={"tokens_per_block": 16})
    with pytest.raises(ValueError, match="cache_salt"):
        llm.generate_async([1, 2], cache_salt="")


def test_a_sequence_that_fails_alone_may_go_elsewhere(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine(max_num_seqs=1) as bench:
            bench.engine.submit([bench.request(prompt_of(20), 400)])
            await eventually(lambda: bool(bench.recorder.tokens(1)), "it runs")
            executor = LLM.made[0].executor
            assert executor is not None
            next(iter(executor.open.values())).answers.put_nowait(
                SequenceOutput.failed(0, WorkerLost("out of something"))
            )
            await eventually(lambda: bench.recorder.ended(1), "it ends")
            error = bench.recorder.error(1)
            assert (error.code, error.retryable) == ("worker_lost", True)
            assert "out of something" in error.message

    play(scenario)


def test_a_dead_executor_ends_everything(play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm, "_HEALTH_S", 0.02)

    async def scenario(stage: Stage) -> None:
        async with stage.engine() as bench:
            bench.engine.submit([bench.request(prompt_of(20), 400)])
            await eventually(lambda: bool(bench.recorder.tokens(1)), "it runs")
            LLM.made[0].healthy = False
            await eventually(lambda: bool(bench.recorder.failures), "the failure is told")
            assert bench.recorder.error(1).code == "engine_failed"
            assert "executor has died" in str(bench.recorder.failures[0])

    play(scenario)


def test_steps_are_timed_by_what_it_says_of_them(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine() as bench:
            await bench.run(bench.request(prompt_of(60), 10))

            def timings() -> list[Any]:
                return [timing for load in bench.recorder.loads for timing in load.timings]

            await eventually(lambda: sum(one.num_decode_sequences for one in timings()) >= 9, "all steps are told of")
            assert sum(one.num_prefill_tokens for one in timings()) == 60
            assert all(one.duration_ms > 0 for one in timings())

    play(scenario)


# ---- hand-offs

TRANSCEIVER = ("--cache-transceiver-config.backend", "UCX")


def exported(bench: Bench, prompt: list[int], **fields: Any) -> EngineRequest:
    card = bench.info.card
    order = ExportOrder(0, 30.0, card.fingerprint, card.kv_layout, card.dtype, card.block_size)
    return bench.request(prompt, 1, export=order, **fields)


async def ticket(bench: Bench, prompt: list[int], **fields: Any) -> bytes:
    order = exported(bench, prompt, **fields)
    bench.engine.submit([order])
    await eventually(lambda: bench.recorder.ended(order.stream), "the prompt is computed")
    last = bench.recorder.last(order.stream)
    assert last is not None
    assert last.error is None, last.error
    return last.ticket


def test_a_decode_goes_on_with_the_kv_of_a_prefill(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine(*TRANSCEIVER) as one, stage.engine(*TRANSCEIVER) as two:
            assert one.info.tickets
            (expected,) = await one.run(one.request(prompt_of(90, 1), 20))
            found = await ticket(one, prompt_of(90, 1))
            assert found
            request = two.request(prompt_of(90, 1), 20, ticket=found)
            assert await two.run(request) == [expected]
            assert LLM.fabric.taken == 1
            assert LLM.made[1].requests[-1][1]["disaggregated_params"].request_type == "generation_only"

    play(scenario)


def test_kv_that_is_gone_is_computed_again(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine(*TRANSCEIVER) as one, stage.engine(*TRANSCEIVER) as two:
            (expected,) = await one.run(one.request(prompt_of(90, 1), 20))
            found = await ticket(one, prompt_of(90, 1))
            LLM.fabric.held.clear()
            assert await two.run(two.request(prompt_of(90, 1), 20, ticket=found)) == [expected]
            assert LLM.fabric.taken == 0

    play(scenario)


def test_an_engine_that_takes_no_tickets_computes_the_prompt(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine(*TRANSCEIVER) as one, stage.engine() as two:
            (expected,) = await one.run(one.request(prompt_of(90, 1), 20))
            found = await ticket(one, prompt_of(90, 1))
            assert await two.run(two.request(prompt_of(90, 1), 20, ticket=found)) == [expected]

    play(scenario)


def test_kv_that_does_not_come_is_computed_here_in_time(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trtllm, "_TICKET_S", 0.1)

    async def scenario(stage: Stage) -> None:
        async with stage.engine(*TRANSCEIVER) as one, stage.engine(*TRANSCEIVER) as two:
            (expected,) = await one.run(one.request(prompt_of(90, 1), 20))
            found = await ticket(one, prompt_of(90, 1))
            LLM.fabric.held.clear()
            LLM.fabric.hangs = True
            assert await two.run(two.request(prompt_of(90, 1), 20, ticket=found)) == [expected]
            aborted = two.request(prompt_of(90, 2), 20, ticket=found)
            two.engine.submit([aborted])
            await asyncio.sleep(0.01)
            two.engine.abort([aborted.stream])
            await asyncio.sleep(0.15)
            assert aborted.stream not in two.recorder.outputs
            assert not two.engine._results

    play(scenario)


def test_an_answer_that_has_begun_may_last_longer_than_kv_may_take(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trtllm, "_TICKET_S", 0.6)

    async def scenario(stage: Stage) -> None:
        monkeypatch.setattr(LLM, "mocker", msgspec.structs.replace(LLM.mocker, mocker_decode_base_ms=20.0))
        async with stage.engine(*TRANSCEIVER) as one, stage.engine(*TRANSCEIVER) as two:
            found = await ticket(one, prompt_of(90, 1))
            (answer,) = await two.run(two.request(prompt_of(90, 1), 60, ticket=found))
            assert len(answer) == 60
            assert not LLM.fabric.held, "its KV came"

    play(scenario)


@pytest.mark.parametrize("bad", [b"\x80", b"not a ticket", b"\x81\xa1x\x01"])
def test_what_is_no_ticket_is_refused(bad: bytes, play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine(*TRANSCEIVER) as bench:
            bench.engine.submit([bench.request(prompt_of(90), 20, ticket=bad)])
            await eventually(lambda: bench.recorder.ended(1), "it is refused")
            assert bench.recorder.error(1).param == "ticket"

    play(scenario)


def test_log_probabilities_are_not_handed_over_and_engines_without_a_transceiver_neither(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.engine() as bench:
            assert not bench.info.tickets
            order = exported(bench, prompt_of(90), logprobs=2)
            bench.engine.submit([order])
            await eventually(lambda: bench.recorder.ended(order.stream), "it is refused")
            assert bench.recorder.error(order.stream).param == "logprobs"

    play(scenario)
