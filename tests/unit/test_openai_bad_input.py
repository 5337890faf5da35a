"""Bad input: each case a prompt 4xx that names the field, what was given and what would fit; nothing submitted."""

import asyncio
import json
import time
from typing import Any

import pytest

from headwater.frontend.openai import parse
from headwater.frontend.openai.model import ServedModel
from headwater.weights import ResolvedModel
from openai_twin import Api, FakeResponder, served_demo

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(demo_model: ResolvedModel) -> ServedModel:
    return served_demo(demo_model)


def post(model: ServedModel, path: str, body: bytes | dict[str, Any], **config: Any) -> FakeResponder:
    api = Api(model, **config)
    responder = asyncio.run(api.post(path, body))
    if responder.status >= 400:
        assert not api.dispatcher.requests, "refused and submitted"
    return responder


def refused(model: ServedModel, path: str, body: bytes | dict[str, Any], status: int = 400) -> dict[str, Any]:
    """The error object, checked for what every error must have."""
    responder = post(model, path, body)
    assert responder.status == status, responder.body[:500]
    error = responder.error
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) < 600
    for leak in ("Traceback", "msgspec", "Struct", ".py", "object at 0x", "`"):
        assert leak not in error["message"]
    return error


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": USER, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hi", **fields}


RAW: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the body is empty"),
    "blank": (b" \n ", "the body is empty"),
    "cut off": (b'{"model": "demo"', "ends too early"),
    "half a pair": (rb'{"model": "demo\ud800"}', r"a \u escape near its end is half of a pair"),
    "trailing comma": (b'{"model": "demo",}', "trailing comma in object"),
    "two documents": (b'{"model": "demo"} {}', "trailing characters"),
    "no JSON": (b"hello", "not valid JSON"),
    "array": (b"[]", "the body is an array, expected a JSON object"),
    "null": (b"null", "the body is null"),
    "string": (b'"x"', "the body is a string"),
    "NaN": (b'{"model": "demo", "messages": [], "temperature": NaN}', "not valid JSON: invalid character"),
    "huge float": (
        b'{"model": "demo", "messages": [], "temperature": 1e400}',
        "temperature holds a number out of range",
    ),
    "huge int": (b'{"model": "demo", "max_tokens": 1' + b"0" * 5000 + b"}", "max_tokens holds a number out of range"),
    "invalid UTF-8": (b'{"model": "demo", "messages": "\xff"}', "not valid UTF-8: byte 0xff at position 31"),
    "raw NUL": (b'{"model": "de\x00mo"}', "invalid character"),
    "lone surrogate": (b'{"model": "\\ud800", "messages": []}', "surrogate"),
    "reversed surrogates": (b'{"model": "\\udc00\\ud800", "messages": []}', "surrogate"),
    "deep arrays": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 64 levels"),
    "deep objects": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested more than 64 levels"),
    "moderately deep": (b'{"a":' * 80 + b"1" + b"}" * 80, "nested more than 64 levels"),
    "many containers": (b'{"a": [' + b"[1]," * 400_000 + b"1]}", "arrays and objects, at most 250,000"),
    "many names": (
        b"{" + b",".join(b'"n%d": 1' % number for number in range(300_000)) + b"}",
        "texts and names, at most",
    ),
    "many numbers": (b'{"a": [' + b"1," * 5_000_000 + b"1]}", "values, at most 2,000,000"),
    "duplicate": (b'{"model": "demo", "model": "x", "messages": []}', '"model" occurs twice'),
    "nested duplicate": (
        b'{"model": "demo", "messages": [{"role": "user", "content": "a", "content": "b"}]}',
        '"content" occurs twice',
    ),
    "duplicate beside backslashes": (
        rb'{"model": "demo", "messages": [{"role": "user", "content": "a\\"}], "user": "b\\", "n": 1, "n": 2}',
        '"n" occurs twice',
    ),
    "duplicate beside quotes": (
        b'{"model": "demo", "messages": [{"role": "user", "content": "say \\"hi\\""}], "n": 1, "n": 2}',
        '"n" occurs twice',
    ),
}


@pytest.mark.parametrize("case", RAW)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_bodies(model: ServedModel, path: str, case: str) -> None:
    body, message = RAW[case]
    started = time.perf_counter()
    assert message in refused(model, path, body)["message"]
    assert time.perf_counter() - started < 5.0


