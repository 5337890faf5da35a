"""The page of vLLM's request fields says what is so: each row is tried on a frontend with an in-memory worker."""

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from headwater.frontend.openai.serving import ServedModel, build_model
from headwater.protocol.request import TokenLogprobs
from headwater.weights import ResolvedModel
from named_tests import can_fail
from openai_twin import Api, FakeResponder, demo_artifacts, demo_card, token_ids
from vllm_page import ENGINES, NAMES, SHAPES, SHOWN_BY, handling

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {"chat": {"messages": USER}, "completions": {"prompt": "hi"}}
TEMPLATE = (
    "{% if tools %}{{ tools|tojson }} use <tool_call> tags{% endif %}"
    "{% if documents %}{{ documents|tojson }}{% endif %}"
    "{{ mood }}{{ reasoning_effort }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
ANSWER = f"Hello world<|im_start|>{CALL}\n{CALL}"

Sample = tuple[Any, dict[str, Any]]
"""A value that asks for something, and what else a request must have for it."""
SAMPLES: dict[str, Sample] = {
    "add_generation_prompt": (False, {}),
    "cache_salt": ("s", {}),
    "chat_template_kwargs": ({"mood": "good"}, {}),
    "continue_final_message": (
        True,
        {"messages": [*USER, {"role": "assistant", "content": "The"}], "add_generation_prompt": False},
    ),
    "documents": ([{"title": "a", "text": "b"}], {}),
    "frequency_penalty": (0.5, {}),
    "ignore_eos": (True, {}),
    "include_stop_str_in_output": (True, {"stop": ["world"]}),
    "logit_bias": ({"5": 3}, {}),
    "max_completion_tokens": (5, {}),
    "max_tokens": (5, {}),
    "messages": ([{"role": "user", "content": "ho"}], {}),
    "min_p": (0.1, {}),
    "min_tokens": (2, {}),
    "model": ("org/demo", {}),
    "n": (2, {}),
    "parallel_tool_calls": (False, {"tools": [TOOL]}),
    "presence_penalty": (0.5, {}),
    "priority": (5, {}),
    "prompt": ("ho", {}),
    "reasoning_effort": ("high", {}),
    "repetition_penalty": (1.2, {}),
    "response_format": ({"type": "json_object"}, {}),
    "return_token_ids": (True, {}),
    "seed": (42, {}),
    "skip_special_tokens": (False, {}),
    "stop": (["world"], {}),
    "stop_token_ids": ([5], {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "structured_outputs": ({"regex": "a+"}, {}),
    "temperature": (0.5, {}),
    "tool_choice": ("none", {"tools": [TOOL]}),
    "tools": ([TOOL], {}),
    "top_k": (5, {}),
    "top_logprobs": (2, {"logprobs": True}),
    "top_p": (0.5, {}),
    "user": ("somebody", {}),
}
OF_CHAT: dict[str, Sample] = {
    "add_special_tokens": (True, {}),
    "logprobs": (True, {}),
    "return_tokens_as_token_ids": (True, {"logprobs": True}),
}
OF_COMPLETIONS: dict[str, Sample] = {
    "add_special_tokens": (False, {}),
    "echo": (True, {}),
    "logprobs": (2, {}),
    "return_tokens_as_token_ids": (True, {"logprobs": 2}),
}
OWN = {"chat": OF_CHAT, "completions": OF_COMPLETIONS}
UNSUPPORTED: dict[str, Any] = {
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "chat_template": "{{ messages }}",
    "echo": True,
    "length_penalty": 2.0,
    "prompt_logprobs": 1,
    "suffix": "x",
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
}
"""Values that ask for what is refused."""


def rows(*beginnings: str) -> list[tuple[str, str]]:
    """Endpoint and field where the page says so."""
    return [
        (kind, name)
        for kind, names in NAMES["fields"].items()
        for name in names
        if handling(SHAPES[kind], name).startswith(beginnings)
    ]


@pytest.fixture(scope="module")
def model(demo_model: ResolvedModel) -> ServedModel:
    """Its tokenizer puts a special token first, where it is asked to."""
    tokenizer = json.loads(demo_model.tokenizer_json)
    first = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    artifacts = demo_artifacts(demo_model) | {
        "chat_template.jinja": TEMPLATE.encode(),
        "tokenizer.json": json.dumps(tokenizer).encode(),
    }
    return build_model(demo_card(demo_model), artifacts, tokenizer_backend="tokenizers")


def work(api: Api, answer: list[int]) -> None:
    """Play the worker: everybody gets the same answer."""
    for stream, submitted in list(api.dispatcher.sequences.items()):
        most = submitted.request.sampling.logprobs
        one = None if most is None else TokenLogprobs(-0.5, 1, answer[:most], [-0.5, -0.7][:most])
        for token in answer:
            api.dispatcher.emit(stream, [token], logprobs=None if one is None else [one])
        api.dispatcher.emit(stream, [], "stop", stop_token_id=2)


def asked(model: ServedModel, kind: str, fields: dict[str, Any], *, strict: bool = False) -> tuple[Api, FakeResponder]:
    async def run() -> tuple[Api, FakeResponder]:
        api = Api(model, strict=strict)
        responder = await api.post(PATHS[kind], {"model": "demo"} | BODIES[kind] | fields)
        work(api, token_ids(model, ANSWER))
        return api, responder

    return asyncio.run(run())


def outcome(model: ServedModel, kind: str, fields: dict[str, Any], *, strict: bool = False) -> tuple[Any, ...]:
    """All that a worker and a client see of a request, but for what is drawn anew each time."""
    api, responder = asked(model, kind, fields, strict=strict)
    assert responder.status == 200, responder.body
    requests = [msgspec.to_builtins(request) for request in api.dispatcher.requests]
    for request in requests:
        del request["arrival"]
        if request["sampling"].get("seed_drawn"):
            del request["sampling"]["seed"]
    answer = re.sub(r'"(id|created)": ?("[^"]*"|\d+)', "", responder.body.decode())
    return requests, api.dispatcher.hints, answer


@pytest.mark.parametrize("kind", PATHS)
def test_equal_requests_have_equal_outcomes(model: ServedModel, kind: str) -> None:
    assert outcome(model, kind, {}) == outcome(model, kind, {})


@pytest.mark.parametrize(("kind", "name"), rows("same"))
def test_a_field_that_is_said_to_be_the_same_makes_a_difference(model: ServedModel, kind: str, name: str) -> None:
    value, needed = OWN[kind].get(name) or SAMPLES[name]
    assert outcome(model, kind, needed | {name: value}) != outcome(model, kind, needed)


@pytest.mark.parametrize(("kind", "name"), rows("refused"))
def test_a_field_that_is_said_to_be_refused_is_refused_by_name_unless_harmless(
    model: ServedModel, kind: str, name: str
) -> None:
    api, responder = asked(model, kind, {name: UNSUPPORTED[name]})
    assert (responder.status, responder.error["param"]) == (400, name)
    assert SHAPES[kind].unsupported[name].hint in responder.error["message"]
    assert not api.dispatcher.requests
    assert outcome(model, kind, {name: None}) == outcome(model, kind, {})


@pytest.mark.parametrize(("kind", "name"), rows("accepted"))
def test_a_field_that_is_said_to_be_without_effect_has_none(model: ServedModel, kind: str, name: str) -> None:
    assert outcome(model, kind, {name: {"x": 1}}, strict=True) == outcome(model, kind, {})


@pytest.mark.parametrize(("kind", "name"), rows("ignored"))
def test_a_field_that_is_said_to_be_ignored_is_so_with_a_warning(model: ServedModel, kind: str, name: str) -> None:
    warned = {"nvext": {"extra_fields": ["warnings"]}}
    with_it, without = outcome(model, kind, warned | {name: 1}), outcome(model, kind, warned)
    assert with_it[:2] == without[:2]
    assert f'unknown field \\"{name}\\"' in with_it[2]
    _, refused = asked(model, kind, {name: 1}, strict=True)
    assert (refused.status, refused.error["param"]) == (400, name)


def test_what_is_said_of_engines_names_tests_that_would_fail() -> None:
    assert ENGINES.keys() == SHOWN_BY.keys()
    assert [test for tests in SHOWN_BY.values() for test in tests if not can_fail(test)] == []


def test_all_rows_were_tried() -> None:
    tried = rows("same", "refused", "accepted", "ignored")
    assert sorted(tried) == sorted((kind, name) for kind, names in NAMES["fields"].items() for name in names)
