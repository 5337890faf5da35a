"""vLLM's own server, 0.10 and later: token ids through `/v1/completions`, events through `/kv_event_sources`.

Written against 0.32. A server without `/kv_event_sources`, or with events off, is attached all the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from headwater.engines.attached.dialects.base import Description, ServerLoad
from headwater.engines.attached.dialects.completions import Choice, Logprobs, Usage, chunk_of, completion_of
from headwater.engines.attached.http import Server
from headwater.engines.attached.prometheus import samples, sums
from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.kv_params import kv_transfer_params, ticket_of
from headwater.engines.limits import check_resumable
from headwater.errors import EngineFailed, WorkerLost
from headwater.protocol.request import EngineRequest, SequenceOutput, StructuredSpec, TokenLogprobs
from headwater.types import TOKEN_ID_BYTES

_METRICS = ("vllm:num_requests_", "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total")
_PATH = "/v1/completions"
_TOKEN_MARK = "token_id:"


class VllmDialect:
    """See `TokenDialect`."""

    name = "vllm"

    async def describe(self, server: Server) -> Description:
        version = await server.find("/version")
        models = await server.get_json("/v1/models")
        entries = [entry for entry in models.get("data", ()) if entry.get("owned_by") == "vllm"]
        if version is None or not entries:
            raise EngineFailed("this server is not vLLM")
        base = [entry for entry in entries if entry.get("parent") is None]
        names = [str(entry["id"]) for entry in base or entries]
        first = (base or entries)[0]
        metrics = (await server.get("/metrics")).decode(errors="replace")
        cache = next((sample.labels for sample in samples(metrics, ("vllm:cache_config_info{",))), {})
        return Description(
            model=names[0],
            aliases=names[1:],
            adapters=[str(entry["id"]) for entry in entries if entry.get("parent") is not None],
            version=str(version.get("version", "")),
            max_model_len=first.get("max_model_len"),
            block_size=_whole(cache, "effective_attention_block_size") or _whole(cache, "block_size"),
            kv_blocks=max(0, (_whole(cache, "num_gpu_blocks") or 0) - 1),
            feeds=_feeds(server, await server.find("/kv_event_sources")),
            events_hint="start vLLM with --kv-events-config to change that",
            files=first.get("root"),
        )

    async def is_healthy(self, server: Server) -> None:
        await server.get("/health")

    async def load(self, server: Server) -> ServerLoad | None:
        found = sums((await server.get("/metrics")).decode(errors="replace"), _METRICS)
        return ServerLoad(
            num_running=int(found.get("vllm:num_requests_running", 0)),
            num_waiting=int(found.get("vllm:num_requests_waiting", 0)),
            kv_usage=found.get("vllm:kv_cache_usage_perc", 0.0),
            preemptions=int(found.get("vllm:num_preemptions_total", 0)),
        )

    async def tokenize(self, server: Server, model: str, text: str) -> list[int]:
        answer = await server.post_json("/tokenize", {"model": model, "prompt": text})
        return cast("list[int]", answer["tokens"])

    def request(self, model: str, request: EngineRequest, tokens: Sequence[int], salt: str | None) -> tuple[str, bytes]:
        return _PATH, msgspec.json.encode({**_body(model, request, tokens, salt), "stream": True})

    def prefill(
        self, model: str, request: EngineRequest, tokens: Sequence[int], salt: str | None
    ) -> tuple[str, dict[str, Any]]:
        """Only an answer in one piece says where the KV is."""
        return _PATH, _body(model, request, tokens, salt)

    def prefilled(self, request: EngineRequest, answer: Any) -> SequenceOutput:
        whole = completion_of(answer)
        reader = self.reader(request)
        output = reader.output(whole.choices[0], whole.usage) if whole.choices else None
        if output is None or output.finish_reason is None:
            raise WorkerLost("the attached server gave no token for a prompt")
        if whole.kv_transfer_params:
            output.ticket = ticket_of(whole.kv_transfer_params)
        return output

    async def sleep(self, server: Server) -> None:
        """Offered by servers started with `--enable-sleep-mode` and VLLM_SERVER_DEV_MODE=1."""
        await server.post("/sleep?level=1", b"")

    async def wake(self, server: Server) -> None:
        await server.post("/wake_up", b"")

    def reader(self, request: EngineRequest) -> "VllmReader":
        return VllmReader(request.stream, request.sampling.logprobs)


def _body(model: str, request: EngineRequest, tokens: Sequence[int], salt: str | None) -> dict[str, Any]:
    params = request.sampling
    num_resumed = len(request.resumed_tokens) // TOKEN_ID_BYTES
    body: dict[str, Any] = {
        "model": request.adapter or model,
        "prompt": list(tokens),
        "return_token_ids": True,
        "max_tokens": params.max_tokens - num_resumed,
        "min_tokens": max(0, params.min_tokens - num_resumed),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.goes_past_end,
    }
    if not params.seed_drawn and params.temperature:
        body["seed"] = params.seed + num_resumed
    if params.stop_token_ids:
        body["stop_token_ids"] = params.stop_token_ids
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if params.structured is not None:
        check_resumable(params, num_resumed, "vLLM")
        body["structured_outputs"] = _structured(params.structured)
    if request.priority:
        body["priority"] = -request.priority
    if salt is not None:
        body["cache_salt"] = salt
    if (kv_params := kv_transfer_params(request)) is not None:
        body["kv_transfer_params"] = kv_params
    return body


class VllmReader:
    """See `AnswerReader`."""

    def __init__(self, stream: int, num_logprobs: int | None) -> None:
        self._stream = stream
        self._num_logprobs = num_logprobs

    def read(self, event: bytes) -> SequenceOutput | None:
        chunk = chunk_of(event)
        return self.output(chunk.choices[0], chunk.usage) if chunk is not None else None

    def output(self, choice: Choice, usage: Usage | None) -> SequenceOutput | None:
        token_ids = choice.token_ids or []
        reason, stop_token_id = choice.finish_reason, None
        told = None
        if self._num_logprobs is not None:
            told = _logprobs(choice.logprobs, self._num_logprobs) if choice.logprobs is not None else []
        if reason == "stop" and token_ids:
            stop_token_id = token_ids.pop()
            told = told[: len(token_ids)] if told is not None else None
        elif reason == "abort":
            raise WorkerLost("the attached server aborted this sequence")
        if not token_ids and reason is None:
            return None
        cached = usage.cached_tokens if usage is not None else None
        known = reason if reason in (None, "stop", "length") else "stop"
        return SequenceOutput(self._stream, token_ids, known, stop_token_id, cached, told)


def _logprobs(found: Logprobs, most: int) -> list[TokenLogprobs]:
    tops = found.top_logprobs or [None] * len(found.tokens)
    told: list[TokenLogprobs] = []
    for token, logprob, top in zip(found.tokens, found.token_logprobs, tops, strict=True):
        ranked = sorted(((value, _token_id(name)) for name, value in (top or {}).items()), key=lambda pair: -pair[0])
        chosen = _token_id(token)
        rank = next((place for place, (_, other) in enumerate(ranked, 1) if other == chosen), len(ranked) + 1)
        ranked = ranked[:most]
        value = logprob if logprob is not None else 0.0
        told.append(TokenLogprobs(value, rank, [other for _, other in ranked], [value for value, _ in ranked]))
    return told


def _token_id(name: str) -> int:
    try:
        return int(name.removeprefix(_TOKEN_MARK))
    except ValueError as error:
        raise WorkerLost("the attached server names tokens by their text, although asked for ids") from error


def _structured(spec: StructuredSpec) -> dict[str, Any]:
    match spec.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": msgspec.json.decode(spec.spec)}
        case "choice":
            return {"choice": msgspec.json.decode(spec.spec)}
        case _:
            return {spec.kind: spec.spec}


def _whole(labels: Mapping[str, str], name: str) -> int | None:
    value = labels.get(name, "")
    return int(value) if value.isdigit() and int(value) else None


def _feeds(server: Server, sources: Any) -> list[FeedAddress]:
    host = urlsplit(server.address.url).hostname or "127.0.0.1"
    return [
        FeedAddress.published(source["endpoint"], source.get("topic", ""), source.get("replay_endpoint"), host)
        for source in (sources.values() if isinstance(sources, dict) else ())
        if source.get("publisher") == "zmq" and source.get("enable_kv_cache_events", True)
    ]