CHAT_CASES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": USER}, "model", "model is missing, expected a string"),
    ({"model": "demo"}, "messages", "messages is missing, expected an array"),
    ({"model": 5, "messages": USER}, "model", "model is 5, expected a string"),
    (chat(messages=[]), "messages", "expected an array of length >= 1"),
    (chat(messages="hi"), "messages", 'messages is "hi", expected an array'),
    (chat(messages={}), "messages", "messages is an object of 0, expected an array"),
    (chat(messages=["hi"]), "messages[0]", 'messages[0] is "hi", expected an object'),
    (chat(messages=[{"content": "x"}]), "messages[0].role", "messages[0].role is missing, expected a string"),
    (chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role", "expected one of system, developer"),
    (chat(messages=[{"role": "user"}]), "messages[0].content", "messages[0].content is missing"),
    (
        chat(messages=[*USER, {"role": "user", "content": None}]),
        "messages[1].content",
        "messages[1].content is null, expected a text or an array of text parts",
    ),
    (
        chat(messages=[{"role": "tool", "content": [{"type": "text", "text": None}]}]),
        "messages[0].content[0].text",
        "messages[0].content[0].text is null, expected a text",
    ),
    (
        chat(messages=[{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}]),
        "messages[0].content[0].refusal",
        "messages[0].content[0].refusal is missing, expected a text",
    ),
    (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", "is 5, expected a string or an array"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0].type",
        'is "image_url": this model is served for text only',
    ),
    (
        chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        "messages[0].content[0].text",
        "is missing",
    ),
    (
        chat(messages=[{"role": "user", "content": "a\0b"}]),
        "messages[0].content",
        "messages[0].content contains the character U+0000",
    ),
    (
        chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no"}}]}]),
        "messages[0].tool_calls[0].function.arguments",
        'is "no", expected the JSON text of an object',
    ),
    (chat(max_tokens=0), "max_tokens", "max_tokens is 0, expected an integer >= 1"),
    (chat(max_tokens=-1), "max_tokens", "max_tokens is -1, expected an integer >= 1"),
    (chat(max_tokens=1.5), "max_tokens", "max_tokens is 1.5, expected an integer or null"),
    (chat(max_tokens="5"), "max_tokens", 'max_tokens is "5", expected an integer or null'),
    (chat(max_tokens=True), "max_tokens", "max_tokens is true, expected an integer"),
    (chat(max_tokens=2**40), "max_tokens", "max_tokens at most 8,161 with this prompt"),
    (chat(max_completion_tokens=2**40), "max_completion_tokens", "max_completion_tokens at most 8,161 with this"),
    (chat(max_completion_tokens=8190), "messages", "at most 2 prompt tokens, or max_completion_tokens at most 8,161"),
    (chat(max_tokens=10**30), "max_tokens", "expected an integer <="),
    (chat(max_completion_tokens=0), "max_completion_tokens", "expected an integer >= 1"),
    (chat(min_tokens=10, max_tokens=5), "min_tokens", "min_tokens is 10, more than the 5 tokens"),
    (chat(temperature=-0.1), "temperature", "temperature is -0.1, expected a number >= 0"),
    (chat(temperature=2.5), "temperature", "temperature is 2.5, expected a number <= 2"),
    (chat(temperature="hot"), "temperature", 'temperature is "hot", expected a number or null'),
    (chat(top_p=0), "top_p", "top_p is 0, expected a number > 0"),
    (chat(top_p=1.5), "top_p", "top_p is 1.5, expected a number <= 1"),
    (chat(top_k=-5), "top_k", "top_k is -5, expected an integer >= -1"),
    (chat(min_p=2), "min_p", "expected a number <= 1"),
    (chat(presence_penalty=3), "presence_penalty", "expected a number <= 2"),
    (chat(frequency_penalty=-3), "frequency_penalty", "expected a number >= -2"),
    (chat(repetition_penalty=0), "repetition_penalty", "expected a number >= 1e-06"),
    (chat(n=0), "n", "n is 0, expected an integer >= 1"),
    (chat(n=1000), "n", "n is 1000, expected an integer <= 128"),
    (chat(seed=2**70), "seed", "expected an integer <= 9223372036854775807"),
    (chat(seed="x"), "seed", "expected an integer or null"),
    (chat(stop=["x"] * 33), "stop", "expected an array of length <= 32"),
    (chat(stop=[""]), "stop[0]", "expected a string of length >= 1"),
    (chat(stop=5), "stop", "stop is 5, expected a string or an array or null"),
    (chat(stop="x" * 2000), "stop", "expected a string of length <= 1024"),
    (chat(stop_token_ids=[99_999]), "stop_token_ids", "stop_token_ids has 99,999, expected token ids from 0 to 49,151"),
    (chat(logprobs="yes"), "logprobs", "expected true or false or null"),
    (chat(logprobs=True, top_logprobs=50), "top_logprobs", "top_logprobs is 50, expected an integer <= 20"),
    (chat(top_logprobs=5), "top_logprobs", "logprobs is not true"),
    (chat(logit_bias={"5": 101}), "logit_bias", "logit_bias has 101 for token 5, expected a number from -100"),
    (chat(logit_bias={"abc": 1}), "logit_bias", 'logit_bias has the key "abc", expected a token id'),
    (chat(logit_bias={"49152": 1}), "logit_bias", "expected a token id from 0 to 49,151"),
    (chat(logit_bias={"-1": 1}), "logit_bias", "expected a token id"),
    (chat(logit_bias={"5": "x"}), "logit_bias", 'logit_bias has "x" for "5", expected a number'),
    (chat(logit_bias={"5": 1, "6": 1.5, "7": None}), "logit_bias", 'logit_bias has null for "7", expected a number'),
    (chat(logit_bias=[]), "logit_bias", "logit_bias is an array of 0, expected an object or null"),
    (chat(stream="yes"), "stream", 'stream is "yes", expected true or false or null'),
    (chat(stream_options={"include_usage": True}), "stream_options", "stream is not true"),
    (chat(response_format={"type": "xml"}), "response_format.type", "expected one of text, json_object, json_schema"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        "response_format.json_schema.schema",
        "schema is missing or null, expected a JSON schema",
    ),
    (chat(response_format="json"), "response_format", "expected an object or null"),
    (chat(guided_json="{"), "guided_json", "is not valid JSON"),
    (chat(guided_json="[1]"), "guided_json", "expected a JSON schema"),
    (chat(guided_choice=[]), "guided_choice", "is an empty array, expected one or more texts"),
    (chat(guided_choice=["a", ""]), "guided_choice[1]", "guided_choice[1] is empty"),
    (chat(guided_regex=""), "guided_regex", "guided_regex is empty, expected a regular expression"),
    (chat(guided_regex="a", guided_choice=["b"]), "guided_regex", "guided_regex and guided_choice are given"),
    (chat(structured_outputs={}), "structured_outputs", "names no constraint, expected one of json, regex"),
    (chat(structured_outputs={"regexp": "a"}), "structured_outputs", "names no constraint"),
    (chat(structured_outputs={"structural_tag": "x"}), "structured_outputs.structural_tag", "is not supported"),
    (
        chat(structured_outputs={"json": {}, "whitespace_pattern": " "}),
        "structured_outputs.whitespace_pattern",
        "is not supported",
    ),
    (chat(structured_outputs={"regex": "x" * 300_000}), "structured_outputs.regex", "at most 262,144 fit"),
    (chat(tool_choice="required"), "tool_choice", "tools is empty"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools", "does not take tools"),
    (chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name", "is missing, expected a string"),
    (chat(tool_choice={"type": "function"}), "tool_choice.function", "is missing, expected an object"),
    (chat(tools=[{"type": "code", "function": {"name": "f"}}]), "tools[0].type", "expected function"),
    (chat(functions=[{"name": "f"}]), "functions", "use tools and tool_choice"),
    (chat(function_call="auto"), "function_call", "use tools and tool_choice"),
    (chat(modalities=["text", "audio"]), "modalities", "answers in text"),
    (chat(audio={"voice": "x"}), "audio", "answers in text"),
    (chat(best_of=3), "best_of", "best_of is 3, which is not supported: use n"),
    (chat(use_beam_search=True), "use_beam_search", "not supported"),
    (chat(prompt_logprobs=1), "prompt_logprobs", "not supported"),
    (chat(chat_template="{{ 1 }}"), "chat_template", "set by whoever runs the server"),
    (chat(bad_words=["x"]), "bad_words", "not supported"),
    (chat(echo=True), "echo", "not supported"),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "has a field of its own"),
    (
        chat(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
        "add_generation_prompt and continue_final_message are both true",
    ),
    (chat(nvext=5), "nvext", "nvext is 5, expected an object or null"),
    (chat(nvext={"agent_hints": {"priority": "high"}}), "nvext.agent_hints.priority", "expected an integer"),
    (chat(cache_salt=""), "cache_salt", "expected a string of length >= 1"),
    (chat(priority=2**40), "priority", "expected an integer <= 2147483647"),
]


@pytest.mark.parametrize(("body", "param", "message"), CHAT_CASES, ids=[str(case[1]) for case in CHAT_CASES])
def test_chat_fields(model: ServedModel, body: dict[str, Any], param: str | None, message: str) -> None:
    error = refused(model, CHAT, body)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    "kind", ["image_url", "input_audio", "audio_url", "video_url", "image_embeds", "file", "image"]
)
def test_media_are_refused_by_name(model: ServedModel, kind: str) -> None:
    """Whatever engine serves it, and wherever they are among texts."""
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,x"}}]
    error = refused(model, CHAT, chat(messages=[*USER, {"role": "user", "content": content}]))
    assert error["param"] == "messages[1].content[1].type"
    assert f'is "{kind}": this model is served for text only' in error["message"]


COMPLETION_CASES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": "demo"}, "prompt", "prompt is missing, expected a string or an array"),
    (completion(prompt=None), "prompt", "prompt is null, expected a string or an array"),
    (completion(prompt=5), "prompt", "prompt is 5"),
    (completion(prompt=""), "prompt", "prompt is empty"),
    (completion(prompt=[]), "prompt", "prompt is an empty array"),
    (completion(prompt=[[]]), "prompt[0]", "prompt[0] is empty"),
    (completion(prompt=["a", ""]), "prompt[1]", "prompt[1] is empty"),
    (completion(prompt=[1, "a"]), "prompt[1]", 'prompt[1] is "a" among token ids, expected an integer'),
    (completion(prompt=["a", 1]), "prompt[1]", "prompt[1] is 1 among prompts, expected a text"),
    (completion(prompt=[1, -1]), "prompt[1]", "prompt[1] is -1, expected a token id from 0 to 49,151"),
    (completion(prompt=[49_152]), "prompt[0]", "expected a token id from 0 to 49,151"),
    (completion(prompt=[2**80]), "prompt[0]", "expected a token id"),
    (completion(prompt=[[1, [2]]]), "prompt[0][1]", "expected an integer"),
    (completion(prompt=["x"] * 257), "prompt", "257 prompts, at most 256 fit"),
    (completion(prompt=["x"] * 100, n=4), "prompt", "400 sequences, at most 256 fit"),
    (completion(prompt={"a": 1}), "prompt", "expected a string or an array"),
    (completion(logprobs=True), "logprobs", "logprobs is true, expected an integer"),
    (completion(logprobs=21), "logprobs", "expected an integer <= 20"),
    (completion(echo=True, logprobs=1), "echo", "echo is true and logprobs is 1, expected one of them"),
    (completion(suffix="x"), "suffix", "insertion is not offered"),
    (completion(best_of=2), "best_of", "use n"),
    (completion(prompt=[5] * 8000, max_tokens=500), "prompt", "at most 7,692 prompt tokens, or max_tokens at most 192"),
    (completion(prompt=[5] * 9120), "prompt", "the prompt has 9,120 tokens, the model's context is 8,192"),
]


