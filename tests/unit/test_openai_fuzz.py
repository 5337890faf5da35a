"""Whatever JSON comes in, the answer is a 4xx or a valid request for a worker, never an exception."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.frontend.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from headwater.protocol.request import EngineRequest
from headwater.weights import ResolvedModel
from openai_twin import Api, served_demo

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-3, 5)
texts = st.text(max_size=8) | st.sampled_from(["demo", "user", "auto", "json_object", "text", "json", "5", "{}"])
scalars = st.none() | st.booleans() | numbers | texts
names = texts | st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "parameters", "schema"]
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=10
)
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
ENDPOINTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/completions": (CompletionRequest, {"model": "demo", "prompt": "hi"}),
    "/tokenize": (TokenizeRequest, {"model": "demo", "prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"model": "demo", "tokens": [5]}),
}


@pytest.fixture(scope="module")
def api(demo_model: ResolvedModel) -> Api:
    return Api(served_demo(demo_model))


def check(api: Api, path: str, body: bytes | dict[str, Any]) -> None:
    api.dispatcher.requests.clear()
    responder = asyncio.run(api.post(path, body))
    assert responder.status in (0, 200, 400, 404)
    if responder.status >= 400:
        assert responder.error["message"]
        assert api.dispatcher.requests == []
    for request in api.dispatcher.requests:
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
        assert decoded == request
        assert 1 <= len(request.prompt) // 4 + request.sampling.max_tokens <= 8192


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_valid_request_with_some_fields_changed(api: Api, path: str, data: st.DataObject) -> None:
    struct, valid = ENDPOINTS[path]
    changed = data.draw(st.dictionaries(st.sampled_from(struct.__struct_fields__), values, max_size=3))
    check(api, path, {**valid, **changed})


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=60) | values.map(msgspec.json.encode))
def test_any_body(api: Api, path: str, body: bytes) -> None:
    check(api, path, body)
