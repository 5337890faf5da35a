"""A server that speaks SGLang's wire formats (0.5.23), strict about unknown fields, around the mocker engine.

It stands for `python -m sglang.launch_server` where that cannot be started: token ids through `/generate`, KV events
over ZeroMQ with replay, load through `/v1/loads`. Like the engine it repeats all tokens in every chunk unless it is
incremental, looks for no stop tokens where the end token is to be ignored, aborts whose names begin alike, and takes
two seconds to notice that a client has gone.
"""

import asyncio
import itertools
import json
import threading
import time
from array import array
from typing import Any

import msgspec
import zmq
from aiohttp import web

from block_texts import BlockTexts, salted
from headwater.config.schema import EngineConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.errors import HeadwaterError
from headwater.kv.identity import split_block_ids
from headwater.protocol.events import BlocksRemoved, BlocksStored, WorkerEvent
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput

MODEL = "double"
ADAPTER = "tuned"
VERSION = "0.5.23"
ABORT_AFTER_S = 2.0
_END = b"\xff" * 8


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """All that SGLang takes; it refuses unknown names."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    beam_width: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None

    def verify(self, vocab_size: int) -> None:
        """As the engine does. Raises `ValueError`."""
        ranges = {
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "top_k": self.top_k == -1 or self.top_k >= 1,
            "frequency_penalty": -2 <= self.frequency_penalty <= 2,
            "presence_penalty": -2 <= self.presence_penalty <= 2,
            "repetition_penalty": 0 < self.repetition_penalty <= 2,
            "min_new_tokens": 0 <= self.min_new_tokens <= (self.max_new_tokens or 0),
            "logit_bias": all(0 <= int(token) < vocab_size for token in self.logit_bias or ()),
            "sampling_seed": self.sampling_seed is None or -(2**63) <= self.sampling_seed < 2**63,
        }
        for name, fits in ranges.items():
            if not fits:
                raise ValueError(f"{name} is out of range")
        if sum(grammar is not None for grammar in (self.json_schema, self.regex, self.ebnf, self.structural_tag)) > 1:
            raise ValueError("Only one of json_schema, regex, ebnf, or structural_tag can be set.")


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """What SGLang knows of what we may send. It ignores other names, which would hide a mistake of ours."""

    input_ids: list[int]
    sampling_params: SamplingBody
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    lora_path: str | None = None
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


class Publisher:
    """SGLang's: PUB and a ROUTER for replays, where it is told or at any port; replayed batches come without topic."""

    def __init__(self, topic: str = "kv", *, endpoint: str | None = None, replay_endpoint: str | None = None) -> None:
        self._context = zmq.Context()
        self.topic = topic
        self._number = 0
        self._kept: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self._running = True
        self._pub, self.port = self._bound(zmq.PUB, endpoint)
        self._router, self.replay_port = self._bound(zmq.ROUTER, replay_endpoint)
        self._thread = threading.Thread(target=self._replay)
        self._thread.start()

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self._pub.close(0)
        self._context.term()

    def publish(self, events: list[dict[str, Any]]) -> None:
        self._pub.send_multipart([self.topic.encode(), *self._keep(events)])

    def lose(self, events: list[dict[str, Any]]) -> None:
        """As `publish`, but nobody hears it."""
        self._keep(events)

    def restart(self) -> None:
        with self._lock:
            self._number = 0
            self._kept.clear()

    def _keep(self, events: list[dict[str, Any]]) -> list[bytes]:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        with self._lock:
            number, self._number = self._number, self._number + 1
            self._kept.append((number, payload))
        return [number.to_bytes(8, "big"), payload]

    def _bound(self, kind: int, endpoint: str | None) -> tuple[zmq.Socket[bytes], int]:
        socket = self._context.socket(kind)
        socket.linger = 0
        if endpoint is not None:
            socket.bind(endpoint)
            return socket, 0
        return socket, socket.bind_to_random_port("tcp://127.0.0.1")

    def _replay(self) -> None:
        while self._running:
            if not self._router.poll(5):
                continue
            peer, _, start = self._router.recv_multipart()
            with self._lock:
                kept = [entry for entry in self._kept if entry[0] >= int.from_bytes(start, "big")]
            for number, payload in kept:
                self._router.send_multipart([peer, b"", number.to_bytes(8, "big"), payload])
            self._router.send_multipart([peer, b"", _END, b""])
        self._router.close(0)


