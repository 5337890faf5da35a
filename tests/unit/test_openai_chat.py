"""Chat completions over an in-memory worker: prompts in, answers whole and streamed, ends of every kind."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headwater.errors import Draining, ModelError, Overloaded, WorkerLost
from headwater.frontend.openai import answer
from headwater.frontend.openai.serving import ServedModel, build_model
from headwater.frontend.preprocess.tokenizer import unpack_ids
from headwater.kv.identity import chain_block_ids, namespace
from headwater.protocol.request import ErrorInfo, SamplingParams, StructuredSpec, TokenLogprobs
from headwater.weights import ResolvedModel
from openai_twin import Api, FakeResponder, demo_artifacts, demo_card, served_demo, token_ids

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools|tojson }} use <tool_call> tags{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def model(demo_model: ResolvedModel) -> ServedModel:
    return served_demo(demo_model)


@pytest.fixture(scope="module")
def tool_model(demo_model: ResolvedModel) -> ServedModel:
    artifacts = demo_artifacts(demo_model) | {"chat_template.jinja": TOOL_TEMPLATE.encode()}
    return build_model(demo_card(demo_model), artifacts, tokenizer_backend="tokenizers")


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": USER, **fields}


def play(
    model: ServedModel, body: dict[str, Any], script: Callable[[Api], None], **config: Any
) -> tuple[Api, FakeResponder]:
    """Post a request, let the script play the worker."""

    async def run() -> tuple[Api, FakeResponder]:
        api = Api(model, **config)
        responder = await api.post(PATH, body)
        assert not responder.status, responder.body
        script(api)
        return api, responder

    return asyncio.run(run())


def say(text: str, *, finish: str | None = "stop", each: int = 1, stream: int = 1) -> Callable[[Api], None]:
    """The worker generates a text, some tokens a step."""

    def script(api: Api) -> None:
        ids = token_ids(next(iter(api.models.values())), text)
        for start in range(0, len(ids), each):
            api.dispatcher.emit(stream, ids[start : start + each], num_cached_tokens=16 if start == 0 else None)
        if finish is not None:
            api.dispatcher.emit(stream, [], finish, stop_token_id=2 if finish == "stop" else None)

    return script


def sampling(model: ServedModel, **fields: Any) -> SamplingParams:
    api, _ = play(model, chat(**fields), lambda api: None)
    return api.dispatcher.requests[0].sampling


def test_what_is_sent_to_the_worker(model: ServedModel) -> None:
    api, _ = play(model, chat(messages=[{"role": "system", "content": "Be brief."}, *USER] * 8), lambda api: None)
    (request,) = api.dispatcher.requests
    assert api.prompt_text().startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    assert api.prompt_text().endswith("<|im_start|>assistant\n")
    key = namespace(model.card.fingerprint, model.card.kv_layout)
    assert request.namespace == key
    assert request.block_ids == chain_block_ids(key, request.prompt, 16)
    assert len(request.block_ids) > 16
    assert (request.model, request.request_id, request.priority) == ("demo", "req1", 0)
    assert request.sampling.max_tokens == 8192 - len(request.prompt) // 4
    assert request.deadline is None


def test_special_tokens_of_the_template_are_tokens_and_no_bos_is_added(model: ServedModel) -> None:
    api, _ = play(model, chat(), lambda api: None)
    ids = unpack_ids(api.dispatcher.requests[0].prompt)
    assert ids[0] == 1
    assert ids.count(1) == 3
    assert ids.count(2) == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 3, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 40, "min_p": 0.1}, {"temperature": 0, "top_p": 0.5, "top_k": 40}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 10**9}, {"top_k": 0}),
        ({"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2}, {"frequency_penalty": -1}),
        ({"logit_bias": {"5": -100, "7": 3}}, {"logit_bias": {5: -100, 7: 3}}),
        ({"seed": 42}, {"seed": 42}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        ({}, {"logprobs": None, "temperature": 1.0, "structured": None}),
        ({"stop_token_ids": [5], "ignore_eos": True, "min_tokens": 3}, {"stop_token_ids": [5], "ignore_eos": True}),
        ({"response_format": {"type": "text"}}, {"structured": None}),
        ({"response_format": {"type": "json_object"}}, {"structured": StructuredSpec("json_object")}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            {"structured": StructuredSpec("json_schema", '{"type":"object"}', "response_format.json_schema.schema")},
        ),
        (
            {"guided_json": {"type": "null"}},
            {"structured": StructuredSpec("json_schema", '{"type":"null"}', "guided_json")},
        ),
        (
            {"guided_json": '{"type": "null"}'},
            {"structured": StructuredSpec("json_schema", '{"type": "null"}', "guided_json")},
        ),
        ({"guided_regex": "a+"}, {"structured": StructuredSpec("regex", "a+", "guided_regex")}),
        ({"guided_choice": ["a", "b"]}, {"structured": StructuredSpec("choice", '["a","b"]', "guided_choice")}),
        ({"guided_grammar": "start: A"}, {"structured": StructuredSpec("grammar", "start: A", "guided_grammar")}),
        (
            {"structured_outputs": {"regex": "a"}},
            {"structured": StructuredSpec("regex", "a", "structured_outputs.regex")},
        ),
        (
            {"structured_outputs": {"json_object": True}},
            {"structured": StructuredSpec("json_object", "", "structured_outputs.json_object")},
        ),
        ({"nvext": {"greed_sampling": True}, "temperature": 0.9}, {"temperature": 0}),
    ],
)
def test_sampling(model: ServedModel, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    params = sampling(model, **fields)
    assert {name: getattr(params, name) for name in expected} == expected


def test_defaults_of_the_model_apply_where_the_request_is_silent(demo_model: ResolvedModel) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "repetition_penalty": 1.1}
    card = msgspec.structs.replace(demo_card(demo_model), default_sampling=defaults)
    served = build_model(card, demo_artifacts(demo_model), tokenizer_backend="tokenizers")
    params = sampling(served, top_p=0.5)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.5, 20, 1.1)


def test_without_a_seed_draws_differ(model: ServedModel) -> None:
    assert sampling(model).seed != sampling(model).seed


def test_choices_differ_by_their_seed_and_share_the_rest(model: ServedModel) -> None:
    api, _ = play(model, chat(n=3, seed=7), lambda api: None)
    requests = api.dispatcher.requests
    assert [request.sampling.seed for request in requests] == [7, 8, 9]
    assert len({(request.prompt, request.block_ids) for request in requests}) == 1


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({"priority": 5}, -5),
        ({"nvext": {"agent_hints": {"priority": 5, "osl": 512, "latency_sensitivity": 1.0}}}, 5),
        ({"priority": 5, "nvext": {"agent_hints": {"priority": 7}}}, 7),
    ],
)
def test_priority_counts_upwards(model: ServedModel, fields: dict[str, Any], priority: int) -> None:
    api, _ = play(model, chat(**fields), lambda api: None)
    assert api.dispatcher.requests[0].priority == priority


def test_salts_keep_blocks_apart(model: ServedModel) -> None:
    def blocks(**fields: Any) -> bytes:
        api, _ = play(model, chat(**fields), lambda api: None)
        return api.dispatcher.requests[0].block_ids

    salted = blocks(cache_salt="a")
    assert salted == blocks(nvext={"cache_salt": "a"}, cache_salt="b")
    assert len({salted, blocks(), blocks(cache_salt="b")}) == 3


@pytest.mark.parametrize("each", [1, 2, 7])
def test_a_stream(model: ServedModel, each: int) -> None:
    text = 'Größe "quoted"\n\t\\ 🙂👍🏽 你好 end'
    _, responder = play(model, chat(stream=True), say(text, each=each))
    assert responder.status == 200
    assert dict(responder.headers)[b"content-type"].startswith(b"text/event-stream")
    events = responder.events()
    assert events[-1] == "[DONE]"
    assert responder.finished
    chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in events[:-1]]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert responder.text() == text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-req1"}
    assert {chunk.model for chunk in chunks} == {"demo"}
    assert all("usage" not in event for event in events[:-1])


def test_the_first_token_leaves_with_the_role_in_one_write(model: ServedModel) -> None:
    _, responder = play(model, chat(stream=True), say("Hello there you", finish=None))
    assert len(responder.writes) == 3
    assert responder.writes[0].count(b"data: ") == 2
    assert all(write.count(b"data: ") == 1 for write in responder.writes[1:])


def test_a_whole_answer(model: ServedModel) -> None:
    api, responder = play(model, chat(model="org/demo"), say('Hi "you" 🙂', each=3))
    answer = ChatCompletion.model_validate(responder.json(), strict=True)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ('Hi "you" 🙂', "stop")
    assert answer.model == "org/demo"
    assert answer.usage is not None
    num_prompt = len(api.dispatcher.requests[0].prompt) // 4
    num_tokens = len(token_ids(model, 'Hi "you" 🙂')) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_tokens)
    assert answer.usage.total_tokens == num_prompt + num_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer.system_fingerprint == f"fp_{model.card.fingerprint[:12]}"


def test_length_is_a_finish_reason(model: ServedModel) -> None:
    _, responder = play(model, chat(), say("too long", finish="length"))
    assert responder.json()["choices"][0]["finish_reason"] == "length"


def test_usage_at_the_end_of_a_stream(model: ServedModel) -> None:
    _, responder = play(model, chat(stream=True, stream_options={"include_usage": True}), say("one two"))
    *events, last, done = responder.events()
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in events)


def test_usage_in_every_event(model: ServedModel) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, responder = play(model, chat(stream=True, stream_options=options), say("one two three"))
    counts = [event["usage"]["completion_tokens"] for event in responder.events()[1:-1]]
    assert counts == [1, 2, 3, 4, 4]


def test_choices_of_one_stream_are_multiplexed(model: ServedModel) -> None:
    def script(api: Api) -> None:
        for word in (" a", " b", " c"):
            for stream in (1, 2, 3):
                api.dispatcher.emit(stream, token_ids(model, word + str(stream)))
        for stream in (2, 3, 1):
            api.dispatcher.emit(stream, [], "stop", stop_token_id=2)

    api, responder = play(model, chat(stream=True, n=3, stream_options={"include_usage": True}), script)
    for choice in range(3):
        number = choice + 1
        assert responder.text(choice) == f" a{number} b{number} c{number}"
    usage = responder.events()[-2]["usage"]
    assert usage["prompt_tokens"] == len(api.dispatcher.requests[0].prompt) // 4, "the prompt counts once"
    assert usage["completion_tokens"] == 3 * 7
    ends = [e["choices"][0]["index"] for e in responder.events()[:-2] if e["choices"][0]["finish_reason"]]
    assert ends == [1, 2, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_over_token_borders_aborts_the_worker(model: ServedModel, stream: bool) -> None:
    api, responder = play(
        model, chat(stop=["\n\nUser:", "###"], stream=stream), say("Fine.\n\nUser: more", finish=None)
    )
    assert api.dispatcher.aborted == [1]
    if stream:
        assert responder.text() == "Fine."
        last = responder.events()[-2]["choices"][0]
    else:
        last = responder.json()["choices"][0]
        assert last["message"]["content"] == "Fine."
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "\n\nUser:")


def test_stop_string_in_one_choice_leaves_the_others_running(model: ServedModel) -> None:
    def script(api: Api) -> None:
        api.dispatcher.emit(1, token_ids(model, "one END two"))
        api.dispatcher.emit(2, token_ids(model, "still going"))
        assert api.dispatcher.aborted == [1]
        api.dispatcher.emit(2, token_ids(model, " on"), "length")

    _, responder = play(model, chat(stop="END", n=2), script)
    first, second = responder.json()["choices"]
    assert (first["message"]["content"], first["finish_reason"]) == ("one ", "stop")
    assert (second["message"]["content"], second["finish_reason"]) == ("still going on", "length")


def test_stop_string_included(model: ServedModel) -> None:
    _, responder = play(model, chat(stop="END", include_stop_str_in_output=True), say("one END two", finish=None))
    assert responder.json()["choices"][0]["message"]["content"] == "one END"


def test_special_tokens_shown_on_request(model: ServedModel) -> None:
    def script(api: Api) -> None:
        api.dispatcher.emit(1, [1, *token_ids(model, "x"), 2], "length")

    _, hidden = play(model, chat(stream=True), script)
    _, shown = play(model, chat(stream=True, skip_special_tokens=False), script)
    assert (hidden.text(), shown.text()) == ("x", "<|im_start|>x<|im_end|>")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_stay_with_their_tokens(model: ServedModel, stream: bool) -> None:
    ids = token_ids(model, "Hi 🜲!")

    def script(api: Api) -> None:
        for number, token_id in enumerate(ids):
            entry = TokenLogprobs(-float(number), 1, [token_id, 5], [-float(number), float("-inf")])
            api.dispatcher.emit(1, [token_id], logprobs=[entry])
        api.dispatcher.emit(1, [], "stop", stop_token_id=2)

    _, responder = play(model, chat(logprobs=True, top_logprobs=2, stream=stream), script)
    if stream:
        content = [
            entry
            for event in responder.events()[:-1]
            if event["choices"][0]["logprobs"] is not None
            for entry in event["choices"][0]["logprobs"]["content"]
        ]
        for event in responder.events()[:-1]:
            ChatCompletionChunk.model_validate(event, strict=True)
    else:
        answer = ChatCompletion.model_validate(responder.json(), strict=True)
        assert answer.choices[0].logprobs is not None
        content = responder.json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-float(number) for number in range(len(ids))]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "Hi 🜲!"
    assert content[0]["token"] == "Hi"
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_logprobs_without_alternatives(model: ServedModel) -> None:
    def script(api: Api) -> None:
        api.dispatcher.emit(1, token_ids(model, "Hi"), "length", logprobs=[TokenLogprobs(-0.5, 3)])

    _, responder = play(model, chat(logprobs=True, return_tokens_as_token_ids=True), script)
    (entry,) = responder.json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["top_logprobs"]) == (f"token_id:{token_ids(model, 'Hi')[0]}", [])


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(model: ServedModel, stream: bool) -> None:
    api, responder = play(model, chat(return_token_ids=True, stream=stream), say("one 🜲 two"))
    prompt = unpack_ids(api.dispatcher.requests[0].prompt)
    if stream:
        events = responder.events()[:-1]
        assert events[0]["prompt_token_ids"] == prompt
        got = [token_id for event in events for token_id in event["choices"][0].get("token_ids", [])]
    else:
        assert responder.json()["prompt_token_ids"] == prompt
        got = responder.json()["choices"][0]["token_ids"]
    assert got == token_ids(model, "one 🜲 two")


def test_nvext_is_answered(model: ServedModel) -> None:
    asked = {"extra_fields": ["worker_id", "timing", "unheard_of"], "annotations": ["formatted_prompt", "token_ids"]}
    api, responder = play(model, chat(stream=True, nvext=asked), say("one two"))
    events = responder.events()[:-1]
    workers = [event["nvext"]["worker_id"]["decode_worker_id"] for event in events[1:]]
    assert set(workers) == {"worker-1"}
    timing = events[-1]["nvext"]["timing"]
    assert 0 <= timing["ttft_ms"] <= timing["total_time_ms"]
    assert timing["kv_hit_rate"] == pytest.approx(16 / (len(api.dispatcher.requests[0].prompt) // 4))
    head = responder.body.decode().split("data: ")[0]
    assert "event: formatted_prompt\n: " in head
    assert json.loads(head.split("event: token_ids\n: ")[1]) == unpack_ids(api.dispatcher.requests[0].prompt)


def test_warnings_on_request(model: ServedModel) -> None:
    _, responder = play(model, chat(nvext={"extra_fields": ["warnings"]}, max_token=5, user="x"), say("x"))
    assert responder.json()["nvext"] == {"warnings": ['unknown field "max_token"; did you mean max_tokens?']}


def test_nvext_of_a_whole_answer(model: ServedModel) -> None:
    _, responder = play(model, chat(nvext={"extra_fields": ["timing"]}), say("x"))
    assert list(responder.json()["nvext"]) == ["timing"]


# -- ends that are not the model's --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_byte_is_a_status(model: ServedModel, stream: bool) -> None:
    def script(api: Api) -> None:
        api.dispatcher.fail(1, Overloaded("32 waiting", retry_after_s=3.2))

    api, responder = play(model, chat(stream=stream, n=2), script)
    assert (responder.status, responder.streaming) == (503, False)
    assert responder.error["code"] == "overloaded"
    assert dict(responder.headers)[b"retry-after"] == b"4"
    assert api.dispatcher.aborted == [2], "the other choice is stopped"


def test_an_error_after_the_first_byte_is_an_event(model: ServedModel) -> None:
    def script(api: Api) -> None:
        say("one two", finish=None)(api)
        api.dispatcher.fail(1, WorkerLost("the worker died"))

    _, responder = play(model, chat(stream=True), script)
    *_, error, done = responder.events()
    assert (error["error"]["code"], error["error"]["message"]) == ("worker_lost", "the worker died")
    assert done == "[DONE]"
    assert (responder.status, responder.finished) == (200, True)
    assert responder.body.decode().count("[DONE]") == 1


def test_a_failed_output_is_an_error(model: ServedModel) -> None:
    def script(api: Api) -> None:
        api.dispatcher.emit(1, [], "error", error=ErrorInfo("engine_failed", "out of memory", 502))

    _, responder = play(model, chat(), script)
    assert (responder.status, responder.error["code"]) == (502, "engine_failed")


def test_a_worker_that_refuses_a_prompt_refuses_the_messages(model: ServedModel) -> None:
    def script(api: Api) -> None:
        refusal = ErrorInfo("context_length_exceeded", "the prompt has 9 tokens", 400, param="prompt")
        api.dispatcher.emit(1, [], "error", error=refusal)

    _, responder = play(model, chat(), script)
    assert (responder.status, responder.error["param"]) == (400, "messages")


def test_an_aborted_output_is_an_error(model: ServedModel) -> None:
    _, responder = play(model, chat(), lambda api: api.dispatcher.emit(1, [5], "abort"))
    assert (responder.status, responder.error["code"]) == (502, "worker_error")


def test_a_token_out_of_the_vocabulary_is_an_error(model: ServedModel) -> None:
    for stream in (False, True):
        _, responder = play(model, chat(stream=stream), lambda api: api.dispatcher.emit(1, [10**6]))
        assert (responder.status, responder.error["code"]) == (502, "protocol_error")


def test_a_submission_that_is_refused(model: ServedModel) -> None:
    async def run() -> FakeResponder:
        api = Api(model)
        api.dispatcher.refusal = Draining("shutting down")
        return await api.post(PATH, chat(stream=True))

    responder = asyncio.run(run())
    assert (responder.status, responder.error["code"]) == (503, "draining")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
def test_a_client_that_leaves_stops_all_choices_at_once(model: ServedModel, stream: bool, tokens: int) -> None:
    async def run() -> None:
        api = Api(model)
        responder = await api.post(PATH, chat(stream=stream, n=3))
        for _ in range(tokens):
            api.dispatcher.emit(2, token_ids(model, " x"))
        said = responder.body
        responder.disconnect()
        assert api.dispatcher.aborted == [1, 2, 3]
        api.dispatcher.emit(2, token_ids(model, " y"))
        assert responder.body == said

    asyncio.run(run())


def test_a_client_that_was_gone_before_submission_is_noticed(model: ServedModel) -> None:
    async def run() -> Api:
        api = Api(model)
        api.dispatcher.on_submit = lambda: None
        responder = FakeResponder(disconnected=True)
        await api.post(PATH, chat(stream=True), responder)
        return api

    assert asyncio.run(run()).dispatcher.aborted == [1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(model: ServedModel, stream: bool) -> None:
    async def run() -> tuple[Api, FakeResponder]:
        api = Api(model, request_timeout=0.05)
        responder = await api.post(PATH, chat(stream=stream))
        assert api.dispatcher.requests[0].deadline is not None
        await _until(lambda: responder.finished)
        return api, responder

    api, responder = asyncio.run(run())
    assert (responder.status, responder.error["code"]) == (504, "deadline_exceeded")
    assert "limit of 0.05 s" in responder.error["message"]
    assert api.dispatcher.aborted == [1]


def test_a_long_wait_is_kept_alive_with_comments(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "KEEPALIVE_S", 0.02)

    async def run() -> FakeResponder:
        api = Api(model)
        responder = await api.post(PATH, chat(stream=True))
        assert not responder.status, "no status before there is something to say"
        await _until(lambda: len(responder.writes) >= 2)
        silent = len(responder.writes)
        for _ in range(40):
            say(" x", finish=None)(api)
            await asyncio.sleep(0.002)
        assert b"keep-alive" not in b"".join(responder.writes[silent + 1 :]), "not while tokens flow"
        say(" x")(api)
        count = len(responder.writes)
        await asyncio.sleep(0.06)
        assert len(responder.writes) == count, "nothing after the end"
        return responder

    responder = asyncio.run(run())
    assert responder.body.startswith(b": keep-alive\n\n: keep-alive\n\n")
    assert responder.text() == " x" * 41


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited in vain")


# -- messages, templates and tools --------------------------------------------------------------------------------


def prompt_of(model: ServedModel, **fields: Any) -> str:
    api, _ = play(model, chat(**fields), lambda api: None)
    return api.prompt_text()


def test_text_parts_become_one_text(model: ServedModel) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in prompt_of(model, messages=[{"role": "user", "content": parts}])


def test_developer_is_system_for_templates_that_do_not_know_it(model: ServedModel) -> None:
    messages = [{"role": "developer", "content": "Rule."}, *USER]
    assert prompt_of(model, messages=messages).startswith("<|im_start|>system\nRule.")


def test_an_assistant_without_content_is_empty(model: ServedModel) -> None:
    messages = [*USER, {"role": "assistant", "content": None, "refusal": None}, *USER]
    assert "<|im_start|>assistant\n<|im_end|>" in prompt_of(model, messages=messages)


def test_the_final_message_can_be_continued(model: ServedModel) -> None:
    messages = [*USER, {"role": "assistant", "content": "To be"}]
    assert prompt_of(model, messages=messages, continue_final_message=True).endswith("assistant\nTo be")
    assert prompt_of(model, messages=messages, add_generation_prompt=False).endswith("To be<|im_end|>\n")


def test_template_variables(demo_model: ResolvedModel) -> None:
    source = "{{ style }} {{ reasoning_effort }} {{ documents[0].title }} {{ eos_token }} {{ messages[0].extra }}"
    artifacts = demo_artifacts(demo_model) | {"chat_template.jinja": source.encode()}
    served = build_model(demo_card(demo_model), artifacts, tokenizer_backend="tokenizers")
    text = prompt_of(
        served,
        messages=[{"role": "user", "content": "x", "extra": "E"}],
        chat_template_kwargs={"style": "S"},
        reasoning_effort="low",
        documents=[{"title": "D"}],
    )
    assert text == "S low D <|im_end|> E"


def test_a_model_without_a_template_has_no_chat(demo_model: ResolvedModel) -> None:
    artifacts = {"tokenizer.json": demo_model.tokenizer_json}
    served = build_model(demo_card(demo_model), artifacts, tokenizer_backend="tokenizers")
    responder = asyncio.run(Api(served).post(PATH, chat()))
    assert responder.status == 400
    assert "use /v1/completions" in responder.error["message"]


def test_tools_reach_the_template_and_calls_come_back(tool_model: ServedModel) -> None:
    text = 'Wait.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    api, responder = play(tool_model, chat(tools=[WEATHER]), say(text))
    assert json.dumps(WEATHER) in api.prompt_text()
    answer = ChatCompletion.model_validate(responder.json(), strict=True)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Köln"})


def test_parallel_calls_can_be_switched_off(tool_model: ServedModel) -> None:
    one = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    _, responder = play(tool_model, chat(tools=[WEATHER], parallel_tool_calls=False), say(one + "\n" + one))
    assert len(responder.json()["choices"][0]["message"]["tool_calls"]) == 1


def test_streamed_tool_calls(tool_model: ServedModel) -> None:
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    _, responder = play(tool_model, chat(tools=[WEATHER], stream=True), say(one + "\n" + one))
    calls: dict[int, dict[str, str]] = {}
    for event in responder.events()[:-1]:
        chunk = ChatCompletionChunk.model_validate(event, strict=True)
        for delta in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(delta.index, {"id": delta.id or "", "name": "", "arguments": ""})
            assert delta.function is not None
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
    assert [json.loads(call["arguments"]) for call in calls.values()] == [{"city": "Köln"}] * 2
    assert [call["name"] for call in calls.values()] == ["get_weather"] * 2
    assert len({call["id"] for call in calls.values()}) == 2
    assert responder.events()[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert responder.text() == ""


@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_choice_forces_a_call(tool_model: ServedModel, stream: bool) -> None:
    body = chat(tools=[WEATHER], tool_choice="required", stream=stream)
    api, responder = play(tool_model, body, say('{"name": "get_weather", "arguments": {"city": "x"}}'))
    structured = api.dispatcher.requests[0].sampling.structured
    assert structured is not None
    assert json.loads(structured.spec)["properties"]["name"] == {"const": "get_weather"}
    choice = (responder.events()[-2] if stream else responder.json())["choices"][0]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("others", "place"), [([], "#/properties/arguments"), ([WEATHER], "#/anyOf/0/properties/arguments")]
)
def test_references_in_parameters_lead_where_they_led(
    tool_model: ServedModel, others: list[dict[str, object]], place: str
) -> None:
    parameters = {
        "properties": {"tree": {"$ref": "#/$defs/Tree"}, "$ref": {"type": "string"}, "again": {"$ref": "#"}},
        "$defs": {"Tree": {"properties": {"left": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}}}},
    }
    planting = {"type": "function", "function": {"name": "plant", "parameters": parameters}}
    api, _ = play(tool_model, chat(tools=[planting, *others], tool_choice="required"), say("{}"))
    structured = api.dispatcher.requests[0].sampling.structured
    assert structured is not None
    schema = json.loads(structured.spec)
    for name in place.split("/")[1:]:
        schema = schema[int(name)] if name.isdigit() else schema[name]
    assert schema["properties"] == {
        "tree": {"$ref": f"{place}/$defs/Tree"},
        "$ref": {"type": "string"},
        "again": {"$ref": place},
    }
    assert schema["$defs"]["Tree"]["properties"]["left"]["anyOf"][0] == {"$ref": f"{place}/$defs/Tree"}


def test_named_tool_choice_forces_the_arguments(tool_model: ServedModel) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    api, responder = play(tool_model, chat(tools=[WEATHER], tool_choice=named), say('{"city": "x"}'))
    structured = api.dispatcher.requests[0].sampling.structured
    assert structured == StructuredSpec(
        "json_schema",
        json.dumps(WEATHER["function"]["parameters"], separators=(",", ":")),  # type: ignore[index]
        "tools[0].function.parameters",
    )
    (call,) = responder.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "x"}'}


def test_tool_choice_none_hides_the_tools(tool_model: ServedModel) -> None:
    api, responder = play(tool_model, chat(tools=[WEATHER], tool_choice="none"), say("<tool_call>{}</tool_call>"))
    assert "get_weather" not in api.prompt_text()
    assert responder.json()["choices"][0]["message"]["content"] == "<tool_call>{}</tool_call>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "must"}, 'tool_choice is "must", expected one of auto, none, required'),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, 'names "x", tools has get_weather'),
        ({"tool_choice": "required", "guided_regex": "a"}, 'tool_choice is "required" and guided_regex is given'),
    ],
)
def test_tool_choices_that_cannot_be_met(tool_model: ServedModel, fields: dict[str, Any], message: str) -> None:
    responder = asyncio.run(Api(tool_model).post(PATH, chat(tools=[WEATHER], **fields)))
    assert responder.status == 400
    assert message in responder.error["message"]


def test_empty_tool_calls_are_none(demo_model: ResolvedModel) -> None:
    source = "{% for m in messages %}{{ m.role }}{{ ' calls' if 'tool_calls' in m }}|{% endfor %}"
    artifacts = demo_artifacts(demo_model) | {"chat_template.jinja": source.encode()}
    served = build_model(demo_card(demo_model), artifacts, tokenizer_backend="tokenizers")
    messages = [*USER, {"role": "assistant", "content": "x", "tool_calls": []}]
    assert prompt_of(served, messages=messages) == "user|assistant|"


def test_a_conversation_with_tool_results(tool_model: ServedModel) -> None:
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"},
    ]
    text = prompt_of(tool_model, messages=messages)
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>' in text
    assert "<|im_start|>tool\n7 degrees<|im_end|>" in text


# -- long bodies --------------------------------------------------------------------------------------------------


def test_long_bodies_are_read_in_a_thread_and_answered_the_same(model: ServedModel) -> None:
    text = "word " * 8000
    _, responder = play(model, chat(messages=[{"role": "user", "content": text}], max_tokens=5), say("ok"))
    assert responder.json()["choices"][0]["message"]["content"] == "ok"
    assert responder.json()["usage"]["prompt_tokens"] > 8000


def test_a_line_of_long_bodies_is_bounded(model: ServedModel) -> None:
    body = json.dumps(chat(messages=[{"role": "user", "content": "hi"}], user="x" * 9_000_000)).encode()

    async def run() -> list[FakeResponder]:
        api = Api(model)
        calls: list[Coroutine[Any, Any, FakeResponder]] = [api.post(PATH, body) for _ in range(10)]
        return await asyncio.gather(*calls)

    responders = asyncio.run(run())
    assert sorted({responder.status for responder in responders}) == [0, 503]
    refused = [responder for responder in responders if responder.status]
    assert {responder.error["code"] for responder in refused} == {"overloaded"}
    assert len(refused) == 3, "64 MiB may wait"


def test_a_client_that_leaves_while_its_body_is_read_costs_no_worker(model: ServedModel) -> None:
    async def run() -> Api:
        api = Api(model)
        responder = FakeResponder()
        pending = asyncio.ensure_future(
            api.post(PATH, chat(messages=[{"role": "user", "content": "word " * 7500}]), responder)
        )
        await asyncio.sleep(0)
        responder.disconnect()
        await pending
        return api

    assert asyncio.run(run()).dispatcher.requests == []


# -- models whose files do not quite agree ------------------------------------------------------------------------


def test_tokens_that_the_model_does_not_have_are_refused(demo_model: ResolvedModel) -> None:
    card = msgspec.structs.replace(demo_card(demo_model), vocab_size=40_000)
    served = build_model(card, demo_artifacts(demo_model), tokenizer_backend="tokenizers")
    rare = served.vocabulary_text(45_000).replace("\u0120", " ")
    responder = asyncio.run(Api(served).post(PATH, chat(messages=[{"role": "user", "content": rare}])))
    assert responder.status == 400
    assert "contains the token 45,000, which the tokenizer has and the model has not" in responder.error["message"]


def test_special_tokens_of_the_card_where_the_files_are_silent(demo_model: ResolvedModel) -> None:
    artifacts = demo_artifacts(demo_model) | {"chat_template.jinja": b"{{ bos_token }}|{{ eos_token }}"}
    artifacts.pop("tokenizer_config.json", None)
    served = build_model(demo_card(demo_model), artifacts, tokenizer_backend="tokenizers")
    assert prompt_of(served) == "<|im_start|>|<|im_end|>"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"chat_template": "A"}, "A"),
        ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}, "D"),
    ],
)
def test_templates_in_the_tokenizer_config(demo_model: ResolvedModel, config: dict[str, Any], text: str) -> None:
    artifacts = {"tokenizer.json": demo_model.tokenizer_json, "tokenizer_config.json": json.dumps(config).encode()}
    assert prompt_of(build_model(demo_card(demo_model), artifacts, tokenizer_backend="tokenizers")) == text


@pytest.mark.parametrize(
    "artifacts",
    [{}, {"tokenizer.json": b"{}"}, {"tokenizer_config.json": b"{}"}, {"chat_template.jinja": b"{% if %}"}],
)
def test_files_that_do_not_make_a_model(demo_model: ResolvedModel, artifacts: dict[str, bytes]) -> None:
    if "chat_template.jinja" in artifacts:
        artifacts = artifacts | {"tokenizer.json": demo_model.tokenizer_json}
    with pytest.raises(ModelError):
        build_model(demo_card(demo_model), artifacts)
