"""What SGLang is told and what it says, word by word: arguments, chunks, settings, and where it publishes."""

import re
from array import array
from typing import Any

import msgspec
import pytest

from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.sglang_wire.answers import Chunk, SglangReader, gave_up
from headwater.engines.sglang_wire.arguments import generate_arguments
from headwater.engines.sglang_wire.events import feeds_of
from headwater.engines.sglang_wire.settings import SglangSettings
from headwater.errors import (
    ContextTooLong,
    HandoffFailed,
    HeadwaterError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from headwater.protocol.request import EngineRequest, Pairing, SamplingParams, StructuredSpec
from sglang_double import GenerateBody

PLAIN = SglangSettings(max_model_len=512)


def asked(request: EngineRequest, settings: SglangSettings = PLAIN, salt: str | None = None) -> GenerateBody:
    """As the strict server reads it."""
    tokens = array("I", request.prompt + request.resumed_tokens)
    body = generate_arguments(request, tokens, salt, settings)
    return msgspec.json.decode(msgspec.json.encode(body), type=GenerateBody)


def wanting(length: int = 10, **fields: Any) -> EngineRequest:
    own = {name: fields.pop(name) for name in list(fields) if name in EngineRequest.__struct_fields__}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | fields)
    return EngineRequest(7, "r", "m", array("I", range(length)).tobytes(), sampling, **own)


# ---- arguments


def test_every_sampling_field_has_a_place() -> None:
    request = wanting(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={5: -1.0},
        seed=3,
        min_tokens=4,
        stop_token_ids=[99],
        ignore_eos=True,
        logprobs=2,
        adapter="tuned",
        resumed_tokens=array("I", [7, 8]).tobytes(),
    )
    body = asked(request, salt="hw:ab")
    params = body.sampling_params
    assert body.input_ids == [*range(10), 7, 8]
    assert (params.max_new_tokens, params.min_new_tokens) == (6, 2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, 0.3, 1.1)
    assert (params.logit_bias, params.stop_token_ids, params.ignore_eos) == ({"5": -1.0}, [99], True)
    assert params.sampling_seed == 3, "SGLang draws by seed and position, which go on where they were"
    assert (body.return_logprob, body.top_logprobs_num, body.logprob_start_len) == (True, 2, -1)
    assert (body.lora_path, body.cache_salt, body.extra_key) == ("tuned", "hw:ab", "hw:ab")
    assert (body.stream, params.n, body.priority, body.bootstrap_room) == (True, 1, None, None)
    covered = {"max_tokens", "structured", "seed_drawn"} | {
        name
        for name in SamplingParams.__struct_fields__
        if getattr(request.sampling, name) != getattr(SamplingParams(), name)
    }
    assert covered == set(SamplingParams.__struct_fields__), "a field was added: say what becomes of it"


def test_what_is_not_asked_for_is_not_said() -> None:
    body = msgspec.to_builtins(generate_arguments(wanting(), [1, 2], None, PLAIN))
    assert set(body) == {"input_ids", "sampling_params", "stream"}
    assert body["sampling_params"]["top_k"] == -1
    assert not set(body["sampling_params"]) & {"sampling_seed", "stop_token_ids", "logit_bias", "regex"}


def test_a_seed_that_nobody_gave_is_sent_where_all_would_draw_by_the_same_one() -> None:
    drawn = wanting(temperature=1.0, seed=9, seed_drawn=True)
    assert asked(drawn).sampling_params.sampling_seed is None
    exact = msgspec.structs.replace(PLAIN, enable_deterministic_inference=True)
    assert asked(drawn, exact).sampling_params.sampling_seed == 9
    large = wanting(temperature=1.0, seed=(1 << 64) - 1)
    assert asked(large).sampling_params.sampling_seed == (1 << 63) - 1


def test_lengths_end_at_the_context_which_sglang_would_refuse() -> None:
    assert asked(wanting(500, max_tokens=100, min_tokens=50)).sampling_params.max_new_tokens == 12
    assert asked(wanting(500, max_tokens=100, min_tokens=50)).sampling_params.min_new_tokens == 12
    assert asked(wanting(max_tokens=900), SglangSettings()).sampling_params.max_new_tokens == 900


