"""TensorRT-LLM's server, attached: what it is sent, what it may not know, tokens by text, events for one reader."""

import asyncio
import json
import logging
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attached_stage import AttachedStage
from headwater.engines.attached.dialects.trtllm import TrtllmDialect, TrtllmReader, Words
from headwater.engines.attached.engine import AttachedEngine
from headwater.engines.base import Placement
from headwater.engines.suite import SIZES, prompt_of
from headwater.engines.trtllm_words import adapter_number, choice_regex, priority_of
from headwater.errors import ConfigError, InvalidRequest, WorkerLost
from headwater.kv.identity import chain_block_ids, namespace, split_block_ids
from headwater.protocol.request import EngineRequest, SamplingParams, StructuredSpec
from headwater.runtime.conformance import eventually
from trtllm_double import CompletionRequest, TrtllmDouble
from vllm_publisher import Publisher

Stage = AttachedStage[TrtllmDouble]
Scenario = Callable[[Stage], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    stage = AttachedStage(tmp_path, TrtllmDouble)
    return lambda scenario: stage.play(scenario(stage))


# ---- what it is sent


def body_of(dialect: TrtllmDialect | None = None, salt: str | None = None, **fields: Any) -> dict[str, Any]:
    own = {name: fields.pop(name) for name in list(fields) if name in EngineRequest.__struct_fields__}
    sampling = SamplingParams(**({"max_tokens": 9} | fields))
    request = EngineRequest(1, "r", "m", array("I", [1, 2, 3]).tobytes(), sampling, **own)
    path, body = (dialect or TrtllmDialect({})).request("served", request, [1, 2, 3], salt)
    assert path == "/v1/completions"
    msgspec.json.decode(body, type=CompletionRequest)  # it takes it
    return dict(msgspec.json.decode(body))


def test_a_plain_request_says_no_more_than_it_must() -> None:
    assert body_of(temperature=0.7, seed=1, seed_drawn=True) == {
        "model": "served",
        "prompt": [1, 2, 3],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "detokenize": False,
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "include_stop_str_in_output": True,
    }


def test_every_sampling_field_has_its_place() -> None:
    asked = {"min_tokens": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 0.2}
    asked |= {"frequency_penalty": 0.3, "repetition_penalty": 1.1, "seed": 5, "logprobs": 4, "stop_token_ids": [11]}
    body = body_of(**asked, ignore_eos=True, logit_bias={4: -3.0}, priority=-3)
    assert {name: body[name] for name in asked} == asked
    assert (body["ignore_eos"], body["logit_bias"], body["priority"]) == (True, {"4": -3.0}, 0.125)
    assert body_of(temperature=0.0)["top_k"] == 1
    assert body_of(logprobs=0)["logprobs"] == 1


def test_fields_of_our_sampling_are_all_known_here() -> None:
    """A new one has to be given a place."""
    known = {"max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed_drawn"}
    known |= {"frequency_penalty", "repetition_penalty", "logit_bias", "seed", "logprobs", "stop_token_ids"}
    assert known | {"ignore_eos", "structured"} == set(SamplingParams.__struct_fields__)


def test_a_resumed_sequence_asks_for_the_rest() -> None:
    body = body_of(resumed_tokens=array("I", [1, 2]).tobytes(), min_tokens=3, seed=5)
    assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (7, 1, 7)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (StructuredSpec("json_object"), {"type": "json_object"}),
        (
            StructuredSpec("json_schema", '{"schema": {"type": "x"}}'),
            {"type": "json", "schema": {"schema": {"type": "x"}}},
        ),
        (StructuredSpec("regex", "(ab)+"), {"type": "regex", "regex": "(ab)+"}),
        (StructuredSpec("choice", '["a.b (c)", "d"]'), {"type": "regex", "regex": r"(a\.b \(c\)|d)"}),
        (StructuredSpec("grammar", "root ::= 'x'"), {"type": "ebnf", "ebnf": "root ::= 'x'"}),
    ],
)
def test_structured_output(spec: StructuredSpec, expected: dict[str, Any]) -> None:
    body = body_of(structured=spec, ignore_eos=True)
    assert body["response_format"] == expected
    assert "ignore_eos" not in body, "a complete document ends the output"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured": StructuredSpec("json_object", param="x"), "resumed_tokens": b"\1\0\0\0"}, "x"),
        ({"structured": StructuredSpec("json_schema", "[]", "tools")}, "tools"),
        ({"salt": "hw:00"}, "cache_salt"),
        ({"ticket": b"no ticket"}, "ticket"),
        ({"adapter": "unknown"}, "model"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body_of(**fields)
    assert refused.value.param == param


def test_an_adapter_goes_along_with_its_folder_and_a_number_that_others_do_not_use() -> None:
    body = body_of(TrtllmDialect({"tuned": "/adapters/tuned"}), adapter="tuned")
    number = body["lora_request"]["lora_int_id"]
    assert body["lora_request"] == {"lora_name": "tuned", "lora_int_id": number, "lora_path": "/adapters/tuned"}
    assert number == adapter_number("/adapters/tuned") != adapter_number("/adapters/other")
    assert 1 << 30 <= number < 1 << 31


def test_priorities_keep_their_order_within_bounds() -> None:
    found = [priority_of(priority) for priority in (-1_000_000, -2, -1, 0, 1, 2, 1_000_000)]
    assert found == sorted(set(found))
    assert all(0 <= priority <= 1 for priority in found)
    assert priority_of(0) == 0.5


def test_choices_are_taken_word_for_word() -> None:
    import re

    choices = ["a|b", "c*", "[d]", "e\\f", "g h"]
    pattern = choice_regex(StructuredSpec("choice", json.dumps(choices)))
    assert all(re.fullmatch(pattern, choice) for choice in choices)
    assert not re.fullmatch(pattern, "ccc")


# ---- servers that know less


def test_a_field_that_a_server_does_not_know_is_left_out_or_refused(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        fields = CompletionRequest.__struct_fields__
        older = tuple(name for name in fields if name not in ("priority", "min_p"))
        stage.double.fields = older
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(20), priority=5))
            assert "priority" not in stage.double.bodies[-1]
            bench.engine.submit([bench.request(prompt_of(20), min_p=0.2)])
            await eventually(lambda: bench.recorder.ended(2), "it is refused")
            assert bench.recorder.error(2).param == "min_p"

    play(scenario)


