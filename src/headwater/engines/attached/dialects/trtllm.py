"""TensorRT-LLM's own server, `trtllm-serve`: token ids through `/v1/completions`, events drained from
`/kv_cache_events`.

Written against 1.4; not run on a GPU. Which request fields a server takes is read from its `/openapi.json`, because it
refuses those it does not know: a field that matters is then refused here, by name, and a hint is left out. Load comes
from `/prometheus/metrics`, where the server was told to keep them; `/metrics` is never read, since reading it takes
its contents from whoever else wants them.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import msgspec

from headwater.engines.attached.dialects.base import Description, ServerLoad
from headwater.engines.attached.dialects.completions import Choice, Logprobs, Usage, chunk_of, completion_of
from headwater.engines.attached.http import Server
from headwater.engines.attached.prometheus import sums
from headwater.engines.texts import ModelTexts
from headwater.engines.trtllm_words import (
    DEFAULT_BLOCK_SIZE,
    WRITTEN_FOR,
    adapter_number,
    choice_regex,
    generation_only,
    is_known,
    num_resumed,
    priority_of,
    schema_of,
    seed_of,
    ticket_of,
)
from headwater.errors import EngineFailed, InvalidRequest, ModelNotFound, WorkerLost
from headwater.protocol.request import EngineRequest, SequenceOutput, StructuredSpec, TokenLogprobs

_log = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
_EVENTS = "/kv_cache_events"
_METRICS = ("trtllm_num_requests_", "trtllm_kv_cache_", "trtllm_num_paused_requests")
_NOT_IN_1_4 = frozenset(("cache_salt",))
"""Of the fields that we know, where a server does not say which it takes."""
_HINTS = frozenset(("priority", "stream_options", "include_stop_str_in_output"))
"""Left out where the server does not know them."""
_WHY = {
    "cache_salt": "it keeps nobody's cache apart for prompts that are token ids; --engine trtllm does",
}


class TrtllmDialect:
    """See `TokenDialect`."""

    name = "trtllm"

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self._adapters = adapters
        """Their folders on the server, which names none itself."""
        self._fields: frozenset[str] | None = None
        """Of a completion; None: the server does not say."""
        self._says_no_salts = False
        """The log, once."""
        self._words = Words({}, frozenset())

    async def describe(self, server: Server) -> Description:
        version = await server.find("/version")
        models = await server.get_json("/v1/models")
        entries = models.get("data", ()) if isinstance(models, dict) else ()
        names = [str(entry["id"]) for entry in entries if entry.get("owned_by") == "tensorrt_llm"]
        if version is None or not names:
            raise EngineFailed("this server is not TensorRT-LLM")
        release = str(version.get("version", ""))
        if not is_known(release):
            _log.warning("%s is TensorRT-LLM %s: written for %s", server.address.url, release, WRITTEN_FOR)
        self._fields = _known_fields(await server.find("/openapi.json"))
        if not self._says_no_salts and "cache_salt" in self._unknown({"cache_salt"}):
            self._says_no_salts = True
            _log.info("%s takes no cache salts: requests of tenants with keys will be refused", server.address.url)
        info = await server.find("/server_info")
        info = info if isinstance(info, dict) else {}
        metrics = sums(await _prometheus(server) or "", _METRICS)
        block_size = info.get("tokens_per_block") or int(metrics.get("trtllm_kv_cache_tokens_per_block", 0))
        return Description(
            model=names[0],
            aliases=names[1:],
            adapters=list(self._adapters),
            version=release,
            block_size=int(block_size or DEFAULT_BLOCK_SIZE),
            kv_blocks=int(metrics.get("trtllm_kv_cache_max_blocks", 0)),
            max_num_seqs=info.get("max_batch_size"),
            drained=_EVENTS,
            adapter_numbers={adapter_number(folder): name for name, folder in self._adapters.items()},
            events_hint="set kv_cache_config.event_buffer_max_size to change that",
            files=names[0],
        )

    async def is_healthy(self, server: Server) -> None:
        await server.get("/health")

    async def load(self, server: Server) -> ServerLoad | None:
        text = await _prometheus(server)
        found = sums(text or "", _METRICS)
        if "trtllm_num_requests_running" not in found:
            return None
        return ServerLoad(
            num_running=int(found["trtllm_num_requests_running"]),
            num_waiting=int(found.get("trtllm_num_requests_waiting", 0)),
            kv_usage=found.get("trtllm_kv_cache_utilization", 0.0),
        )

    async def tokenize(self, server: Server, model: str, text: str) -> "list[int] | int":
        """The ids; only how many they are, where the server says no more."""
        try:
            answer = await server.post_json("/_internal/tokenize", {"model": model, "prompt": text})
            return cast("list[int]", answer["tokens"])
        except (ModelNotFound, KeyError):
            body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0.0}
            answer = await server.post_json(COMPLETIONS, body)
            return int(answer["usage"]["prompt_tokens"])

    async def learn(self, texts: ModelTexts) -> None:
        """Log probabilities come with the texts of tokens, not with their ids."""
        self._words = await asyncio.to_thread(Words.of, texts)

    def request(self, model: str, request: EngineRequest, tokens: Sequence[int], salt: str | None) -> tuple[str, bytes]:
        body = self._body(model, request, tokens, salt)
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if request.ticket:
            body["disaggregated_params"] = generation_only(request.ticket)
        return COMPLETIONS, msgspec.json.encode(self._understood(body))

    def prefill(
        self, model: str, request: EngineRequest, tokens: Sequence[int], salt: str | None
    ) -> tuple[str, dict[str, Any]]:
        """Only an answer in one piece says where the KV is."""
        body = self._body(model, request, tokens, salt)
        return COMPLETIONS, self._understood({**body, "disaggregated_params": {"request_type": "context_only"}})

    def prefilled(self, request: EngineRequest, answer: Any) -> SequenceOutput:
        whole = completion_of(answer)
        choice = whole.choices[0] if whole.choices else Choice()
        if choice.finish_reason == "not_finished":
            choice.finish_reason = "length"
        output = TrtllmReader(request.stream, None, self._words).output(choice, whole.usage)
        if output is None or output.finish_reason is None:
            raise WorkerLost("the attached server gave no token for a prompt")
        if choice.disaggregated_params and output.finish_reason == "length":
            output.ticket = ticket_of(choice.disaggregated_params)
        return output

    def _body(self, model: str, request: EngineRequest, tokens: Sequence[int], salt: str | None) -> dict[str, Any]:
        params = request.sampling
        resumed = num_resumed(request)
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(tokens),
            "detokenize": False,
            "max_tokens": params.max_tokens - resumed,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": 1 if params.temperature == 0 else params.top_k,
            # Stop tokens that are left out of the ids would not be left out of their log probabilities.
            "include_stop_str_in_output": True,
        }
        optional: dict[str, tuple[Any, Any]] = {
            "min_tokens": (max(0, params.min_tokens - resumed), 0),
            "min_p": (params.min_p, 0.0),
            "presence_penalty": (params.presence_penalty, 0.0),
            "frequency_penalty": (params.frequency_penalty, 0.0),
            "repetition_penalty": (params.repetition_penalty, 1.0),
            "ignore_eos": (params.goes_past_end, False),
            "seed": (seed_of(request, resumed), None),
            "stop_token_ids": (params.stop_token_ids, []),
            "logit_bias": ({str(token): bias for token, bias in params.logit_bias.items()}, {}),
            # 0 is taken for no log probabilities at all.
            "logprobs": (None if params.logprobs is None else max(1, params.logprobs), None),
            "response_format": (None if params.structured is None else _structured(params.structured), None),
            "priority": (priority_of(request.priority) if request.priority else None, None),
            "cache_salt": (salt, None),
            "lora_request": (self._lora(request.adapter), None),
        }
        return body | {name: value for name, (value, default) in optional.items() if value != default}

    def reader(self, request: EngineRequest) -> "TrtllmReader":
        return TrtllmReader(request.stream, request.sampling.logprobs, self._words)

    def _lora(self, adapter: str | None) -> dict[str, Any] | None:
        if adapter is None:
            return None
        folder = self._adapters.get(adapter)
        if folder is None:
            known = ", ".join(self._adapters) or "none is given"
            raise InvalidRequest(f"there is no adapter {adapter!r}: {known}", param="model")
        return {"lora_name": adapter, "lora_int_id": adapter_number(folder), "lora_path": folder}

    def _unknown(self, names: Set[str]) -> Set[str]:
        """Of these, the fields that this server refuses."""
        return names & _NOT_IN_1_4 if self._fields is None else names - self._fields

    def _understood(self, body: dict[str, Any]) -> dict[str, Any]:
        """Raises `InvalidRequest` for a field that this server does not take and that cannot be done without."""
        unknown = self._unknown(body.keys())
        for name in sorted(unknown - _HINTS):
            why = _WHY.get(name, "this release of it does not know the field")
            raise InvalidRequest(f"trtllm-serve: {why}", param=name)
        return {name: value for name, value in body.items() if name not in unknown}


class Words:
    """What ids TensorRT-LLM means by the texts of tokens."""

    def __init__(self, ids: Mapping[str, int], ends: frozenset[int]) -> None:
        self.ends = ends
        """The model's end tokens."""
        self._ids = ids

    @classmethod
    def of(cls, texts: ModelTexts) -> "Words":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(texts.tokenizer_json.decode())
        ids: dict[str, int] = {}
        shared: set[str] = set()
        for number in range(tokenizer.get_vocab_size()):
            text = tokenizer.decode([number], skip_special_tokens=False)
            if ids.setdefault(text, number) != number:
                shared.add(text)
        for text in shared:
            del ids[text]
        return cls(ids, frozenset(texts.eos_token_ids))

    def id_of(self, text: str) -> int | None:
        """None where several tokens have that text."""
        return self._ids.get(text)


