"""In-memory twins of what surrounds the OpenAI layer: a dispatcher that a test drives, a responder that records."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.clock import RealClock
from headwater.config.schema import FrontendConfig
from headwater.errors import HeadwaterError, ModelNotFound, NoWorkers
from headwater.frontend.dispatch import TokenSink
from headwater.frontend.hints import NO_HINTS, RoutingHints
from headwater.frontend.http.base import Headers, HttpRequest
from headwater.frontend.openai.serving import ServedModel, build_model, openai_routes
from headwater.frontend.preprocess.tokenizer import unpack_ids
from headwater.frontend.tenants.principal import NOBODY, Principal
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest, SequenceOutput, TokenLogprobs
from headwater.router.decisions import DecisionRecord
from headwater.weights import ResolvedModel


@dataclass
class Submitted:
    request: EngineRequest
    sink: TokenSink


class FakeDispatcher:
    """Keeps what is submitted; the test plays the worker."""

    def __init__(self) -> None:
        self.sequences: dict[int, Submitted] = {}
        self.requests: list[EngineRequest] = []
        self.hints: list[RoutingHints] = []
        self.aborted: list[int] = []
        self.refusal: HeadwaterError | None = None
        self.on_submit: Callable[[], None] | None = None

    def submit(
        self,
        card: ModelCard,
        requests: Sequence[EngineRequest],
        sinks: Sequence[TokenSink],
        hints: RoutingHints = NO_HINTS,
    ) -> list[int]:
        if self.refusal is not None:
            raise self.refusal
        self.hints.append(hints)
        streams: list[int] = []
        for request, sink in zip(requests, sinks, strict=True):
            request.stream = len(self.requests) + 1
            self.requests.append(request)
            self.sequences[request.stream] = Submitted(request, sink)
            streams.append(request.stream)
        if self.on_submit is not None:
            self.on_submit()
        return streams

    def abort(self, streams: Sequence[int]) -> None:
        for stream in streams:
            if self.sequences.pop(stream, None) is not None:
                self.aborted.append(stream)

    def decision_of(self, stream: int) -> DecisionRecord | None:
        if stream not in self.sequences:
            return None
        record = DecisionRecord(self.sequences[stream].request.request_id, "m", 0.0, 5, 1)
        record.worker_id = f"worker-{stream}"
        return record

    def emit(
        self,
        stream: int,
        token_ids: Sequence[int] = (),
        finish: str | None = None,
        *,
        logprobs: list[TokenLogprobs] | None = None,
        **rest: Any,
    ) -> None:
        """One step of one sequence; silent for sequences that are no longer there."""
        sequence = self.sequences.get(stream)
        if sequence is None:
            return
        if finish is not None:
            del self.sequences[stream]
        sequence.sink.on_output(SequenceOutput(stream, list(token_ids), finish, logprobs=logprobs, **rest))

    def fail(self, stream: int, error: HeadwaterError) -> None:
        self.sequences.pop(stream).sink.on_error(error)


@dataclass
class FakeResponder:
    """Records an answer; asserts that nothing is said twice."""

    status: int = 0
    headers: Headers = ()
    body: bytes = b""
    writes: list[bytes] = field(default_factory=list)
    streaming: bool = False
    finished: bool = False
    disconnected: bool = False
    pending_bytes: int = 0
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        if self.disconnected:
            callback()
        self.callbacks.append(callback)

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        assert not self.status, "answered twice"
        self.status, self.headers, self.body, self.finished = status, headers, body, True

    def start(self, status: int, headers: Headers) -> None:
        assert not self.status, "answered twice"
        self.status, self.headers, self.streaming = status, headers, True

    def write(self, data: bytes) -> None:
        assert self.streaming
        assert not self.finished, "written after the end"
        self.writes.append(data)
        self.body += data

    def finish(self) -> None:
        assert self.streaming
        assert not self.finished
        self.finished = True

    def abort(self) -> None:
        self.finished = True

    def disconnect(self) -> None:
        self.disconnected = True
        for callback in self.callbacks:
            callback()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json()["error"]
        return error

    def events(self) -> list[Any]:
        """Data of all events; the last is the string `[DONE]` once the stream is complete."""
        events: list[Any] = []
        for block in self.body.decode().split("\n\n"):
            for line in block.splitlines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    events.append(data if data == "[DONE]" else json.loads(data))
        return events

    def text(self, choice: int = 0) -> str:
        """Content of one streamed choice."""
        entries = [entry for event in self.events() if event != "[DONE]" for entry in event["choices"]]
        return "".join(_entry_text(entry) for entry in entries if entry["index"] == choice)


def _entry_text(entry: dict[str, Any]) -> str:
    return (entry["delta"].get("content") or "") if "delta" in entry else str(entry["text"])


class Api:
    """The routes around fixed models."""

    def __init__(
        self,
        *models: ServedModel,
        strict: bool = False,
        request_timeout: float = 0.0,
    ) -> None:
        self.models = {name: model for model in models for name in model.card.served_names}
        self.relays = any(model.card.relayed for model in models)
        self.dispatcher = FakeDispatcher()
        config = FrontendConfig(strict=strict, request_timeout=request_timeout)
        routes = openai_routes(self, self.dispatcher, config, RealClock())
        self.handlers = {(route.method, route.path): route.handler for route in routes}

    def get(self, name: str) -> ServedModel:
        if not self.models:
            raise NoWorkers("no model is ready yet", retry_after_s=2.0)
        if name not in self.models:
            raise ModelNotFound(f"the model {name} does not exist", param="model")
        return self.models[name]

    def cards(self) -> list[ModelCard]:
        return [model.card for model in dict.fromkeys(self.models.values())]

    async def post(
        self,
        path: str,
        body: bytes | dict[str, Any],
        responder: FakeResponder | None = None,
        headers: Mapping[bytes, bytes] | None = None,
        principal: Principal = NOBODY,
    ) -> FakeResponder:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = HttpRequest("POST", path, "", headers or {}, data, "test", request_id="req1", principal=principal)
        return await self._call("POST", path, request, responder or FakeResponder())

    async def get_path(self, path: str, template: str | None = None, **params: str) -> FakeResponder:
        request = HttpRequest("GET", path, "", {}, b"", "test", params, request_id="req1")
        return await self._call("GET", template or path, request, FakeResponder())

    async def _call(self, method: str, path: str, request: HttpRequest, responder: FakeResponder) -> FakeResponder:
        pending = self.handlers[method, path](request, responder)
        if pending is not None:
            await pending
        return responder

    def prompt_text(self, number: int = -1) -> str:
        """What the tokenizer made of the last prompt, back as text."""
        request = self.dispatcher.requests[number]
        model = self.models[request.model]
        return model.tokenizer.decode(unpack_ids(request.prompt), skip_special_tokens=False)


_served: dict[int, ServedModel] = {}


def served_demo(resolved: ResolvedModel, max_model_len: int = 8192) -> ServedModel:
    """The demo model as a frontend serves it; loaded once."""
    if max_model_len not in _served:
        _served[max_model_len] = build_model(demo_card(resolved, max_model_len), demo_artifacts(resolved))
    return _served[max_model_len]


def demo_card(resolved: ResolvedModel, max_model_len: int = 8192) -> ModelCard:
    return ModelCard(
        name="demo",
        served_names=["demo", "org/demo"],
        fingerprint=resolved.fingerprint,
        architecture="LlamaForCausalLM",
        dtype="float32",
        kv_layout="test",
        max_model_len=max_model_len,
        block_size=16,
        vocab_size=49_152,
        bos_token_id=resolved.bos_token_id,
        eos_token_ids=list(resolved.eos_token_ids),
        created=1_700_000_000,
    )


def demo_artifacts(resolved: ResolvedModel) -> dict[str, bytes]:
    artifacts = {"tokenizer.json": resolved.tokenizer_json}
    if resolved.tokenizer_config is not None:
        artifacts["tokenizer_config.json"] = resolved.tokenizer_config
    if resolved.chat_template is not None:
        artifacts["chat_template.jinja"] = resolved.chat_template.encode()
    return artifacts


def token_ids(model: ServedModel, text: str) -> list[int]:
    return unpack_ids(model.tokenizer.encode(text, add_special_tokens=False))
