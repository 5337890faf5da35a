"""A server that speaks vLLM's wire formats (0.32, as recorded), strict about unknown fields, around the mocker engine.

It stands for a real `vllm serve` where that cannot be started: token ids through `/v1/completions`, KV events over
ZeroMQ with replay, load through `/metrics`. It does not say how much of a prompt was cached, as vLLM by default.
"""

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from block_texts import BlockTexts, salted
from headwater.config.schema import EngineConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.errors import HeadwaterError
from headwater.kv.identity import split_block_ids
from headwater.protocol.events import BlocksRemoved, BlocksStored, WorkerEvent
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput, TokenLogprobs
from vllm_publisher import Publisher

MODEL = "double"
ADAPTER = "tuned"


class CompletionBody(msgspec.Struct, forbid_unknown_fields=True):
    """What vLLM takes of what we send, and no more."""

    model: str
    prompt: list[int] | str
    max_tokens: int = 16
    min_tokens: int = 0
    stream: bool = False
    return_token_ids: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    seed: int | None = None
    stop_token_ids: list[int] = []
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    return_tokens_as_token_ids: bool = False
    structured_outputs: dict[str, Any] | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class VllmDouble:
    """Also the listener of its engine."""

    def __init__(self, config: EngineConfig, folder: Path, *, events: bool = True) -> None:
        self.port = 0
        self.status: int | None = None
        """Answer generations with this instead."""
        self.location: str | None = None
        """Send generations there."""
        self.metrics_status: int | None = None
        self.metrics_asked = 0
        self.goes_on: asyncio.Event | None = None
        """It takes connections and says nothing until then, as a process that is stopped."""
        self.keeps_the_end = False
        """Answers break off before the event that says why they end."""
        self.has_models = True
        """If not, it names none, as a router does before its workers are there."""
        self.created: object = None
        """What it says of its model's age, if anything."""
        self.tokenize_offset = 0
        self.sleep_mode = True
        self.asleep = 0
        self.sleeps_asked = 0
        self.gives_tickets = False
        """As with a connector that moves KV by itself."""
        self.tickets: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self._config = msgspec.structs.replace(config, engine="mocker", served_model_name=(MODEL,))
        self._folder = folder
        self._events = events
        self._publisher: Publisher | None = None
        self._answers: dict[int, asyncio.Queue[SequenceOutput]] = {}
        self._sequences: dict[int, tuple[list[int], str | None]] = {}
        self._texts = BlockTexts(self._sequences.values)
        self._numbers = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        return len(self._answers)

    @property
    def lengths(self) -> list[int]:
        """Of all sequences so far, prompt and answer."""
        return [len(tokens) for tokens, _ in self._sequences.values()]

    async def start(self) -> None:
        """Begin a life: nothing is cached, events count from 0; the port stays."""
        self._engine = MockerEngine(self._config)
        self._info = await self._engine.start(self, lambda _: None)
        if self._events:
            self._folder.mkdir(exist_ok=True)
            self._publisher = self._publisher or Publisher(self._folder)
            self._publisher.restart()
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/version", self._version),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._sources),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._complete),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As a process that is killed: connections break."""
        for request in list(self._answers):
            self._engine.abort([request])
        self._answers.clear()
        await self._runner.cleanup()
        await self._engine.close()

    async def close(self) -> None:
        await self.stop()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.__exit__, None, None, None)

    # ---- EngineListener

    def on_step(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self._sequences[output.stream][0].extend(output.token_ids)
            if output.stream in self._answers:
                self._answers[output.stream].put_nowait(output)

    def on_events(self, events: list[WorkerEvent]) -> None:
        told = [found for event in events if (found := self._in_vllms_words(event))]
        if told and self._publisher is not None:
            self._publisher.publish(told)

    def on_failed(self, error: HeadwaterError) -> None:
        raise AssertionError(error)

    def _in_vllms_words(self, event: WorkerEvent) -> dict[str, Any] | None:
        size = self._config.block_size
        if isinstance(event, BlocksStored):
            ids = split_block_ids(event.block_ids)
            texts = [self._texts.of(block_id, self._info.card) for block_id in ids]
            return {
                "type": "BlockStored",
                "block_hashes": [_number(block_id) for block_id in ids],
                "parent_block_hash": None if event.parent is None else _number(event.parent),
                "token_ids": [token for _, tokens, _ in texts for token in tokens],
                "block_size": size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None if parent or salt is None else [salt] for parent, _, salt in texts],
                "group_idx": 0,
            }
        if isinstance(event, BlocksRemoved):
            removed = [_number(block_id) for block_id in split_block_ids(event.block_ids)]
            return {"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU", "group_idx": 0}
        return None

    # ---- pages

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": "0.32.0"})

    async def _health(self, _: web.Request) -> web.Response:
        return _json({})

    async def _models(self, _: web.Request) -> web.Response:
        entry = {"id": MODEL, "owned_by": "vllm", "root": "/nowhere", "parent": None}
        entry |= {} if self.created is None else {"created": self.created}
        base = entry | {"max_model_len": self._info.card.max_model_len}
        adapter = {"id": ADAPTER, "owned_by": "vllm", "root": "/nowhere/tuned", "parent": MODEL}
        return _json({"object": "list", "data": [base, adapter] if self.has_models else []})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.metrics_asked += 1
        if self.goes_on is not None:
            await self.goes_on.wait()
        if self.metrics_status is not None:
            return _json({"error": {"message": "ill", "type": "x"}}, self.metrics_status)
        load = self._engine.load()
        usage = 1 - load.kv_blocks_free / load.kv_blocks_total
        labels = f'block_size="{self._config.block_size}",num_gpu_blocks="{load.kv_blocks_total + 1}"'
        lines = [
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{{labels},engine="0",kv_cache_dtype_skip_layers="[]"}} 1.0',
            f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} {load.num_running}',
            f'vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} {load.num_waiting}',
            f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} {load.num_waiting}',
            f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}',
            f'vllm:num_preemptions_total{{engine="0"}} {load.preemptions}',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _sources(self, _: web.Request) -> web.Response:
        if self._publisher is None:
            return _json({"0": {"enable_kv_cache_events": False, "publisher": "null", "endpoint": "tcp://*:5557"}})
        address = self._publisher.address
        source = {"endpoint": address.endpoint, "replay_endpoint": address.replay_endpoint, "topic": address.topic}
        return _json({"0": {"enable_kv_cache_events": True, "publisher": "zmq", **source}})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.sleeps_asked += 1
        if not self.sleep_mode:
            return _json({"detail": "Not Found"}, 404)
        assert not self._answers, "nothing is to be open"
        self.asleep = int(request.query.get("level", "1"))
        return web.Response()

    async def _wake_up(self, request: web.Request) -> web.Response:
        self.asleep = 0
        return web.Response()

    async def _tokenize(self, request: web.Request) -> web.Response:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._config.tokenizer))
        ids = tokenizer.encode((await request.json())["prompt"]).ids
        return _json({"tokens": [token + self.tokenize_offset for token in ids], "count": len(ids)})

    # ---- generation

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.location is not None:
            raise web.HTTPTemporaryRedirect(self.location)
        if self.status is not None:
            return _json({"error": {"message": "no room", "type": "x", "code": self.status}}, self.status)
        raw = await request.read()
        try:
            body = msgspec.json.decode(raw, type=CompletionBody)
        except msgspec.ValidationError as error:
            return _json({"error": {"message": str(error), "type": "BadRequestError", "code": 400}}, 400)
        self.bodies.append(json.loads(raw))
        stream = self._submit(body)
        try:
            return await (self._stream(request, body, stream) if body.stream else self._whole(body, stream))
        finally:
            if self._answers.pop(stream, None) is not None:
                self._engine.abort([stream])

    async def _whole(self, body: CompletionBody, stream: int) -> web.Response:
        answers, outputs = self._answers[stream], list[SequenceOutput]()
        while not outputs or outputs[-1].finish_reason is None:
            outputs.append(await answers.get())
        last = outputs[-1]
        if last.error is not None:
            error = {"message": last.error.message, "type": "x", "code": last.error.http_status}
            return _json({"error": error}, last.error.http_status)
        last.token_ids = [token for output in outputs for token in output.token_ids]
        prompt = list(body.prompt) if isinstance(body.prompt, list) else None
        document: dict[str, Any] = {"id": "cmpl-1", "choices": [_choice(last, prompt, body)]}
        wanted = body.kv_transfer_params
        if self.gives_tickets and wanted is not None and wanted["do_remote_decode"]:
            self.tickets.append(_ticket(self.port, len(self.tickets), len(prompt or ())))
            document["kv_transfer_params"] = self.tickets[-1]
        return _json(document)

    async def _stream(self, request: web.Request, body: CompletionBody, stream: int) -> web.StreamResponse:
        answers = self._answers[stream]
        output = await answers.get()
        if output.error is not None:
            error = {"message": output.error.message, "type": "x", "code": output.error.http_status}
            return _json({"error": error}, output.error.http_status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        prompt: list[int] | None = list(body.prompt) if isinstance(body.prompt, list) else None
        while True:
            if output.error is not None:
                error = {"message": output.error.message, "type": "x", "code": output.error.http_status}
                await response.write(_event({"error": error}))
                break
            if self.keeps_the_end and output.finish_reason is not None:
                return response
            await response.write(_event({"id": "cmpl-1", "choices": [_choice(output, prompt, body)]}))
            prompt = None
            if output.finish_reason is not None:
                break
            output = await answers.get()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """Says the same to all, in pieces of three tokens."""
        if self.location is not None:
            raise web.HTTPTemporaryRedirect(self.location)
        if self.status is not None:
            return _json({"error": {"message": "no room", "type": "x", "code": self.status}}, self.status)
        body = await request.json()
        self.bodies.append(body)
        words = ["Good", " day", "!"]
        if not body.get("stream"):
            return _json({"id": "c", "choices": [{"index": 0, "message": {"content": "".join(words)}}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for word in words:
            await response.write(_event({"choices": [{"index": 0, "delta": {"content": word}}]}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _submit(self, body: CompletionBody) -> int:
        self._numbers += 1
        stream = self._numbers
        prompt = list(body.prompt) if isinstance(body.prompt, list) else [1]
        self._sequences[stream] = (list(prompt), body.cache_salt)
        self._answers[stream] = asyncio.Queue()
        sampling = SamplingParams(
            max_tokens=body.max_tokens,
            min_tokens=body.min_tokens,
            temperature=body.temperature,
            seed=body.seed or 0,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            logprobs=body.logprobs,
        )
        key = salted(self._info.card, body.cache_salt)
        packed = array("I", prompt).tobytes()
        self._engine.submit([EngineRequest(stream, f"double-{stream}", MODEL, packed, sampling, namespace=key)])
        return stream


def _ticket(port: int, number: int, num_tokens: int) -> dict[str, Any]:
    """As NIXL's connector (pull) of vLLM 0.32 gives it."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 2 + num_tokens // 16))],
        "remote_engine_id": f"engine-{port}",
        "remote_request_id": f"cmpl-{number}",
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def _choice(output: SequenceOutput, prompt: list[int] | None, body: CompletionBody) -> dict[str, Any]:
    token_ids = list(output.token_ids)
    if output.finish_reason == "stop":
        token_ids.append(output.stop_token_id if output.stop_token_id is not None else 0)
    stop_reason = output.stop_token_id if output.stop_token_id in body.stop_token_ids else None
    return {
        "index": 0,
        "text": "x" * len(token_ids),
        "logprobs": _logprobs(output, body) if body.logprobs is not None else None,
        "finish_reason": output.finish_reason,
        "stop_reason": stop_reason,
        "prompt_token_ids": prompt,
        "token_ids": token_ids,
    }


def _logprobs(output: SequenceOutput, body: CompletionBody) -> dict[str, Any]:
    assert body.return_tokens_as_token_ids
    found: list[TokenLogprobs] = list(output.logprobs or [])
    return {
        "tokens": [f"token_id:{token}" for token in output.token_ids],
        "token_logprobs": [one.logprob for one in found],
        "text_offset": [0] * len(found),
        "top_logprobs": [
            {f"token_id:{token}": value for token, value in zip(one.top_ids, one.top_logprobs, strict=True)}
            for one in found
        ],
    }


def _number(block_id: bytes) -> int:
    return int.from_bytes(block_id[:8], "big")


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")
