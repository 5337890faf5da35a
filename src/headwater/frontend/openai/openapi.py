"""`/openapi.json`, generated from the structs that requests are decoded into and answers encoded from, and `/docs`."""

from importlib.resources import files
from typing import Any

import msgspec

import headwater
from headwater.frontend.openai import answers, schema

_REF = "#/components/schemas/{name}"

_OPERATIONS: tuple[tuple[str, str, str, type[msgspec.Struct] | None, type[msgspec.Struct]], ...] = (
    ("post", "/v1/chat/completions", "Answer a conversation", schema.ChatRequest, answers.ChatAnswer),
    ("post", "/v1/completions", "Continue a text", schema.CompletionRequest, answers.CompletionAnswer),
    ("post", "/tokenize", "Text or messages to token ids", schema.TokenizeRequest, answers.TokenizeAnswer),
    ("post", "/detokenize", "Token ids to text", schema.DetokenizeRequest, answers.DetokenizeAnswer),
    ("get", "/v1/models", "List the models", None, answers.ModelList),
    ("get", "/v1/models/{model}", "Describe a model", None, answers.ModelAnswer),
)
_STREAMED: dict[type[msgspec.Struct], type[msgspec.Struct]] = {
    answers.ChatAnswer: answers.ChatChunk,
    answers.CompletionAnswer: answers.CompletionAnswer,
}


def openapi_document() -> bytes:
    """The OpenAPI 3.1 document."""
    types = [answers.ErrorAnswer, answers.ChatChunk]
    types += [struct for _, _, _, request, answer in _OPERATIONS for struct in (request, answer) if struct is not None]
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    paths: dict[str, Any] = {}
    for method, path, summary, request, answer in _OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, request, answer)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headwater",
            "version": headwater.__version__,
            "description": "OpenAI-compatible API. Errors carry a message that says what was given and what would fit.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
    return msgspec.json.encode(document)


def docs_page() -> bytes:
    """A page that renders `/openapi.json`; needs no other host."""
    return files("headwater.frontend.openai").joinpath("docs.html").read_bytes()


def _operation(
    path: str, summary: str, request: type[msgspec.Struct] | None, answer: type[msgspec.Struct]
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if answer in _STREAMED:
        content["text/event-stream"] = {"schema": _ref(_STREAMED[answer])}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "4XX": _failure("The request cannot be served as it stands"),
            "5XX": _failure("Not now, or not here"),
        },
    }
    if request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _failure(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _ref(answers.ErrorAnswer)}}}


def _ref(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}
