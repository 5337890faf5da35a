"""Answers of the OpenAI API as typed structs. Member order is the order on the wire."""

from typing import Any

import msgspec


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class FunctionCallAnswer(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallAnswer(msgspec.Struct):
    id: str
    function: FunctionCallAnswer
    type: str = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCallAnswer | None = None


class ChatMessageAnswer(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallAnswer] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(msgspec.Struct):
    """`chat.completion`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    nvext: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """`chat.completion.chunk`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    nvext: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(msgspec.Struct):
    """`text_completion`, whole or one event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType | None = msgspec.UNSET
    nvext: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ModelAnswer(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    context_window: int


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelAnswer]


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every answer with a status of 400 or above, and the last event of a stream that failed."""

    error: ErrorDetail
