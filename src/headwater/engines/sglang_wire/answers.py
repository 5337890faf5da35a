"""The chunks of a streamed answer of SGLang, as what is new in each of them.

By default every chunk repeats all tokens from the start; with `--incremental-streaming-output` it brings the new ones
alone, and log probabilities likewise. SGLang looks for no stop tokens where the end token is to be ignored, so these
are looked for here, and the rest of the answer is not wanted then.
"""

from http import HTTPStatus
from typing import Any

import msgspec

from headwater.errors import ContextTooLong, HeadwaterError, InvalidRequest, Overloaded, WorkerLost
from headwater.protocol.request import EngineRequest, SequenceOutput, TokenLogprobs
from headwater.types import TOKEN_ID_BYTES

_TOO_LONG = ("context length", "maximum allowed length")
_Logprob = tuple[float | None, int, Any]
"""Value, token, and its text, which is not asked for."""


class _Finish(msgspec.Struct):
    type: str
    matched: int | list[int] | str | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    cached_tokens: int | None = None
    num_retractions: int = 0
    """How often it has lost its place in the cache so far."""
    output_token_logprobs: list[_Logprob] | None = None
    output_top_logprobs: list[list[_Logprob] | None] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class Chunk(msgspec.Struct):
    """One event of the stream, or one item of the iterator."""

    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: _Error | str | None = None


class SglangReader:
    """Of one answer. Says None to what brings nothing."""

    def __init__(self, request: EngineRequest, *, incremental: bool) -> None:
        params = request.sampling
        self.left = False
        """Whether it was ended here, and SGLang goes on."""
        self.num_retractions = 0
        self._stream = request.stream
        self._incremental = incremental
        self._num_logprobs = params.logprobs
        self._first = True
        self._seen = 0
        """Tokens read; of a cumulative answer the next chunk repeats them."""
        self._stops = frozenset(params.stop_token_ids if params.goes_past_end else ())
        self._least = max(0, params.min_tokens - len(request.resumed_tokens) // TOKEN_ID_BYTES)

    def read(self, chunk: Chunk) -> SequenceOutput | None:
        """Raises `HeadwaterError` when it tells of a failure."""
        if chunk.error is not None:
            raise _failure(chunk.error)
        meta = chunk.meta_info or _Meta()
        self.num_retractions = max(self.num_retractions, meta.num_retractions)
        finish = meta.finish_reason
        if finish is not None and finish.type not in ("stop", "length"):
            raise gave_up(finish.status_code, finish.message or f"SGLang ended this sequence: {finish.type}")
        start = 0 if self._incremental else self._seen
        token_ids = chunk.output_ids[start:]
        told = self._logprobs(meta, start, len(token_ids))
        reason, stop = self._end(token_ids, finish)
        self._seen += len(token_ids) + (stop is not None)
        if not token_ids and reason is None:
            return None
        cached = meta.cached_tokens if self._first else None
        self._first = False
        return SequenceOutput(
            self._stream, token_ids, reason, stop, cached, None if told is None else told[: len(token_ids)]
        )

    def _end(self, token_ids: list[int], finish: _Finish | None) -> tuple[str | None, int | None]:
        """Why it ends with these, and the stop token, which is taken off."""
        for number in range(max(0, self._least - self._seen), len(token_ids) if self._stops else 0):
            if token_ids[number] in self._stops:
                stop = token_ids[number]
                del token_ids[number:]
                self.left = finish is None
                return "stop", stop
        if finish is None:
            return None, None
        if finish.type == "stop":
            if isinstance(finish.matched, str):
                raise WorkerLost(f"SGLang stopped this sequence: {finish.matched}")
            return "stop", token_ids.pop() if token_ids else None
        return "length", None

    def _logprobs(self, meta: _Meta, start: int, count: int) -> list[TokenLogprobs] | None:
        if self._num_logprobs is None:
            return None
        chosen = (meta.output_token_logprobs or [])[start : start + count]
        tops = (meta.output_top_logprobs or [])[start : start + count]
        if len(chosen) != count:
            raise WorkerLost(f"SGLang told {len(chosen)} log probabilities of {count} tokens")
        tops += [None] * (count - len(tops))
        return [_told(one, top or [], self._num_logprobs) for one, top in zip(chosen, tops, strict=True)]


def _told(chosen: _Logprob, top: list[_Logprob], most: int) -> TokenLogprobs:
    ranked = sorted(((value or 0.0, token) for value, token, _ in top), key=lambda pair: -pair[0])
    rank = next((place for place, (_, token) in enumerate(ranked, 1) if token == chosen[1]), len(ranked) + 1)
    ranked = ranked[:most]
    return TokenLogprobs(chosen[0] or 0.0, rank, [token for _, token in ranked], [value for value, _ in ranked])


def gave_up(status: int | None, message: str) -> HeadwaterError:
    """What an end other than stop and length means."""
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return Overloaded(f"SGLang is full: {message}")
    if status is not None and HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        too_long = any(mark in message for mark in _TOO_LONG)
        return (ContextTooLong if too_long else InvalidRequest)(f"SGLang: {message}")
    return WorkerLost(f"SGLang gave up on this sequence: {message}")


def _failure(error: _Error | str) -> HeadwaterError:
    if isinstance(error, str):
        return gave_up(HTTPStatus.BAD_REQUEST, error)
    return gave_up(error.code if isinstance(error.code, int) else None, error.message)