@pytest.mark.parametrize(
    ("body", "param", "message"), COMPLETION_CASES, ids=[str(case[1]) for case in COMPLETION_CASES]
)
def test_completion_fields(model: ServedModel, body: dict[str, Any], param: str | None, message: str) -> None:
    error = refused(model, COMPLETIONS, body)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "demo"}, "prompt"),
        ("/tokenize", {"model": "demo", "prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"model": "demo", "prompt": 5}, "prompt"),
        ("/detokenize", {"model": "demo"}, "tokens"),
        ("/detokenize", {"model": "demo", "tokens": [49_152]}, "tokens[0]"),
        ("/detokenize", {"model": "demo", "tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"model": "demo", "tokens": [1] * 8193}, "tokens"),
        ("/detokenize", {"model": "demo", "tokens": "x"}, "tokens"),
    ],
)
def test_token_fields(model: ServedModel, path: str, body: dict[str, Any], param: str) -> None:
    assert refused(model, path, body)["param"] == param


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_unknown_model(model: ServedModel, path: str) -> None:
    body = {"model": "nope", "messages": USER, "prompt": "x", "tokens": [1]}
    known = {CHAT: ("messages",), COMPLETIONS: ("prompt",), "/tokenize": ("prompt",), "/detokenize": ("tokens",)}[path]
    error = refused(model, path, {name: body[name] for name in ("model", *known)}, status=404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"


def test_a_stream_that_is_refused_has_a_real_status(model: ServedModel) -> None:
    responder = post(model, CHAT, chat(stream=True, temperature=9))
    assert (responder.status, responder.streaming) == (400, False)


def test_context_length_has_its_code(model: ServedModel) -> None:
    assert refused(model, COMPLETIONS, completion(prompt=[5] * 9000))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("text", ["word " * 2_000_000, "x" * 10_000_000, "é" * 5_000_000, "#" * 10_000_000])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ten_megabytes_are_refused_soon(model: ServedModel, path: str, text: str) -> None:
    field = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body = json.dumps({"model": "demo", **field}, ensure_ascii=False).encode()
    started = time.perf_counter()
    error = refused(model, path, body)
    assert error["code"] == "context_length_exceeded"
    assert "characters" in error["message"]
    assert time.perf_counter() - started < 5.0


def test_ten_megabytes_in_an_unknown_field_are_harmless(model: ServedModel) -> None:
    assert post(model, CHAT, chat(filler="x" * 10_000_000)).status == 0, "submitted and waiting"


def test_unknown_fields_are_noted_or_refused(model: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="headwater.frontend.openai.parse"):
        assert post(model, CHAT, chat(temprature=0.5)).status == 0
    assert 'ignored: unknown field "temprature"; did you mean temperature?' in caplog.text
    responder = post(model, CHAT, chat(temprature=0.5), strict=True)
    assert responder.status == 400
    assert responder.error["message"] == 'unknown field "temprature"; did you mean temperature?'
    assert responder.error["param"] == "temprature"


def test_thousands_of_unknown_fields_cost_little(model: ServedModel) -> None:
    started = time.perf_counter()
    assert post(model, CHAT, chat(**{f"temperatur{number}": 1 for number in range(1500)})).status == 0
    assert time.perf_counter() - started < 5.0


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"},
        {"best_of": 1, "length_penalty": 1.0, "use_beam_search": False, "prompt_logprobs": None, "bad_words": []},
        {"modalities": ["text"], "audio": None, "functions": None, "parallel_tool_calls": True, "tools": []},
        {"stop": None, "seed": None, "n": None, "logit_bias": None, "response_format": None, "stream": None},
        {"nvext": {"unknown": 1, "agent_hints": {"iat": 250, "prefix_id": "p"}, "backend_instance_id": 7}},
    ],
)
def test_harmless_fields_pass_even_strictly(model: ServedModel, fields: dict[str, Any]) -> None:
    assert post(model, CHAT, chat(**fields), strict=True).status == 0


def test_plain_bodies_are_not_read_twice(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "_check_names_unique", lambda body: pytest.fail("the slow check ran"))
    for text in ("plain", 'with "quotes"', "back\\slashes\\", 'both \\" and \\\\"', "x" * 300_000 + '"'):
        parse._decode_object(json.dumps({"messages": [{"role": "user", "content": text}], "n": 1}).encode())


def test_escaped_quotes_and_colons_are_no_duplicates(model: ServedModel) -> None:
    text = 'she said "a": "b" and "a": "c" \\u0000 \\" {"x": 1, "x": 2}'
    assert post(model, CHAT, chat(messages=[{"role": "user", "content": text}])).status == 0


def test_nothing_is_served_yet() -> None:
    api = Api()
    responder = asyncio.run(api.post(CHAT, chat()))
    assert responder.status == 503
    assert responder.error["code"] == "no_workers"
    assert dict(responder.headers)[b"retry-after"] == b"2"
