"""A server that speaks the wire formats of `trtllm-serve` (1.4, as documented), strict about unknown fields, around the
mocker engine.

It stands for a server that cannot be started without its GPUs: token ids through `/v1/completions` without
detokenizing, log probabilities by the texts of tokens, KV events and iteration statistics that are gone once they are
read, context-only and generation-only requests.
"""

import asyncio
import json
from typing import Any, Literal

import msgspec
from aiohttp import web

from headwater.config.schema import EngineConfig
from headwater.protocol.request import SamplingParams, SequenceOutput
from trtllm_model import MODEL, Fabric, MockedExecutor

__all__ = ["MODEL", "Fabric", "TrtllmDouble"]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class LoRARequest(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json", "json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    schema: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    format: dict[str, Any] | None = None


class DisaggregatedParams(msgspec.Struct, forbid_unknown_fields=True):
    request_type: str
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    encoded_opaque_state: str | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: dict[str, Any] | None = None
    return_prompt_token_ids_b64: bool = False
    resolved_thinking: bool | None = None


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """All that `trtllm-serve` takes."""

    model: str
    prompt: list[int] | str
    best_of: int | None = None
    echo: bool | None = False
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1
    presence_penalty: float | None = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    lora_request: LoRARequest | None = None
    prompt_ignore_length: int | None = 0
    use_beam_search: bool = False
    top_k: int = 0
    top_p_min: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    length_penalty: float | None = None
    early_stopping: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    return_context_logits: bool = False
    detokenize: bool = True
    thinking_token_budget: int | None = None
    add_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    disaggregated_params: DisaggregatedParams | None = None
    priority: float | None = None
    conversation_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.priority is not None and not 0 <= self.priority <= 1:
            raise ValueError(f"priority {self.priority} is not between 0 and 1")
        if self.stream_options is not None and not self.stream:
            raise ValueError("Stream options can only be defined when stream is true.")
        if any(not -100 <= bias <= 100 for bias in (self.logit_bias or {}).values()):
            raise ValueError("logit_bias must be in [-100, 100]")


class TrtllmDouble:
    """One server."""

    def __init__(
        self, config: EngineConfig, fabric: Fabric | None = None, *, events: int = 4096, prometheus: bool = True
    ) -> None:
        self.port = 0
        self.executor = MockedExecutor(config, events=events)
        self.fabric = fabric or Fabric()
        self.status: int | None = None
        """Answer generations with this instead."""
        self.status_of: str | None = None
        """Of these alone (`context_only`, `generation_only`); None: of all."""
        self.keeps_the_end = False
        self.tokenizes = True
        self.version = "1.4.0"
        self.token_offset = 0
        """Added to every number of tokens that it tells of a text."""
        self.fields: tuple[str, ...] = CompletionRequest.__struct_fields__
        """Of a completion, as it says itself."""
        self.metrics_read = 0
        """How often iteration statistics were taken away."""
        self.drained = 0
        self.events_status: int | None = None
        self.events_method = "POST"
        self.bodies: list[dict[str, Any]] = []
        self.prometheus = prometheus

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        return len(self.executor.open)

    async def start(self) -> None:
        """Begin a life; the port stays."""
        await self.executor.start()
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.get("/server_info", self._server_info),
                web.get("/metrics", self._metrics),
                web.get("/prometheus/metrics", self._gauges),
                web.get("/openapi.json", self._openapi),
                web.route("*", "/kv_cache_events", self._kv_cache_events),
                web.post("/v1/completions", self._complete),
                web.post("/_internal/tokenize", self._tokenize),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """As a process that is killed: connections break."""
        await self._runner.cleanup()
        await self.executor.close()

    # ---- pages

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": self.version})

    async def _models(self, _: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "created": 1, "owned_by": "tensorrt_llm"}
        return _json({"object": "list", "data": [entry]})

    async def _server_info(self, _: web.Request) -> web.Response:
        config = self.executor.config
        sizes = {"max_batch_size": config.max_num_seqs, "tokens_per_block": config.block_size}
        return _json({"disaggregated_params": {}, "kv_cache_hash_algo": "v1", **sizes})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.metrics_read += 1
        return _json(self.executor.drain_stats())

    async def _gauges(self, _: web.Request) -> web.Response:
        if not self.prometheus:
            return web.Response(status=404)
        load = self.executor.load()
        labels = '{engine_type="undefined",model_name="undefined"}'
        values = {
            "num_requests_running": load.num_running,
            "num_requests_waiting": load.num_waiting,
            "kv_cache_utilization": 1 - load.kv_blocks_free / load.kv_blocks_total,
            "kv_cache_max_blocks": load.kv_blocks_total,
            "kv_cache_tokens_per_block": self.executor.config.block_size,
        }
        return web.Response(text="".join(f"trtllm_{name}{labels} {value}\n" for name, value in values.items()))

    async def _openapi(self, _: web.Request) -> web.Response:
        fields: dict[str, Any] = {name: {} for name in self.fields}
        return _json({"openapi": "3.1.0", "components": {"schemas": {"CompletionRequest": {"properties": fields}}}})

    async def _kv_cache_events(self, request: web.Request) -> web.Response:
        if request.method != self.events_method:
            return _json({"detail": "Method Not Allowed"}, 405)
        self.drained += 1
        taken = self.executor.drain_events()
        return _json(taken) if self.events_status is None else _json({"error": "ill"}, self.events_status)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.Response(status=404)
        ids = self._ids_of((await request.json())["prompt"])
        return _json({"count": len(ids), "tokens": ids})

    def _ids_of(self, text: str) -> list[int]:
        return list(self._tokenizer().encode(text).ids) + [0] * self.token_offset

    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.executor.config.tokenizer))

    # ---- generation

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = msgspec.json.decode(raw, type=CompletionRequest)
        except msgspec.ValidationError as error:
            return _json({"error": str(error)}, 400)
        self.bodies.append(json.loads(raw))
        params = body.disaggregated_params
        if self.status is not None and self.status_of in (None, params and params.request_type):
            return _error("no room", self.status)
        if params is not None and params.request_type == "generation_only":
            return await self._generate_only(request, body, params)
        stream = self._submit(body, None)
        try:
            return await self._answer(request, body, stream)
        finally:
            self.executor.abort(stream)

    async def _generate_only(
        self, request: web.Request, body: CompletionRequest, params: DisaggregatedParams
    ) -> web.StreamResponse:
        assert params.ctx_request_id is not None
        assert params.encoded_opaque_state is not None
        assert not isinstance(body.prompt, str)
        first = self.fabric.take(params.ctx_request_id, params.encoded_opaque_state, body.prompt)
        if first is None:
            if self.fabric.hangs:
                await asyncio.Event().wait()
            return _error("KV cache transfer failed", 500)
        assert [first] == params.first_gen_tokens
        head = SequenceOutput(0, [first])
        if body.max_tokens == 1:
            head.finish_reason = "length"
            return await self._stream(request, body, None, head)
        stream = self._submit(body, first)
        try:
            return await self._stream(request, body, stream, head)
        finally:
            self.executor.abort(stream)

    async def _answer(self, request: web.Request, body: CompletionRequest, stream: int) -> web.StreamResponse:
        if body.stream:
            return await self._stream(request, body, stream, None)
        queue = self.executor.open[stream].answers
        outputs = [await queue.get()]
        while outputs[-1].finish_reason is None:
            outputs.append(await queue.get())
        self.executor.finished(stream)
        if outputs[-1].error is not None:
            return _error(outputs[-1].error.message, 400)
        return self._whole(body, [token for output in outputs for token in output.token_ids], outputs)

    def _whole(self, body: CompletionRequest, tokens: list[int], outputs: list[SequenceOutput]) -> web.Response:
        prompt = self._ids_of(body.prompt) if isinstance(body.prompt, str) else body.prompt
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": None if body.detokenize else tokens}
        choice |= {"finish_reason": outputs[-1].finish_reason, "stop_reason": None, "disaggregated_params": None}
        document: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice]}
        document["usage"] = self._usage(len(prompt), len(tokens), outputs[0].num_cached_tokens or 0)
        params = body.disaggregated_params
        if params is not None and params.request_type == "context_only":
            number, opaque = self.fabric.keep(prompt, tokens[0])
            choice["disaggregated_params"] = {
                "request_type": "context_only",
                "first_gen_tokens": tokens,
                "ctx_request_id": number,
                "encoded_opaque_state": opaque,
                "first_gen_log_probs": [[{"1": {"logprob": -0.5, "rank": 1}}]] if body.logprobs else None,
                "draft_tokens": None,
                "return_prompt_token_ids_b64": False,
            }
            document["prompt_token_ids"] = prompt
        return _json(document)

    async def _stream(
        self, request: web.Request, body: CompletionRequest, stream: int | None, head: SequenceOutput | None
    ) -> web.StreamResponse:
        queue = self.executor.open[stream].answers if stream is not None else None
        if head is None:
            assert queue is not None
            head = await queue.get()
        if head.error is not None:
            return _error(head.error.message, 400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        output, count, cached = head, 0, head.num_cached_tokens or 0
        while True:
            if output.error is not None or (self.keeps_the_end and output.finish_reason is not None):
                return response
            count += len(output.token_ids)
            await response.write(_event(self._chunk(body, output, count, cached)))
            if output.finish_reason is not None or queue is None:
                break
            output = await queue.get()
        if stream is not None:
            self.executor.finished(stream)
        if body.stream_options is not None and body.stream_options.include_usage:
            usage = self._usage(len(body.prompt), count, cached)
            await response.write(_event({"id": "cmpl-1", "model": MODEL, "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chunk(self, body: CompletionRequest, output: SequenceOutput, count: int, cached: int) -> dict[str, Any]:
        token_ids, stop_reason = list(output.token_ids), None
        if output.finish_reason == "stop" and output.stop_token_id is not None:
            if output.stop_token_id in (body.stop_token_ids or []):
                stop_reason = output.stop_token_id
            if stop_reason is None or body.include_stop_str_in_output:
                token_ids.append(output.stop_token_id)
        choice = {
            "index": 0,
            "text": "" if not body.detokenize else "x" * len(token_ids),
            "token_ids": None if body.detokenize else token_ids,
            "logprobs": self._logprobs(token_ids, output) if body.logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": stop_reason,
            "avg_decoded_tokens_per_iter": None,
        }
        usage = None
        if body.stream_options is not None and body.stream_options.continuous_usage_stats:
            usage = self._usage(len(body.prompt), count, cached)
        return {"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage}

    def _logprobs(self, token_ids: list[int], output: SequenceOutput) -> dict[str, Any]:
        """By texts, which is all that it gives."""
        tokenizer, found = self._tokenizer(), list(output.logprobs or [])
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
        values: list[float] = []
        tops: list[dict[str, float]] = []
        for number, text in enumerate(texts):
            one = found[number] if number < len(found) else None
            values.append(one.logprob if one is not None else 0.0)
            pairs = zip(one.top_ids, one.top_logprobs, strict=True) if one is not None else ()
            top = {tokenizer.decode([token], skip_special_tokens=False): value for token, value in pairs}
            tops.append({text: values[-1]} | top)
        return {"text_offset": [0] * len(texts), "token_logprobs": values, "tokens": texts, "top_logprobs": tops}

    def _usage(self, num_prompt: int, num_generated: int, cached: int) -> dict[str, Any]:
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _submit(self, body: CompletionRequest, first: int | None) -> int:
        params = body.disaggregated_params
        prompt = self._ids_of(body.prompt) if isinstance(body.prompt, str) else body.prompt
        context_only = params is not None and params.request_type == "context_only"
        sampling = SamplingParams(
            max_tokens=1 if context_only else body.max_tokens or 16,
            min_tokens=body.min_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            seed=body.seed or 0,
            stop_token_ids=body.stop_token_ids or [],
            ignore_eos=body.ignore_eos,
            logprobs=body.logprobs or None,
        )
        lora = body.lora_request.lora_int_id if body.lora_request is not None else None
        return self.executor.submit(prompt, sampling, lora=lora, first=first)


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _error(message: str, status: int) -> web.Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return _json({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")
