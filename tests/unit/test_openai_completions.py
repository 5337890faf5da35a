"""Plain completions, tokens, models, and the description of the API."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types import Completion, Model

from headwater.errors import Overloaded
from headwater.frontend.openai import schema
from headwater.frontend.openai.serving import ServedModel
from headwater.frontend.preprocess.tokenizer import unpack_ids
from headwater.protocol.request import TokenLogprobs
from headwater.weights import ResolvedModel
from openai_twin import Api, FakeResponder, served_demo, token_ids

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def model(demo_model: ResolvedModel) -> ServedModel:
    return served_demo(demo_model)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hi", **fields}


def play(model: ServedModel, body: dict[str, Any], script: Callable[[Api], None]) -> tuple[Api, FakeResponder]:
    async def run() -> tuple[Api, FakeResponder]:
        api = Api(model)
        responder = await api.post(PATH, body)
        assert not responder.status, responder.body
        script(api)
        return api, responder

    return asyncio.run(run())


def prompts_of(model: ServedModel, **fields: Any) -> list[list[int]]:
    api, _ = play(model, completion(**fields), lambda api: None)
    return [unpack_ids(request.prompt) for request in api.dispatcher.requests]


def answer_all(text: str) -> Callable[[Api], None]:
    """Every sequence says the text and its stream's number."""

    def script(api: Api) -> None:
        for stream in list(api.dispatcher.sequences):
            ids = token_ids(next(iter(api.models.values())), f"{text}{stream}")
            api.dispatcher.emit(stream, ids[:1], num_cached_tokens=0)
            api.dispatcher.emit(stream, ids[1:], "length")

    return script


def test_four_kinds_of_prompts(model: ServedModel) -> None:
    hi, you = token_ids(model, "hi"), token_ids(model, "you there")
    assert prompts_of(model, prompt="hi") == [hi]
    assert prompts_of(model, prompt=["hi", "you there"]) == [hi, you]
    assert prompts_of(model, prompt=you) == [you]
    assert prompts_of(model, prompt=[hi, you]) == [hi, you]
    assert prompts_of(model, prompt=["hi", you]) == [hi, you]


def test_default_number_of_tokens(model: ServedModel) -> None:
    api, _ = play(model, completion(prompt=[5] * 8186), lambda api: None)
    assert api.dispatcher.requests[0].sampling.max_tokens == 6, "16, or what fits"
    api, _ = play(model, completion(), lambda api: None)
    assert api.dispatcher.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_times_choices(model: ServedModel, stream: bool) -> None:
    body = completion(prompt=["one", "two three"], n=2, seed=3, stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    api, responder = play(model, body, answer_all(" answer "))
    requests = api.dispatcher.requests
    assert [request.sampling.seed for request in requests] == [3, 4, 3, 4]
    assert [unpack_ids(request.prompt) for request in requests] == [token_ids(model, "one")] * 2 + [
        token_ids(model, "two three")
    ] * 2
    if stream:
        texts = [responder.text(choice) for choice in range(4)]
        usage = responder.events()[-2]["usage"]
    else:
        answer = Completion.model_validate(responder.json(), strict=True)
        texts = [choice.text for choice in answer.choices]
        usage = responder.json()["usage"]
    assert texts == [f" answer {number}" for number in (1, 2, 3, 4)]
    assert usage["prompt_tokens"] == len(token_ids(model, "one") + token_ids(model, "two three"))


def test_prompts_are_submitted_apart_and_all_stopped_when_one_is_refused(model: ServedModel) -> None:
    async def run() -> None:
        api = Api(model)

        def refuse_from_now_on() -> None:
            api.dispatcher.refusal = Overloaded("full")

        api.dispatcher.on_submit = refuse_from_now_on
        responder = await api.post(PATH, completion(prompt=["a", "b"], n=2))
        assert (responder.status, responder.error["code"]) == (503, "overloaded")
        assert api.dispatcher.aborted == [1, 2]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once upon", [9690, 2753]])
def test_echo(model: ServedModel, stream: bool, prompt: str | list[int]) -> None:
    _, responder = play(model, completion(prompt=prompt, echo=True, stream=stream), answer_all(" x"))
    text = responder.text() if stream else responder.json()["choices"][0]["text"]
    shown = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip_special_tokens=False)
    assert text == shown + " x1"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_offsets(model: ServedModel, stream: bool) -> None:
    ids = token_ids(model, " one 🜲 two")

    def script(api: Api) -> None:
        for token_id in ids:
            entry = TokenLogprobs(-1.5, 2, [28, 30], [-0.5, -1.0])
            api.dispatcher.emit(1, [token_id], logprobs=[entry])
        api.dispatcher.emit(1, [], "length")

    _, responder = play(model, completion(logprobs=2, stream=stream), script)
    events = responder.events()[:-1] if stream else [responder.json()]
    merged: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            merged[name] += values
    assert len(merged["tokens"]) == len(ids)
    assert merged["tokens"][0] == " one"
    assert merged["token_logprobs"] == [-1.5] * len(ids)
    assert merged["text_offset"][:2] == [0, 4]
    assert merged["text_offset"][-1] == len(" one 🜲")
    assert merged["top_logprobs"][0] == {model.token_text(28): -0.5, model.token_text(30): -1.0, " one": -1.5}


