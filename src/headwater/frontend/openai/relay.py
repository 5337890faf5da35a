"""Requests for models that are relayed: the body goes to a worker as it came, and its answer comes back as it is.

Only what is needed to choose a worker is read. The answer's status is 200 once the first piece is there; an error
before it is a real status, and one after it an event of the stream. An answer that is not streamed is gathered, within
bounds. A client that leaves aborts its request.
"""

import asyncio

import msgspec

from headwater.errors import HeadwaterError, InternalError, InvalidRequest
from headwater.frontend.http.base import HttpRequest, Responder
from headwater.frontend.http.replies import JSON, reply_for
from headwater.frontend.openai.answer import DONE, KEEPALIVE, KEEPALIVE_S, STREAM_HEADERS, Surroundings
from headwater.frontend.openai.model import ModelLookup, RelayedModel
from headwater.frontend.openai.preparation import Asker
from headwater.frontend.openai.schema import GenerationFields
from headwater.kv.identity import chain_block_ids, namespace
from headwater.protocol.request import EngineRequest, RelayedRequest, SamplingParams, SequenceOutput
from headwater.types import TOKEN_ID_BYTES

_DEFAULT_MAX_TOKENS = 256
"""What a request that does not say is reckoned at."""
_MAX_ANSWER_BYTES = 64 << 20


class _Glance(msgspec.Struct):
    """What is read of a request."""

    model: str = ""
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


_glance = msgspec.json.Decoder(_Glance).decode


def relayed_model(models: ModelLookup, body: bytes) -> tuple[RelayedModel, _Glance] | None:
    """The relayed model that a body asks for, if that is what it does. Raises what `models.get` raises."""
    if not models.relays:
        return None
    try:
        seen = _glance(body)
    except (msgspec.MsgspecError, RecursionError):
        return None  # for the endpoint to say what is wrong
    model = models.get(seen.model)
    return (model, seen) if isinstance(model, RelayedModel) else None


class RelayAnswer:
    """One relayed request."""

    def __init__(self, model: RelayedModel, seen: _Glance, responder: Responder, around: Surroundings) -> None:
        self._model = model
        self._seen = seen
        self._responder = responder
        self._around = around
        self._streams: list[int] = []
        self._pieces: list[bytes] = []
        self._size = 0
        self._started = self._ended = False
        self._keepalive: asyncio.TimerHandle | None = None

    def begin(self, request: HttpRequest, asker: Asker) -> None:
        """Send it to a worker. Failures become the answer."""
        around, card = self._around, self._model.card
        arrival = around.clock.epoch()
        try:
            fields = self._fields()
            engine_request = self._request(request, asker, fields)
            engine_request.arrival = arrival
            if around.request_timeout_s:
                engine_request.deadline = arrival + around.request_timeout_s
            self._streams = around.dispatcher.submit(card, [engine_request], [self], asker.hints(fields))
        except HeadwaterError as error:
            self.on_error(error)
            return
        self._responder.on_disconnect(self._abandon)
        if self._seen.stream and not self._ended:
            self._keepalive = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._keep_alive)

    # TokenSink

    def on_output(self, output: SequenceOutput) -> None:
        if self._ended:
            return
        if output.relayed:
            self._take(output.relayed)
        if output.finish_reason is not None and not self._ended:
            self._finish()

    def on_error(self, error: HeadwaterError) -> None:
        if self._ended:
            return
        self._end()
        reply = reply_for(error)
        if self._started:
            self._responder.write(b"data: " + reply.body + b"\n\n" + DONE)
            self._responder.finish()
        else:
            reply.send_to(self._responder)

    def _take(self, piece: bytes) -> None:
        if self._seen.stream:
            self._start()
            self._responder.write(piece)
            return
        self._size += len(piece)
        if self._size > _MAX_ANSWER_BYTES:
            self._around.dispatcher.abort(self._streams)
            self.on_error(InternalError(f"the answer has more than {_MAX_ANSWER_BYTES:,} bytes"))
        else:
            self._pieces.append(piece)

    def _finish(self) -> None:
        self._end()
        if self._seen.stream:
            self._start()
            self._responder.finish()
        else:
            self._responder.send(200, (JSON,), b"".join(self._pieces))

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._responder.start(200, STREAM_HEADERS)

    def _keep_alive(self) -> None:
        """Only before the first piece: a comment in the middle of one would break it."""
        if not self._started:
            self._start()
            self._responder.write(KEEPALIVE)

    def _abandon(self) -> None:
        if not self._ended:
            self._end()
            self._around.dispatcher.abort(self._streams)

    def _end(self) -> None:
        self._ended = True
        if self._keepalive is not None:
            self._keepalive.cancel()

    def _fields(self) -> GenerationFields:
        seen = self._seen
        return GenerationFields(
            model=seen.model, cache_salt=seen.cache_salt, prompt_cache_key=seen.prompt_cache_key, user=seen.user
        )

    def _request(self, request: HttpRequest, asker: Asker, fields: GenerationFields) -> EngineRequest:
        seen, card = self._seen, self._model.card
        text = bytes(seen.messages) or bytes(seen.prompt)
        if not text:
            raise InvalidRequest("messages or prompt is missing, expected one of them", param="messages")
        longest = (card.max_model_len - 1) * TOKEN_ID_BYTES
        prompt = text[:longest] + bytes(-min(len(text), longest) % TOKEN_ID_BYTES)
        key = namespace(card.fingerprint, card.kv_layout, salt=asker.salt(fields))
        most = seen.max_completion_tokens or seen.max_tokens or _DEFAULT_MAX_TOKENS
        return EngineRequest(
            stream=0,
            request_id=asker.request_id,
            model=card.name,
            prompt=prompt,
            sampling=SamplingParams(max_tokens=max(1, most)),
            block_ids=chain_block_ids(key, prompt, card.block_size),
            namespace=key,
            priority=asker.priority(fields),
            relay=RelayedRequest(request.path, request.body),
        )