def test_a_server_that_takes_salts_gets_them(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.fields = (*CompletionRequest.__struct_fields__, "cache_salt")
        server = AttachedEngine(msgspec.structs.replace(SIZES, attach=(stage.double.url,)))
        from headwater.engines.attached.http import Server

        asking = Server(server._address)
        dialect = TrtllmDialect({})
        await dialect.describe(asking)
        await asking.close()
        request = EngineRequest(1, "r", "m", array("I", [1]).tobytes(), SamplingParams(max_tokens=3))
        _, body = dialect.request("m", request, [1], "hw:ab")
        assert msgspec.json.decode(body)["cache_salt"] == "hw:ab"

    play(scenario)


def test_a_server_without_salts_says_so_once_before_tenants_are_refused(
    play: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            await bench.engine._dialect.describe(bench.engine._server)  # as when it has been away
            await bench.run(bench.request(prompt_of(20)))
            card, prompt = bench.info.card, prompt_of(100)
            for salt in ("ann", "bob"):
                key = namespace(card.fingerprint, card.kv_layout, salt=salt)
                bench.engine.submit([bench.request(prompt, namespace=key)])
            await eventually(lambda: bench.recorder.ended(2, 3), "they are refused")
            assert {bench.recorder.error(stream).param for stream in (2, 3)} == {"cache_salt"}
            assert not any("cache_salt" in body for body in stage.double.bodies)

    with caplog.at_level(logging.INFO):
        play(scenario)
    assert caplog.text.count("takes no cache salts") == 1


def test_a_tokenizer_is_checked_by_numbers_where_a_server_tells_no_ids(
    play: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.tokenizes = False
        async with stage.attached() as bench:
            assert bench.info.card.relayed is False
            assert len((await bench.run(bench.request(prompt_of(20))))[0]) == 8
        stage.double.token_offset = 1
        with caplog.at_level(logging.WARNING):
            async with stage.attached() as bench:
                assert bench.info.card.relayed is True
        assert "cannot be used" in caplog.text

    play(scenario)


def test_without_gauges_load_is_what_was_sent_and_statistics_are_left_alone(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.prometheus = False
        async with stage.attached() as bench:
            bench.engine.submit([bench.request(prompt_of(20, letter), 400) for letter in range(6)])
            await eventually(lambda: bool(bench.recorder.outputs), "they run")
            load = bench.engine.load()
            assert (load.num_running, load.num_waiting) == (4, 2)
            await asyncio.sleep(1.2)
            assert not stage.double.metrics_read
            assert not bench.engine.paused

    play(scenario)


def test_its_sizes_are_its_own_unless_the_operator_says_otherwise(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached(max_num_seqs=64, block_size=128) as bench:
            assert (bench.info.max_num_seqs, bench.info.card.block_size, bench.info.kv_blocks) == (4, 16, 48)
        async with stage.attached(max_num_seqs=2) as bench:
            assert bench.info.max_num_seqs == 2

    play(scenario)


@pytest.mark.parametrize(("version", "warned"), [("1.4.0rc4", False), ("1.1.0", True), ("", True)])
def test_a_release_that_it_was_not_written_for_is_attached_with_a_warning(
    version: str, warned: bool, play: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.version = version
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(20)))

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert ("written for 1.3 and later" in caplog.text) is warned


# ---- adapters


def test_requests_for_an_adapter_need_no_salt_of_ours(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached(attach_adapters=("tuned=/adapters/tuned",)) as bench:
            card = bench.info.card
            assert (card.adapters, card.served_names) == (["tuned"], ["double", "tuned"])
            own = namespace(card.fingerprint, card.kv_layout, adapter="tuned")
            await bench.run(bench.request(prompt_of(20), adapter="tuned", namespace=own))
            assert stage.double.bodies[-1]["lora_request"]["lora_name"] == "tuned"
            tenants = namespace(card.fingerprint, card.kv_layout, adapter="tuned", salt="tenant")
            bench.engine.submit([bench.request(prompt_of(20), adapter="tuned", namespace=tenants)])
            await eventually(lambda: bench.recorder.ended(2), "it is refused")
            assert bench.recorder.error(2).param == "cache_salt"

    play(scenario)


def test_blocks_of_an_adapter_are_not_taken_for_the_models_own(play: Callable[[Scenario], None]) -> None:
    """Events name no adapters."""

    async def scenario(stage: Stage) -> None:
        async with stage.attached(attach_adapters=("tuned=/adapters/tuned",)) as bench:
            card, prompt = bench.info.card, prompt_of(100)
            tuned, own = (namespace(card.fingerprint, card.kv_layout, adapter=name) for name in ("tuned", ""))
            ids = {key: chain_block_ids(key, array("I", prompt).tobytes(), card.block_size) for key in (tuned, own)}
            resident = bench.recorder.resident
            await bench.run(bench.request(prompt, 1, adapter="tuned", namespace=tuned))
            await eventually(lambda: all(one in resident for one in split_block_ids(ids[tuned])), "it is told of")
            assert len(resident) == 6
            await bench.run(bench.request(prompt, 1))
            await eventually(lambda: all(one in resident for one in split_block_ids(ids[own])), "it is told of")
            assert len(resident) == 12
            assert [bench.recorder.outputs[stream][0].num_cached_tokens for stream in (1, 2)] == [0, 0]
            owners = bench.engine._owners
            await eventually(lambda: [stream for _, stream in owners._ended] == [1, 2], "nor remembered for ever")

    play(scenario)


@pytest.mark.parametrize("words", [("tuned",), ("=x",), ("a=x", "a=y")])
def test_adapters_that_make_no_sense_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="NAME=FOLDER"):
        AttachedEngine(msgspec.structs.replace(SIZES, attach=("http://127.0.0.1:1",), attach_adapters=words))


# ---- answers


def reader(num_logprobs: int | None = None) -> TrtllmReader:
    return TrtllmReader(1, num_logprobs, Words({"a": 1, "b": 2, "c": 3}, frozenset([0])))


def chunk(**choice: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": "", **choice}], "usage": None}).encode()


def test_stop_tokens_are_taken_off_with_their_log_probabilities() -> None:
    logprobs = {"tokens": ["a", "?"], "token_logprobs": [-0.5, -0.1], "top_logprobs": [{"a": -0.5}, {"?": -0.1}]}
    output = reader(1).read(chunk(token_ids=[1, 9], finish_reason="stop", stop_reason=9, logprobs=logprobs))
    assert output is not None
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([1], "stop", 9)
    assert [one.logprob for one in output.logprobs or []] == [-0.5]
    ended = reader().read(chunk(token_ids=[1, 0], finish_reason="stop", stop_reason=None))
    assert ended is not None
    assert (ended.token_ids, ended.stop_token_id) == ([1], 0), "the model's own end token"
    kept = reader().read(chunk(token_ids=[1, 2], finish_reason="stop", stop_reason=None))
    assert kept is not None
    assert (kept.token_ids, kept.stop_token_id) == ([1, 2], None), "the server has left it out itself"


def test_tokens_are_known_by_their_text_and_those_that_share_one_are_left_out() -> None:
    top = {"a": -0.2, "\ufffd": -0.9, "b": -1.5, "c": -3.0}
    logprobs = {"tokens": ["c"], "token_logprobs": [-3.0], "top_logprobs": [top]}
    output = reader(3).read(chunk(token_ids=[77], logprobs=logprobs))
    assert output is not None
    (one,) = output.logprobs or []
    assert (one.logprob, one.rank) == (-3.0, 4)
    assert (one.top_ids, one.top_logprobs) == ([1, 2], [-0.2, -1.5])
    chosen = {"tokens": ["\ufffd"], "token_logprobs": [-0.9], "top_logprobs": [top]}
    output = reader(2).read(chunk(token_ids=[5], logprobs=chosen))
    assert output is not None
    (one,) = output.logprobs or []
    assert (one.rank, one.top_ids) == (2, [1, 5]), "the chosen token is known by its id"


def test_cached_tokens_are_told_with_the_first_tokens_only() -> None:
    reading = reader()
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    said = [
        reading.read(json.dumps({"choices": [{"token_ids": ids}], "usage": usage}).encode()) for ids in ([], [1], [2])
    ]
    assert [None if output is None else output.num_cached_tokens for output in said] == [None, 4, None]


@pytest.mark.parametrize(
    "event",
    [
        b"{",
        b'{"choices": [{"token_ids": "x"}]}',
        b'{"error": "KV cache is gone"}',
        chunk(token_ids=[1], finish_reason="timeout"),
        chunk(token_ids=[1], finish_reason="cancelled"),
    ],
)
def test_what_is_no_answer_lets_the_sequence_go_elsewhere(event: bytes) -> None:
    with pytest.raises(WorkerLost):
        reader().read(event)


def test_log_probabilities_that_are_missing_are_not_made_up() -> None:
    with pytest.raises(WorkerLost, match="log probabilities"):
        reader(2).read(chunk(token_ids=[1]))


def test_an_answer_without_an_end_is_lost(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.keeps_the_end = True
        async with stage.attached() as bench:
            bench.engine.submit([bench.request(prompt_of(20))])
            await eventually(lambda: bench.recorder.ended(1), "it ends")
            assert (bench.recorder.error(1).code, bench.recorder.error(1).retryable) == ("worker_lost", True)

    play(scenario)


# ---- its life, and its events


def test_an_abort_closes_the_connection(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            bench.engine.submit([bench.request(prompt_of(20, letter), 400) for letter in range(3)])
            await eventually(lambda: len(bench.recorder.outputs) == 3, "all run")
            bench.engine.abort([1, 2, 3])
            await eventually(lambda: stage.double.num_open == 0, "the server knows")

    play(scenario)


def test_a_server_that_is_started_anew_has_nothing_cached(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(40)))
            await eventually(lambda: len(bench.engine.resident_blocks()) > 0, "blocks are told of")
            await stage.double.close()
            await eventually(lambda: bench.engine.paused, "the engine knows")
            assert bench.engine.resident_blocks() == []
            await stage.double.start()
            await eventually(lambda: not bench.engine.paused, "it is back")
            await bench.run(bench.request(prompt_of(40)))
            assert bench.recorder.outputs[2][0].num_cached_tokens == 0
            await eventually(lambda: len(bench.engine.resident_blocks()) > 0, "blocks are told of again")
            assert bench.engine.resident_blocks() == bench.recorder.resident.snapshot()
            assert bench.recorder.failures == []

    play(scenario)


def test_a_drain_that_fails_forgets_what_it_may_have_lost(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(40)))
            await eventually(lambda: len(bench.engine.resident_blocks()) > 0, "blocks are told of")
            stage.double.events_status = 500
            await eventually(lambda: bench.engine.resident_blocks() == [], "they are forgotten")
            stage.double.events_status = None
            await bench.run(bench.request(prompt_of(40, 2)))
            await eventually(lambda: len(bench.engine.resident_blocks()) > 0, "later ones are learned")

    play(scenario)


def test_releases_that_want_another_method_for_events(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.events_method = "GET"
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(40)))
            await eventually(lambda: len(bench.engine.resident_blocks()) > 0, "blocks are told of")

    play(scenario)


def test_events_that_cannot_be_read_are_said_once(
    play: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.events_status = 500
        async with stage.attached() as bench:
            for letter in range(4):
                await bench.run(bench.request(prompt_of(40, letter)))
            await eventually(lambda: stage.double.drained > 3, "it is tried again")

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert caplog.text.count("cannot be read") == 1


def test_two_workers_at_one_server_do_not_take_each_others_events(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as first, stage.attached() as second:
            for letter in range(4):
                await second.run(second.request(prompt_of(40, letter)))
            await eventually(lambda: len(first.engine.resident_blocks()) == 4, "one hears of all")
            assert second.engine.resident_blocks() == []
            assert second.recorder.outputs[1][0].num_cached_tokens == 0, "both serve"

    play(scenario)


def test_events_that_a_server_publishes_are_not_drained(play: Callable[[Scenario], None], tmp_path: Path) -> None:
    """Newer releases publish what vLLM publishes; where, the operator says."""

    async def scenario(stage: Stage) -> None:
        with Publisher(tmp_path) as publisher:
            async with stage.attached(attach_kv_events=(publisher.address.endpoint,)) as bench:
                stored = {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "medium": "GPU"}
                stored |= {"token_ids": list(range(16)), "block_size": 16, "lora_id": None}
                await asyncio.sleep(0.05)
                publisher.publish([stored])
                await eventually(lambda: len(bench.engine.resident_blocks()) == 1, "it is heard")
                await bench.run(bench.request(prompt_of(40)))
                assert not stage.double.drained

    play(scenario)


def test_each_attached_server_has_its_own_place_for_events() -> None:
    both = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    config = msgspec.structs.replace(SIZES, attach=both, attach_kv_events=("tcp://127.0.0.1:5557",))
    AttachedEngine(config, Placement(0, 2))
    with pytest.raises(ConfigError, match="none for attached server 2"):
        AttachedEngine(config, Placement(1, 2))


def test_a_server_without_events_is_served_all_the_same(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.executor._sends_events = False
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(40)))
            await bench.run(bench.request(prompt_of(40)))
            assert bench.recorder.outputs[2][0].num_cached_tokens == 32, "the server itself says what it found"
            assert bench.engine.resident_blocks() == []

    play(scenario)