def test_logprobs_of_chosen_tokens_only(model: ServedModel) -> None:
    def script(api: Api) -> None:
        api.dispatcher.emit(1, token_ids(model, "x"), "length", logprobs=[TokenLogprobs(-1.0, 1)])

    api, responder = play(model, completion(logprobs=0), script)
    assert api.dispatcher.requests[0].sampling.logprobs == 0
    assert responder.json()["choices"][0]["logprobs"]["top_logprobs"] is None


def test_token_ids_on_request(model: ServedModel) -> None:
    body = completion(prompt=["a", "b c"], return_token_ids=True)
    _, responder = play(model, body, answer_all(" x"))
    for choice, prompt in zip(responder.json()["choices"], ["a", "b c"], strict=True):
        assert choice["prompt_token_ids"] == token_ids(model, prompt)
        assert choice["token_ids"] == token_ids(model, choice["text"])


def test_a_plain_stream_has_no_role(model: ServedModel) -> None:
    _, responder = play(model, completion(stream=True), answer_all(" x"))
    assert responder.events()[0]["choices"][0]["text"] == " x"
    assert "delta" not in responder.body.decode()


def test_finish_and_stop_reason(model: ServedModel) -> None:
    def script(api: Api) -> None:
        api.dispatcher.emit(1, token_ids(model, " a. b"))

    _, responder = play(model, completion(stop="."), script)
    choice = responder.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" a", "stop", ".")


# -- tokens -------------------------------------------------------------------------------------------------------


def call(model: ServedModel, path: str, body: dict[str, Any]) -> Any:
    responder = asyncio.run(Api(model).post(path, body))
    assert responder.status == 200, responder.body
    return responder.json()


def test_tokenize_a_text(model: ServedModel) -> None:
    answer = call(model, "/tokenize", {"model": "demo", "prompt": "héllo <|im_end|>", "return_token_strs": True})
    assert answer["tokens"] == token_ids(model, "héllo <|im_end|>")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 8192
    assert answer["token_strs"][-1] == "<|im_end|>"


def test_tokenize_messages_as_chat_would(model: ServedModel) -> None:
    messages = [{"role": "user", "content": "hi"}]

    async def run() -> tuple[list[int], Any]:
        api = Api(model)
        await api.post("/v1/chat/completions", {"model": "demo", "messages": messages})
        answer = await api.post("/tokenize", {"model": "demo", "messages": messages})
        return unpack_ids(api.dispatcher.requests[0].prompt), answer.json()

    sent, answer = asyncio.run(run())
    assert answer["tokens"] == sent
    assert answer["token_strs"] is None


def test_detokenize(model: ServedModel) -> None:
    ids = token_ids(model, "<|im_start|>héllo 🙂")
    assert call(model, "/detokenize", {"model": "demo", "tokens": ids}) == {"prompt": "<|im_start|>héllo 🙂"}
    assert call(model, "/detokenize", {"model": "demo", "tokens": []}) == {"prompt": ""}


def test_long_texts_are_tokenized_in_a_thread(model: ServedModel) -> None:
    answer = call(model, "/tokenize", {"model": "demo", "prompt": "word " * 8000})
    assert answer["count"] > 8000


# -- models and documents -----------------------------------------------------------------------------------------


def test_models(model: ServedModel) -> None:
    async def run() -> tuple[Any, FakeResponder, FakeResponder]:
        api = Api(model)
        listed = await api.get_path("/v1/models")
        one = await api.get_path("/v1/models/org/demo", "/v1/models/{model}", model="org/demo")
        none = await api.get_path("/v1/models/nope", "/v1/models/{model}", model="nope")
        return listed.json(), one, none

    listed, one, none = asyncio.run(run())
    assert [entry["id"] for entry in listed["data"]] == ["demo", "org/demo"]
    assert Model.model_validate(listed["data"][0]).created == 1_700_000_000
    assert (one.json()["id"], one.json()["root"], one.json()["max_model_len"]) == ("org/demo", "demo", 8192)
    assert (none.status, none.error["code"]) == (404, "model_not_found")


def document(model: ServedModel) -> Any:
    return asyncio.run(Api(model).get_path("/openapi.json")).json()


def test_openapi_describes_what_is_decoded(model: ServedModel) -> None:
    described = document(model)
    schemas = described["components"]["schemas"]
    for struct in (schema.ChatRequest, schema.CompletionRequest, schema.TokenizeRequest, schema.DetokenizeRequest):
        assert set(schemas[struct.__name__]["properties"]) == set(struct.__struct_fields__)
    assert schemas["ChatRequest"]["required"] == ["model", "messages"]
    assert set(described["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/models/{model}",
    }


def test_every_reference_of_the_description_resolves(model: ServedModel) -> None:
    described = document(model)
    text = json.dumps(described)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(described["components"]["schemas"])


def test_docs_need_no_other_host(model: ServedModel) -> None:
    responder = asyncio.run(Api(model).get_path("/docs"))
    assert dict(responder.headers)[b"content-type"].startswith(b"text/html")
    page = responder.body.decode()
    assert "http://" not in page
    assert "https://" not in page
    assert 'fetch("openapi.json")' in page