def test_priorities_are_sent_where_they_are_obeyed_and_turned_where_low_ones_come_first() -> None:
    request = wanting(priority=4)
    assert asked(request).priority is None
    obeyed = msgspec.structs.replace(PLAIN, enable_priority_scheduling=True)
    assert asked(request, obeyed).priority == 4
    turned = msgspec.structs.replace(obeyed, schedule_low_priority_values_first=True)
    assert asked(request, turned).priority == -4


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        (StructuredSpec("json_object"), "json_schema", '{"type": "object"}'),
        (StructuredSpec("json_schema", '{"type":"integer"}'), "json_schema", '{"type":"integer"}'),
        (StructuredSpec("regex", "(ab){3}"), "regex", "(ab){3}"),
        (StructuredSpec("grammar", 'root ::= "a"'), "ebnf", 'root ::= "a"'),
    ],
)
def test_structured_output_in_its_words(spec: StructuredSpec, field: str, value: str) -> None:
    params = asked(wanting(structured=spec, ignore_eos=True)).sampling_params
    assert getattr(params, field) == value
    assert not params.ignore_eos, "a complete document ends the output"


def test_choices_become_an_expression_that_takes_them_literally() -> None:
    choices = ["yes", "a.b|c", "1+1 (two)", "[x]^$*?{}\\", "naïve\n"]
    spec = StructuredSpec("choice", msgspec.json.encode(choices).decode())
    pattern = asked(wanting(structured=spec)).sampling_params.regex or ""
    assert all(re.fullmatch(pattern, choice) for choice in choices)
    assert not any(re.fullmatch(pattern, other) for other in ("axb|c", "yes ", "a.b", "11 (two)", ""))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 2.5}, "repetition_penalty"),
        ({"structured": StructuredSpec("json_object", param="x"), "resumed_tokens": bytes(4)}, "x"),
    ],
)
def test_what_sglang_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(wanting(**fields))
    assert caught.value.param == param


def test_an_answer_that_is_complete_is_not_begun() -> None:
    with pytest.raises(InvalidRequest, match="2 tokens are there already of 2"):
        asked(wanting(max_tokens=2, resumed_tokens=bytes(8)))


def test_both_of_a_pair_are_told_the_room_and_half_a_pair_is_refused() -> None:
    decode = msgspec.structs.replace(PLAIN, disaggregation_mode="decode")
    prefill = msgspec.structs.replace(PLAIN, disaggregation_mode="prefill")
    request = wanting(pairing=Pairing("10.0.0.1", 8998, 1 << 62, "fe"))
    for settings in (decode, prefill):
        body = asked(request, settings)
        assert (body.bootstrap_host, body.bootstrap_port, body.bootstrap_room) == ("10.0.0.1", 8998, 1 << 62)
    assert asked(request).bootstrap_room is None
    with pytest.raises(HandoffFailed, match="only decodes") as half:
        asked(wanting(), decode)
    assert half.value.retryable
    with pytest.raises(Unavailable, match="only prefills"):
        asked(wanting(), prefill)


# ---- answers


def chunk(ids: list[int], finish: dict[str, Any] | None = None, **meta: Any) -> Chunk:
    return msgspec.convert(
        {"text": "x", "output_ids": ids, "meta_info": {"id": "r", "finish_reason": finish} | meta}, Chunk
    )


def reader(*, incremental: bool = False, **fields: Any) -> SglangReader:
    return SglangReader(wanting(**fields), incremental=incremental)


LENGTH = {"type": "length", "length": 3}


@pytest.mark.parametrize("incremental", [False, True])
def test_what_is_new_in_each_chunk(incremental: bool) -> None:
    one = reader(incremental=incremental)
    chunks = [[5], [6, 7], [8]] if incremental else [[5], [5, 6, 7], [5, 6, 7, 8]]
    outputs = [one.read(chunk(chunks[0], cached_tokens=32)), one.read(chunk(chunks[1], cached_tokens=32))]
    last = one.read(chunk(chunks[2], LENGTH))
    assert [output.token_ids for output in outputs if output] == [[5], [6, 7]]
    assert last is not None
    assert (last.token_ids, last.finish_reason, last.stop_token_id) == ([8], "length", None)
    assert [output.num_cached_tokens for output in (*outputs, last) if output] == [32, None, None]
    assert not one.left


def test_a_chunk_that_brings_nothing_says_nothing() -> None:
    one = reader()
    assert one.read(chunk([])) is None
    assert one.read(chunk([5])) is not None
    assert one.read(chunk([5])) is None


def test_the_stop_token_is_no_output() -> None:
    one = reader(logprobs=1)
    values = [[-0.1, 5, None], [-0.2, 9, None]]
    tops = [[[-0.1, 5, None]], [[-0.05, 3, None]]]
    output = one.read(
        chunk([5, 9], {"type": "stop", "matched": 9}, output_token_logprobs=values, output_top_logprobs=tops)
    )
    assert output is not None
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([5], "stop", 9)
    assert output.logprobs is not None
    (told,) = output.logprobs
    assert (told.logprob, told.rank, told.top_ids, told.top_logprobs) == (-0.1, 1, [5], [-0.1])