class Lives:
    """The mocker as SGLang's scheduler: sequences by name, chunks in its words, events in its words."""

    def __init__(self, config: EngineConfig, *, incremental: bool = False) -> None:
        self.incremental = incremental
        self.bodies: list[GenerateBody] = []
        self._config = msgspec.structs.replace(config, engine="mocker", served_model_name=(MODEL,))
        self._publisher: Publisher | None = None
        self._answers: dict[int, asyncio.Queue[SequenceOutput]] = {}
        self._names: dict[str, int] = {}
        self._sequences: dict[int, tuple[list[int], str | None]] = {}
        self._texts = BlockTexts(self._sequences.values)
        self._numbers = itertools.count(1)
        self._retractions_told = 0

    @property
    def num_open(self) -> int:
        return len(self._answers)

    @property
    def lengths(self) -> list[int]:
        """Of all sequences so far, prompt and answer."""
        return [len(tokens) for tokens, _ in self._sequences.values()]

    async def begin(self) -> None:
        self._engine = MockerEngine(self._config)
        self._info = await self._engine.start(self, lambda _: None)
        self._retractions_told = 0

    async def end(self) -> None:
        self._engine.abort(list(self._answers))
        self._answers.clear()
        self._names.clear()
        await self._engine.close()

    def loads(self) -> list[dict[str, Any]]:
        load, size = self._engine.load(), self._config.block_size
        used = (load.kv_blocks_total - load.kv_blocks_free) * size
        return [
            {
                "dp_rank": 0,
                "num_running_reqs": load.num_running,
                "num_waiting_reqs": load.num_waiting,
                "num_used_tokens": used,
                "max_total_num_tokens": load.kv_blocks_total * size,
                "max_running_requests": self._config.max_num_seqs,
                "token_usage": used / (load.kv_blocks_total * size),
            }
        ]

    def abort(self, name: str) -> None:
        """All whose names begin with this one, as SGLang does."""
        for other, stream in list(self._names.items()):
            if name and other.startswith(name):
                self._engine.abort([stream])
                del self._names[other]
                if stream in self._answers:
                    self._answers[stream].put_nowait(SequenceOutput(stream, [], "abort"))

    async def generate(self, body: GenerateBody) -> Any:
        """Chunks, until the last one. Raises `ValueError` for what SGLang refuses."""
        self._check(body)
        self.bodies.append(body)
        stream = self._submit(body)
        tokens: list[int] = []
        told: list[tuple[Any, Any]] = []
        cached, retractions, finished = 0, 0, False
        try:
            while not finished:
                output = await self._answers[stream].get()
                if output.error is not None:
                    raise ValueError(output.error.message)
                cached = output.num_cached_tokens or cached
                fresh = list(output.token_ids)
                if output.finish_reason == "stop" and output.stop_token_id is not None:
                    fresh.append(output.stop_token_id)
                probabilities = _logprobs(output, body)
                probabilities += [([-0.5, token, None], None) for token in fresh[len(probabilities) :]]
                retractions += self._retractions_to_tell()
                start = len(tokens) if self.incremental else 0
                tokens += fresh
                told += probabilities
                finished = output.finish_reason is not None
                yield {
                    "text": "x" * len(tokens[start:]),
                    "output_ids": tokens[start:],
                    "meta_info": {
                        "id": body.rid,
                        "finish_reason": _finish(output, len(tokens)),
                        "prompt_tokens": len(body.input_ids),
                        "completion_tokens": len(tokens),
                        "cached_tokens": cached,
                        "weight_version": "default",
                        "num_retractions": retractions,
                        **_logprob_words(body, told[start:]),
                    },
                }
        finally:
            self._answers.pop(stream, None)
            if self._names.get(str(body.rid)) == stream:
                del self._names[str(body.rid)]
                if not finished:
                    self._engine.abort([stream])

    def _retractions_to_tell(self) -> int:
        """The mocker counts them for all sequences together: whichever speaks next tells."""
        known, self._retractions_told = self._retractions_told, self._engine.load().preemptions
        return self._retractions_told - known

    def _check(self, body: GenerateBody) -> None:
        context = self._info.card.max_model_len
        length, most = len(body.input_ids), body.sampling_params.max_new_tokens or 0
        if length >= context:
            raise ValueError(
                f"The input ({length} tokens) is longer than the model's context length ({context} tokens)."
            )
        if length + most > context:
            raise ValueError(f"Requested token count exceeds the model's maximum context length of {context} tokens.")
        body.sampling_params.verify(self._info.card.vocab_size)
        if body.rid in self._names:
            raise ValueError(f"Duplicate request ID detected: {body.rid}")
        if body.lora_path not in (None, ADAPTER):
            raise ValueError(f"The following requested LoRA adapters are not loaded: {body.lora_path}")

    def _submit(self, body: GenerateBody) -> int:
        stream = next(self._numbers)
        params = body.sampling_params
        self._names[str(body.rid)] = stream
        self._sequences[stream] = (list(body.input_ids), body.cache_salt)
        self._answers[stream] = asyncio.Queue()
        sampling = SamplingParams(
            max_tokens=params.max_new_tokens or 0,
            min_tokens=params.min_new_tokens,
            temperature=params.temperature,
            seed=params.sampling_seed or 0,
            stop_token_ids=[] if params.ignore_eos else params.stop_token_ids or [],
            ignore_eos=params.ignore_eos,
            logprobs=body.top_logprobs_num if body.return_logprob else None,
        )
        packed = array("I", body.input_ids).tobytes()
        key = salted(self._info.card, body.cache_salt)
        self._engine.submit([EngineRequest(stream, f"double-{stream}", MODEL, packed, sampling, namespace=key)])
        return stream

    # ---- EngineListener

    def on_step(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self._sequences[output.stream][0].extend(output.token_ids)
            if output.stream in self._answers:
                self._answers[output.stream].put_nowait(output)

    def on_events(self, events: list[WorkerEvent]) -> None:
        told = [word for event in events for word in self._in_its_words(event)]
        if told and self._publisher is not None:
            self._publisher.publish(told)

    def on_failed(self, error: HeadwaterError) -> None:
        raise AssertionError(error)

    def _in_its_words(self, event: WorkerEvent) -> list[dict[str, Any]]:
        if isinstance(event, BlocksStored):
            return [self._stored(block_id) for block_id in split_block_ids(event.block_ids)]
        if isinstance(event, BlocksRemoved):
            removed = [signed(block_id) for block_id in split_block_ids(event.block_ids)]
            return [{"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU"}]
        return []

    def _stored(self, block_id: bytes) -> dict[str, Any]:
        """One event per page; what is null by default is left out."""
        parent, tokens, salt = self._texts.of(block_id, self._info.card)
        event = {
            "type": "BlockStored",
            "block_hashes": [signed(block_id)],
            "parent_block_hash": None if parent is None else signed(parent),
            "token_ids": tokens,
            "block_size": len(tokens),
            "lora_id": None,
            "medium": "GPU",
        }
        return event if salt is None else event | {"cache_salt": salt}


class SglangDouble(Lives):
    """The HTTP server."""

    def __init__(self, config: EngineConfig, *, events: bool = True, incremental: bool = False) -> None:
        super().__init__(config, incremental=incremental)
        self.port = 0
        self.status: int | None = None
        """Answer generations with this instead."""
        self.page_size: int | None = None
        """Said instead of the real one."""
        self.older = False
        """As before `/server_info` and `/v1/loads` had these names, and events were told of there."""
        self.deterministic = False
        self.priorities: bool | None = None
        """None: priorities are off; else whether low ones come first."""
        self.keeps_the_end = False
        """Answers break off before the event that says why they end."""
        self.aborted: list[str] = []
        self.raw: list[dict[str, Any]] = []
        self._events = events
        self._work: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def publisher(self) -> Publisher:
        assert self._publisher is not None
        return self._publisher

    async def start(self) -> None:
        """Begin a life: nothing is cached, events count from 0; the ports stay."""
        await self.begin()
        if self._events:
            self._publisher = self._publisher or Publisher()
            self._publisher.restart()
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/get_server_info" if self.older else "/server_info", self._server_info),
                *([] if self.older else [web.get("/v1/loads", self._loads)]),
                web.post("/tokenize", self._tokenize),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort_request),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As a process that is killed: connections break."""
        await self._runner.cleanup()
        for work in self._work:
            work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self.end()

    async def close(self) -> None:
        await self.stop()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)

    def about(self) -> dict[str, Any]:
        return {"disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998}

    # ---- pages

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        entry = {"object": "model", "created": 1, "owned_by": "sglang"}
        base = entry | {"id": MODEL, "root": MODEL, "parent": None, "max_model_len": self._info.card.max_model_len}
        adapter = entry | {"id": ADAPTER, "root": "/nowhere/tuned", "parent": MODEL, "max_model_len": None}
        return _json({"object": "list", "data": [base, adapter]})

    async def _server_info(self, _: web.Request) -> web.Response:
        size, config = self._config.block_size, self._config
        document: dict[str, Any] = {
            "model_path": "/nowhere",
            "tokenizer_path": "/nowhere",
            "page_size": self.page_size or size,
            "dp_size": 1,
            "tp_size": 1,
            "max_running_requests": config.max_num_seqs,
            "chunked_prefill_size": config.max_num_batched_tokens,
            "incremental_streaming_output": self.incremental,
            "enable_deterministic_inference": self.deterministic,
            "enable_priority_scheduling": self.priorities is not None,
            "schedule_low_priority_values_first": bool(self.priorities),
            **self.about(),
            "max_total_num_tokens": self._info.kv_blocks * size,
            "max_req_input_len": self._info.card.max_model_len - 6,
            "kv_events": None,
            "internal_states": [{}],
            "version": VERSION,
            "api_key": None,
        }
        if self._publisher is not None and not self.older:
            document["kv_events"] = {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": self._publisher.port,
                "topic": self._publisher.topic,
                "block_size": self.page_size or size,
                "dp_size": 1,
                "replay_endpoint_port_base": self._publisher.replay_port,
            }
        return _json(document)

    async def _loads(self, request: web.Request) -> web.Response:
        if request.query.get("include") not in (None, "core", "all"):
            return _json({"detail": "Invalid include sections"}, 400)
        return _json({"timestamp": "2026-01-01T00:00:00+00:00", "version": VERSION, "loads": self.loads()})

    async def _tokenize(self, request: web.Request) -> web.Response:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._config.tokenizer))
        ids = tokenizer.encode((await request.json())["prompt"]).ids
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self._info.card.max_model_len})

    async def _abort_request(self, request: web.Request) -> web.Response:
        name = (await request.json())["rid"]
        self.aborted.append(name)
        self.abort(name)
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.status is not None:
            return _json({"error": {"message": "no room"}}, self.status)
        raw = await request.read()
        try:
            body = msgspec.json.decode(raw, type=GenerateBody)
        except msgspec.ValidationError as error:
            return _json({"error": str(error)}, 400)
        self.raw.append(json.loads(raw))
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        work = asyncio.create_task(self._gather(body, events))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            while (event := await events.get()) is not None:
                if self.keeps_the_end and event["meta_info"]["finish_reason"] is not None:
                    return response
                if not response.prepared:
                    await response.prepare(request)
                await response.write(_event(event))
        except (asyncio.CancelledError, ConnectionError):
            asyncio.get_running_loop().call_later(ABORT_AFTER_S, work.cancel)  # that the client has gone
            raise
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _gather(self, body: GenerateBody, events: "asyncio.Queue[dict[str, Any] | None]") -> None:
        """Goes on when nobody listens."""
        try:
            async for chunk in self.generate(body):
                events.put_nowait(chunk)
        except ValueError as error:
            told = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
            events.put_nowait({"error": told})
        events.put_nowait(None)


def signed(block_id: bytes) -> int:
    return int.from_bytes(block_id[:8], "big", signed=True)


def _finish(output: SequenceOutput, count: int) -> dict[str, Any] | None:
    match output.finish_reason:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": output.stop_token_id}
        case "length":
            return {"type": "length", "length": count}
        case _:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _logprobs(output: SequenceOutput, body: GenerateBody) -> list[tuple[Any, Any]]:
    if not body.return_logprob:
        return [(None, None)] * len(output.token_ids)
    return [
        (
            [one.logprob, token, None],
            [[value, other, None] for other, value in zip(one.top_ids, one.top_logprobs, strict=True)],
        )
        for token, one in zip(output.token_ids, output.logprobs or [], strict=True)
    ]


def _logprob_words(body: GenerateBody, told: list[tuple[Any, Any]]) -> dict[str, Any]:
    if not body.return_logprob:
        return {}
    words: dict[str, Any] = {"input_token_logprobs": [], "output_token_logprobs": [chosen for chosen, _ in told]}
    if body.top_logprobs_num:
        words["output_top_logprobs"] = [top for _, top in told]
    return words


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")
