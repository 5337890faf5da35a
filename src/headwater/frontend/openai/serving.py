"""Routes of the OpenAI API.

Bodies above 32 KB are understood in a thread, so that a long prompt does not hold up the tokens of others; few at a
time, the rest wait in line, and a line that is too long is `Overloaded`. Everything else runs on the event loop,
where it costs less than handing it over.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from headwater.clock import Clock
from headwater.config.schema import FrontendConfig
from headwater.frontend.dispatch import Dispatcher
from headwater.frontend.http.base import Handler, Headers, HttpRequest, Responder
from headwater.frontend.http.replies import JSON
from headwater.frontend.loading import answering
from headwater.frontend.openai.answer import StreamAnswer, Surroundings, WholeAnswer
from headwater.frontend.openai.answers import ModelAnswer, ModelList
from headwater.frontend.openai.chat import prepare_chat
from headwater.frontend.openai.completions import prepare_completion
from headwater.frontend.openai.generation import Generation
from headwater.frontend.openai.model import ModelLookup, RelayedModel, ServedModel, build_model
from headwater.frontend.openai.openapi import docs_page, openapi_document
from headwater.frontend.openai.preparation import Asker
from headwater.frontend.openai.relay import RelayAnswer, relayed_model
from headwater.frontend.openai.tokens import detokenize, tokenize
from headwater.frontend.waiting import Waiting
from headwater.protocol.cluster import ModelCard

__all__ = ["ModelLookup", "RelayedModel", "Route", "ServedModel", "build_model", "openai_routes"]

INLINE_BODY_BYTES = 32_768
_THREADS = 2

ResultT = TypeVar("ResultT")
Prepare = Callable[[bytes, ModelLookup, Asker, bool], Generation]

_encode = msgspec.json.Encoder().encode
_HTML: Headers = ((b"content-type", b"text/html; charset=utf-8"),)


@dataclass(frozen=True, slots=True)
class Route:
    """`path` may end in `/{name}`, which takes the rest of the path, slashes included."""

    method: str
    path: str
    handler: Handler


def openai_routes(models: ModelLookup, dispatcher: Dispatcher, config: FrontendConfig, clock: Clock) -> list[Route]:
    """All routes of this layer. They keep no state beyond their requests."""
    api = _Api(models, dispatcher, config, clock)
    document = openapi_document()
    return [
        Route("POST", "/v1/chat/completions", api.generation(_prepare_chat)),
        Route("POST", "/v1/completions", api.generation(_prepare_completion)),
        Route("POST", "/tokenize", api.document(tokenize)),
        Route("POST", "/detokenize", api.document(detokenize)),
        Route("GET", "/v1/models", api.list_models),
        Route("GET", "/v1/models/{model}", answering(api.show_model, api.waiting)),
        Route("GET", "/openapi.json", _static(document, (JSON,))),
        Route("GET", "/docs", _static(docs_page(), _HTML)),
    ]


def _prepare_chat(body: bytes, models: ModelLookup, asker: Asker, strict: bool) -> Generation:
    return prepare_chat(body, models, asker, strict=strict)


def _prepare_completion(body: bytes, models: ModelLookup, asker: Asker, strict: bool) -> Generation:
    return prepare_completion(body, models, asker, strict=strict)


def _static(body: bytes, headers: Headers) -> Handler:
    def handle(_request: HttpRequest, responder: Responder) -> None:
        responder.send(200, headers, body)

    return handle


class Threads:
    """A few threads for long bodies. The line before them is bounded by the memory that it holds."""

    def __init__(self, waiting: Waiting) -> None:
        self._semaphore = asyncio.Semaphore(_THREADS)
        self._waiting = waiting

    async def run(self, num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
        with self._waiting.held(num_bytes):
            async with self._semaphore:
                return await asyncio.to_thread(work)


class _Api:
    def __init__(self, models: ModelLookup, dispatcher: Dispatcher, config: FrontendConfig, clock: Clock) -> None:
        self._models = models
        self._around = Surroundings(dispatcher, clock, config.request_timeout)
        self._strict = config.strict
        self._clock = clock
        self.waiting = Waiting()
        self._threads = Threads(self.waiting)

    def generation(self, prepare: Prepare) -> Handler:
        """Handler of an endpoint that generates."""

        def handle(request: HttpRequest, responder: Responder) -> Awaitable[None] | None:
            since = self._clock.now()
            asker = Asker(request.request_id, self._clock, request.headers, request.principal)
            if self._models.relays and self._relay(request, responder, asker):
                return None
            if len(request.body) > INLINE_BODY_BYTES:
                return in_thread(request, responder, asker, since)
            self._begin(prepare(request.body, self._models, asker, self._strict), responder, since)
            return None

        async def in_thread(request: HttpRequest, responder: Responder, asker: Asker, since: float) -> None:
            generation = await self._threads.run(
                len(request.body), lambda: prepare(request.body, self._models, asker, self._strict)
            )
            if not responder.disconnected:
                self._begin(generation, responder, since)

        return answering(handle, self.waiting)

    def _relay(self, request: HttpRequest, responder: Responder, asker: Asker) -> bool:
        """Whether the request was for a relayed model, and is taken care of."""
        found = relayed_model(self._models, request.body)
        if found is None:
            return False
        RelayAnswer(*found, responder, self._around).begin(request, asker)
        return True

    def document(self, make: Callable[..., msgspec.Struct]) -> Handler:
        """Handler of an endpoint that answers from the model's files alone."""

        def handle(request: HttpRequest, responder: Responder) -> Awaitable[None] | None:
            if len(request.body) > INLINE_BODY_BYTES:
                return in_thread(request, responder)
            _send(responder, make(request.body, self._models, strict=self._strict))
            return None

        async def in_thread(request: HttpRequest, responder: Responder) -> None:
            work = lambda: make(request.body, self._models, strict=self._strict)  # noqa: E731
            _send(responder, await self._threads.run(len(request.body), work))

        return answering(handle, self.waiting)

    def list_models(self, _request: HttpRequest, responder: Responder) -> None:
        by_name = {name: _describe(card, name) for card in self._models.cards() for name in card.served_names}
        _send(responder, ModelList("list", list(by_name.values())))

    def show_model(self, request: HttpRequest, responder: Responder) -> None:
        name = request.path_params.get("model", "")
        _send(responder, _describe(self._models.get(name).card, name))

    def _begin(self, generation: Generation, responder: Responder, since: float) -> None:
        kind = StreamAnswer if generation.stream else WholeAnswer
        kind(generation, responder, self._around, since).begin()


def _describe(card: ModelCard, name: str) -> ModelAnswer:
    return ModelAnswer(
        id=name,
        object="model",
        created=card.created,
        owned_by="headwater",
        root=card.name,
        parent=card.name if name in card.adapters else None,
        max_model_len=card.max_model_len,
        context_window=card.max_model_len,
    )


def _send(responder: Responder, document: msgspec.Struct) -> None:
    responder.send(200, (JSON,), _encode(document))
