"""Answers of `/v1/completions` where a server adds token ids to them, as vLLM's and TensorRT-LLM's do."""

from typing import Any

import msgspec

from headwater.engines.attached.http import error_for
from headwater.errors import WorkerLost


class Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    disaggregated_params: dict[str, Any] | None = None
    """Of TensorRT-LLM: where the KV is."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else None


class Completion(msgspec.Struct):
    """An answer in one piece."""

    choices: list[Choice] = []
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """Of vLLM: where the KV is."""


class Chunk(msgspec.Struct):
    """A piece of a streamed answer, or why there is none."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | str | None = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


def chunk_of(event: bytes) -> Chunk | None:
    """None for one that says nothing. Raises what the server says has happened, or `WorkerLost`."""
    try:
        chunk = _decode_chunk(event)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _no_completion(error) from error
    if chunk.error is not None:
        code = chunk.error.get("code") if isinstance(chunk.error, dict) else None
        raise error_for(code if isinstance(code, int) else 500, event, {})
    return chunk if chunk.choices else None


def completion_of(document: Any) -> Completion:
    """Raises `WorkerLost`."""
    try:
        return msgspec.convert(document, Completion)
    except msgspec.ValidationError as error:
        raise _no_completion(error) from error


def _no_completion(error: Exception) -> WorkerLost:
    return WorkerLost(f"the attached server sent what is no completion: {error}")