class TrtllmReader:
    """See `AnswerReader`."""

    def __init__(self, stream: int, num_logprobs: int | None, words: Words) -> None:
        self._stream = stream
        self._num_logprobs = num_logprobs
        self._words = words
        self._told_cached = False

    def read(self, event: bytes) -> SequenceOutput | None:
        chunk = chunk_of(event)
        return self.output(chunk.choices[0], chunk.usage) if chunk is not None else None

    def output(self, choice: Choice, usage: Usage | None) -> SequenceOutput | None:
        token_ids, reason = choice.token_ids or [], choice.finish_reason
        if reason not in (None, "stop", "length"):
            raise WorkerLost(f"the attached server gave up on this sequence ({reason})")
        told = self._logprobs(token_ids, choice.logprobs) if self._num_logprobs is not None else None
        stop_token_id = None
        if reason == "stop":
            stop_token_id = choice.stop_reason if isinstance(choice.stop_reason, int) else None
            if token_ids and (token_ids[-1] == stop_token_id or token_ids[-1] in self._words.ends):
                stop_token_id = token_ids.pop()
                told = told[: len(token_ids)] if told is not None else None
        if not token_ids and reason is None:
            return None
        return SequenceOutput(self._stream, token_ids, reason, stop_token_id, self._cached(usage), told)

    def _cached(self, usage: Usage | None) -> int | None:
        """With the first output only."""
        if self._told_cached:
            return None
        self._told_cached = True
        return usage.cached_tokens if usage is not None else None

    def _logprobs(self, token_ids: Sequence[int], found: Logprobs | None) -> list[TokenLogprobs]:
        if found is None:
            raise WorkerLost("the attached server left out log probabilities")
        tops = found.top_logprobs or [None] * len(token_ids)
        if {len(found.tokens), len(found.token_logprobs), len(tops)} != {len(token_ids)}:
            raise WorkerLost("the attached server left out log probabilities of some tokens")
        return [self._one(*row) for row in zip(token_ids, found.tokens, found.token_logprobs, tops, strict=True)]

    def _one(self, chosen: int, text: str, logprob: float | None, top: Mapping[str, float] | None) -> TokenLogprobs:
        """Tokens that share a text with others cannot be told apart and are left out, except the chosen one."""
        ranked = sorted((top or {}).items(), key=lambda pair: -pair[1])
        rank = next((place for place, (name, _) in enumerate(ranked, 1) if name == text), len(ranked) + 1)
        known = [
            (number, value)
            for name, value in ranked[: self._num_logprobs]
            if (number := chosen if name == text else self._words.id_of(name)) is not None
        ]
        value = logprob if logprob is not None else 0.0
        return TokenLogprobs(value, rank, [number for number, _ in known], [value for _, value in known])


def _structured(spec: StructuredSpec) -> dict[str, Any]:
    match spec.kind:
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            # Not `json_schema`, which would be unwrapped where the schema happens to have a member `schema`.
            return {"type": "json", "schema": schema_of(spec)}
        case "regex":
            return {"type": "regex", "regex": spec.spec}
        case "choice":
            return {"type": "regex", "regex": choice_regex(spec)}
        case _:
            return {"type": "ebnf", "ebnf": spec.spec}


def _known_fields(document: Any) -> frozenset[str] | None:
    try:
        return frozenset(document["components"]["schemas"]["CompletionRequest"]["properties"])
    except (KeyError, TypeError):
        return None


async def _prometheus(server: Server) -> str | None:
    try:
        return (await server.get("/prometheus/metrics")).decode(errors="replace")
    except (ModelNotFound, InvalidRequest):
        return None