def test_stop_tokens_are_looked_for_here_where_the_end_is_to_be_ignored() -> None:
    one = reader(ignore_eos=True, stop_token_ids=[9], min_tokens=2)
    first = one.read(chunk([9, 5]))
    assert first is not None
    assert (first.token_ids, first.finish_reason) == ([9, 5], None), "the least comes first"
    output = one.read(chunk([9, 5, 6, 9, 7]))
    assert output is not None
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([6], "stop", 9)
    assert one.left


def test_log_probabilities_of_cumulative_chunks_are_told_once() -> None:
    one = reader(logprobs=0)
    told = [[-0.5, 5, None], [None, 6, None], [-0.25, 7, None]]
    outputs = [one.read(chunk([5, 6, 7][:end], output_token_logprobs=told[:end])) for end in (1, 2, 3)]
    assert [output.logprobs[0].logprob for output in outputs if output and output.logprobs] == [-0.5, 0.0, -0.25]
    assert [len(output.logprobs or []) for output in outputs if output] == [1, 1, 1]


def aborted(message: str, status: int | None = None) -> dict[str, Any]:
    return {"meta_info": {"finish_reason": {"type": "abort", "message": message, "status_code": status}}}


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"error": {"message": "top_k must be -1", "code": 400}}, InvalidRequest),
        ({"error": "unknown field `x`"}, InvalidRequest),
        ({"error": {"message": "is longer than the model's context length (5 tokens).", "code": 400}}, ContextTooLong),
        ({"error": {"message": "no"}}, WorkerLost),
        (aborted("full", 503), Overloaded),
        (aborted("bad", 400), InvalidRequest),
        (aborted("KVTransferError", 500), WorkerLost),
        (aborted("Aborted"), WorkerLost),
        ({"output_ids": [5], "meta_info": {"finish_reason": {"type": "stop", "matched": "NaN happened"}}}, WorkerLost),
        ({"output_ids": [5], "meta_info": {"finish_reason": {"type": "moon"}}}, WorkerLost),
    ],
)
def test_failures_in_our_terms(event: dict[str, Any], kind: type[HeadwaterError]) -> None:
    with pytest.raises(HeadwaterError) as caught:
        reader().read(msgspec.convert(event, Chunk))
    assert type(caught.value) is kind


def test_missing_log_probabilities_are_a_failure() -> None:
    with pytest.raises(WorkerLost, match="0 log probabilities of 1"):
        reader(logprobs=1).read(chunk([5]))


def test_a_status_says_whether_another_worker_may_try() -> None:
    assert gave_up(429, "x").retryable
    assert gave_up(None, "x").retryable
    assert not gave_up(422, "x").retryable


# ---- settings and events

KV = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "block_size": 64,
    "dp_size": 2,
}


def test_one_feed_per_rank_where_the_server_is() -> None:
    settings = SglangSettings.read({"page_size": 64, "kv_events": KV | {"replay_endpoint_port_base": 5600}}, 512)
    assert feeds_of(settings, "gpu-1") == [
        FeedAddress("tcp://gpu-1:5557", "kv", "tcp://gpu-1:5600"),
        FeedAddress("tcp://gpu-1:5558", "kv", "tcp://gpu-1:5601"),
    ]
    dialling = SglangSettings.read({"kv_events": KV | {"endpoint_host": "10.0.0.9", "dp_size": 1}}, None)
    assert feeds_of(dialling, "gpu-1") == [FeedAddress("tcp://10.0.0.9:5557", "kv", None, dials=True)]


@pytest.mark.parametrize(
    "told",
    [
        None,
        KV | {"publisher": "null"},
        KV | {"endpoint_port_base": 0},
        KV | {"endpoint_port_base": "5557"},
        KV | {"dp_size": 0},
        KV | {"dp_size": 1 << 30},
        KV | {"endpoint_port_base": 65535},
        KV | {"block_size": 1},
    ],
)
def test_what_cannot_be_followed_is_not(told: dict[str, Any] | None) -> None:
    assert feeds_of(SglangSettings.read({"page_size": 64, "kv_events": told}, None), "gpu-1") == []


def test_pages_of_one_token_are_no_blocks() -> None:
    assert SglangSettings(page_size=1).block_size is None
    assert SglangSettings(page_size=16).block_size == 16
    assert SglangSettings(page_size=1, kv_events={"block_size": 64}).block_size == 64
    assert SglangSettings().block_size is None


def test_words_that_mean_something_else_are_noticed() -> None:
    with pytest.raises(msgspec.ValidationError, match="page_size"):
        SglangSettings.read({"page_size": "large"}, None)
