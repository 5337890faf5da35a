"""The official OpenAI client against a real cluster with the demo model: every endpoint and parameter."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from served_demo import call, demo_cluster

from headwater.weights import ResolvedModel

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture(scope="module")
def url(demo_model: ResolvedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo_cluster(tmp_path_factory.mktemp("c")) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: OpenAI, **fields: Any) -> Any:
    defaults: dict[str, Any] = {"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**{**defaults, **fields})


def ask_for_error(client: OpenAI, kind: type[openai.APIStatusError], **fields: Any) -> Any:
    with pytest.raises(kind) as caught:
        ask(client, **fields)
    body = caught.value.body
    assert isinstance(body, dict)
    assert caught.value.request_id
    return body


# -- models -------------------------------------------------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).owned_by == "headwater"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("nope")


# -- chat ---------------------------------------------------------------------------------------------------------


def test_whole_answer(client: OpenAI) -> None:
    answer = ask(client)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")


def test_stream_equals_the_whole_answer(client: OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stream_helper_of_the_client(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=24) as stream:
        final = stream.get_final_completion()
    assert "Paris" in (final.choices[0].message.content or "")


def test_length(client: OpenAI) -> None:
    answer = ask(client, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_several_choices(client: OpenAI) -> None:
    answer = ask(client, n=4, temperature=1.2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1
    texts: dict[int, str] = {}
    for chunk in ask(client, n=4, temperature=1.2, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {choice.index: choice.message.content for choice in answer.choices}


def test_seed(client: OpenAI) -> None:
    first, again, other = (ask(client, temperature=1.2, seed=seed) for seed in (11, 11, 12))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != other.choices[0].message.content
    assert first.system_fingerprint == other.system_fingerprint


def test_logprobs(client: OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        best = max(entry.top_logprobs, key=lambda top: top.logprob)
        assert (best.token, best.logprob) == (entry.token, entry.logprob), "greedy picks the most likely"
        assert bytes(entry.bytes).decode() == entry.token
        assert -20 < entry.logprob <= 0
    streamed = [
        entry
        for chunk in ask(client, logprobs=True, top_logprobs=3, max_tokens=5, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


@pytest.mark.parametrize("stream", [False, True])
def test_stop(client: OpenAI, stream: bool) -> None:
    full = ask(client).choices[0].message.content
    assert " of France" in full
    got = ask(client, stop=["of Fr", "never seen"], stream=stream)
    if stream:
        chunks = list(got)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = got.choices[0].message.content, got.choices[0].finish_reason
    assert (text, reason) == (full.split("of Fr")[0], "stop")


def test_logit_bias(client: OpenAI) -> None:
    entry = ask(client, max_tokens=1, logprobs=True).choices[0]
    banned = tokenize(client, entry.message.content)[0]
    changed = ask(client, max_tokens=1, logit_bias={str(banned): -100})
    assert changed.choices[0].message.content != entry.message.content


def test_penalties_and_sampling_fields_are_taken(client: OpenAI) -> None:
    answer = ask(
        client,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        temperature=0.8,
        top_p=0.9,
        user="someone",
        metadata={"a": "b"},
        store=False,
        extra_body={"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 4, "ignore_eos": False},
    )
    assert answer.usage.completion_tokens >= 4


def test_ignore_eos(client: OpenAI) -> None:
    answer = ask(client, max_tokens=40, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 40)


def test_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = ask(
        client,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert value["city"] in ("Paris", "Rome")
    assert isinstance(value["big"], bool)


def test_guided_output(client: OpenAI) -> None:
    chosen = ask(client, extra_body={"guided_choice": ["blue", "red"]}).choices[0].message.content
    assert chosen in ("blue", "red")
    matched = ask(client, extra_body={"guided_regex": "[0-9]{3}-[0-9]{2}"}).choices[0].message.content
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", matched)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "x(["}, "guided_regex", "unclosed character class, at character 3"),
        ({"structured_outputs": {"regex": "x(["}}, "structured_outputs.regex", "unclosed character class"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
            "response_format.json_schema.schema",
            "the $ref at # leads only to itself",
        ),
    ],
)
def test_nonsense_grammars_are_the_clients_fault(
    client: OpenAI, fields: dict[str, object], param: str, message: str
) -> None:
    error = ask_for_error(client, openai.BadRequestError, extra_body=fields)
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert message in error["message"]


def test_extensions(client: OpenAI) -> None:
    answer = ask(client, extra_body={"nvext": {"extra_fields": ["worker_id", "timing"]}, "return_token_ids": True})
    assert answer.nvext["worker_id"]["decode_worker_id"].startswith("worker")
    assert answer.nvext["timing"]["total_time_ms"] >= answer.nvext["timing"]["ttft_ms"] > 0
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert detokenize(client, answer.choices[0].token_ids) == answer.choices[0].message.content


def test_cached_tokens_are_reported(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "A rather particular beginning. " * 12}]
    ask(client, messages=messages, max_tokens=2)
    again = ask(client, messages=messages, max_tokens=2)
    assert again.usage.prompt_tokens_details.cached_tokens >= 16


def test_other_letters_and_symbols_come_through(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Repeat exactly: naïve café 你好 🙂"}]
    chunks = ask(client, messages=messages, stream=True, max_tokens=30)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "\ufffd" not in text


# -- completions --------------------------------------------------------------------------------------------------


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})


def test_prompts_of_four_kinds(client: OpenAI) -> None:
    text = "The capital of France is"
    ids = tokenize(client, text)
    by_text = complete(client, text).choices[0].text
    assert complete(client, ids).choices[0].text == by_text
    listed = complete(client, [text, "One, two, three,"])
    assert listed.choices[0].text == by_text
    assert len(listed.choices) == 2
    assert [choice.text for choice in complete(client, [ids, ids], n=2).choices] == [by_text] * 4


def test_completion_defaults_to_sixteen_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_completion_stream_echo_and_usage(client: OpenAI) -> None:
    whole = complete(client, "One, two,", echo=True)
    chunks = list(complete(client, "One, two,", echo=True, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert whole.choices[0].text.startswith("One, two,")
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_completion_logprobs(client: OpenAI) -> None:
    choice = complete(client, "The capital of France is", logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert all(len(top) >= 2 for top in logprobs.top_logprobs)


# -- tokens -------------------------------------------------------------------------------------------------------


def at_root(client: OpenAI, path: str, body: dict[str, Any]) -> Any:
    answer = call(str(client.base_url).removesuffix("/v1/") + path, {"model": MODEL, **body})
    assert answer.status == 200, answer.text
    return answer.json()


def tokenize(client: OpenAI, text: str) -> list[int]:
    ids: list[int] = at_root(client, "/tokenize", {"prompt": text})["tokens"]
    return ids


def detokenize(client: OpenAI, ids: list[int]) -> str:
    return str(at_root(client, "/detokenize", {"tokens": ids})["prompt"])


def test_tokens_there_and_back(client: OpenAI) -> None:
    text = "Grüße, 世界 🙂"
    assert detokenize(client, tokenize(client, text)) == text


def test_tokenized_messages_count_as_the_prompt(client: OpenAI) -> None:
    counted = at_root(client, "/tokenize", {"messages": CAPITAL})["count"]
    assert ask(client, max_tokens=1).usage.prompt_tokens == counted


# -- errors -------------------------------------------------------------------------------------------------------


def test_errors_are_the_clients_own_kinds(client: OpenAI) -> None:
    assert ask_for_error(client, openai.NotFoundError, model="nope")["code"] == "model_not_found"
    assert ask_for_error(client, openai.BadRequestError, temperature=3)["param"] == "temperature"
    assert "at most" in ask_for_error(client, openai.BadRequestError, max_tokens=9000)["message"]
    assert ask_for_error(client, openai.BadRequestError, stream=True, n=0)["param"] == "n"
    long: list[Any] = [{"role": "user", "content": "word " * 9000}]
    assert ask_for_error(client, openai.BadRequestError, messages=long)["code"] == "context_length_exceeded"
    huge: list[Any] = [{"role": "user", "content": "word " * 2_000_000}]
    started = time.perf_counter()
    assert ask_for_error(client, openai.BadRequestError, messages=huge)["code"] == "context_length_exceeded"
    assert time.perf_counter() - started < 10
    image: list[Any] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]
    assert "text only" in ask_for_error(client, openai.BadRequestError, messages=image)["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\xff"}', b'{"a":' * 3000, b'{"model": NaN}'])
def test_bodies_that_are_no_request(url: str, body: bytes) -> None:
    answer = call(f"{url}/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.json()["error"]["message"]


def test_request_ids(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=CAPITAL, max_tokens=1, extra_headers={"x-request-id": "my-own-id"}
    )
    assert raw.headers["x-request-id"] == "my-own-id"
    parsed = raw.parse()
    assert parsed.id == "chatcmpl-my-own-id"


def test_pages(url: str) -> None:
    assert call(f"{url}/openapi.json").json()["openapi"].startswith("3.")
    assert call(f"{url}/docs").headers["content-type"].startswith("text/html")


# -- many, and those who leave ------------------------------------------------------------------------------------


def test_many_streams_at_once(url: str) -> None:
    async def one(client: AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=CAPITAL, temperature=0, max_tokens=10 + number % 5, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=90) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    texts = asyncio.run(run())
    longest = max(texts, key=len)
    assert all(longest.startswith(text) for text in texts)


def num_sequences(url: str) -> float:
    """Sequences that the frontend or a worker still has."""
    pattern = r"headwater_(?:num_requests_running|worker_num_requests_(?:running|waiting))\{[^}]*\} (\S+)"
    return sum(map(float, re.findall(pattern, call(f"{url}/metrics").text)))


def test_a_client_that_leaves_frees_the_worker(client: OpenAI, url: str) -> None:
    stream = ask(client, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    for number, _ in enumerate(stream):
        if number == 3:
            break
    assert num_sequences(url) >= 1
    stream.close()
    deadline = time.monotonic() + 20
    while num_sequences(url):
        assert time.monotonic() < deadline
        time.sleep(0.05)
