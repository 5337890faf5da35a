"""`AttachedEngine`: a server that runs already becomes a worker, without being restarted or changed.

Two ways. *Tokens*: the server takes and gives token ids and its tokenizer is at hand; then the frontend's whole
pipeline works as with any engine, and KV events and load are the server's own. *Relay*: any other OpenAI-compatible
server; requests and answers pass as they are. A server that goes away ends what it was doing with a retryable error
and gets nothing until it is back; one that comes back as something else ends this worker.
"""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from headwater.config.schema import EngineConfig
from headwater.engines.attached.answer import Answer
from headwater.engines.attached.cards import Describer
from headwater.engines.attached.dialects.base import (
    Aborts,
    Description,
    Dialect,
    HandsOver,
    Learns,
    ServerLoad,
    Sleeps,
    TokenDialect,
)
from headwater.engines.attached.dialects.detect import detect
from headwater.engines.attached.http import Server, ServerAddress, Unreachable, error_for
from headwater.engines.attached.relay import relayed_request
from headwater.engines.attached.texts import server_texts
from headwater.engines.base import ALONE, EngineInfo, Placement, Progress, ProgressSink
from headwater.engines.external import OpenStream
from headwater.engines.gathered import Gathered
from headwater.engines.kv_feed.draining import Draining, ReaderLock
from headwater.engines.kv_feed.following import Following
from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.kv_feed.translate import FeedTranslator, salt_of
from headwater.engines.pace import Pace, PacedEngine
from headwater.engines.texts import ModelTexts
from headwater.errors import ConfigError, EngineFailed, HeadwaterError, InvalidRequest, Unavailable, WorkerLost
from headwater.kv.identity import namespace
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import LoadReport
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.types import TOKEN_ID_BYTES

_log = logging.getLogger(__name__)

_PROBE_S = 1.0
_PATIENCE_S = 30.0
"""How long a server that is connected to may not answer before it is given up."""
_RETRY_S = 2.0
_TICKET_S = 60.0
"""Until the first token: longer than servers wait for KV themselves."""
_DRAIN_TIMEOUT_S = 30.0
"""Some servers answer only when no event has come for two seconds."""
_MAX_ERROR_BYTES = 64 * 1024
_MAX_ABORTING = 1024
"""Messages under way; beyond that a closed connection has to do."""


class AttachedEngine(PacedEngine):
    """See `headwater.engines.base.Engine`."""

    def __init__(self, config: EngineConfig, placement: Placement = ALONE) -> None:
        super().__init__(config)
        if placement.index >= len(config.attach):
            raise ConfigError(f"worker {placement.index} has nothing to attach to: {len(config.attach)} are given")
        key = config.attach_api_key
        own_key = key[placement.index % len(key)] if key else None
        self._address = ServerAddress.parse(config.attach[placement.index], own_key)
        self._server: Server | None = None
        self._dialect: Dialect | None = None
        self._tokens: TokenDialect | None = None
        self._found: Description | None = None
        self._following: Following | Draining | None = None
        self._adapters = _adapters(config.attach_adapters)
        self._publishes = _own_part("--attach-kv-events", config.attach_kv_events, placement.index)
        self._answers: dict[int, asyncio.Task[None]] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        self._gathered = Gathered(self.deliver_step, lambda: self.num_generating)
        self._said: ServerLoad | None = None
        self._failing_since: float | None = None

    # ---- life

    async def open_engine(self, progress: ProgressSink) -> EngineInfo:
        server = self._server = Server(self._address)
        dialect, found = await self._await_server(server, progress)
        self._dialect, self._found = dialect, found
        describer = Describer(self.config, self._address, dialect, found)
        self.pace = Pace(describer.sizes.max_num_batched_tokens)
        if self._adapters and not found.adapters:
            raise ConfigError(f"--attach-adapters: {self._address.url} ({dialect.name}) takes none by their folder")
        texts = None
        tokens = _token_dialect(dialect)
        if tokens is not None:
            texts = await server_texts(self.config, server, tokens, found, progress)
            if texts is not None:
                self._tokens = tokens
                await _learn(tokens, texts)
        info = describer.with_tokens(texts) if texts is not None else describer.relayed()
        if texts is not None:
            card = info.card
            self._namespaces = {
                name: namespace(card.fingerprint, card.kv_layout, adapter=name) for name in card.adapters
            }
            self._follow_events(server, card, found)
        self.spawn(self._watch(server, dialect))
        self._tell_mode(info)
        progress(Progress("ready", detail=info.card.name))
        return info

    async def close_engine(self) -> None:
        answers = list(self._answers.values())
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await asyncio.gather(*self._aborting, return_exceptions=True)
        if self._following is not None:
            await self._following.close()
        if self._server is not None:
            await self._server.close()

    async def _await_server(self, server: Server, progress: ProgressSink) -> tuple[Dialect, Description]:
        """Until it is there; what it is, when it is."""
        began = self.clock.now()
        while True:
            try:
                return await detect(server, self.config.attach_as, self._adapters)
            except (Unavailable, WorkerLost) as error:
                progress(Progress("wait", round(self.clock.now() - began), None, "s", str(error)))
            await asyncio.sleep(_RETRY_S)

    def _follow_events(self, server: Server, card: ModelCard, found: Description) -> None:
        if found.block_size is None:
            return
        translator = FeedTranslator(card.fingerprint, card.kv_layout, card.block_size)
        feeds = [FeedAddress(self._publishes)] if self._publishes is not None else found.feeds
        if feeds:
            self._following = Following(self._address.url, feeds, translator, self.tell)
        elif found.drained is not None:
            self._following = self._drain(server, found.drained, translator, card.block_size, found.adapter_numbers)

    def _drain(
        self, server: Server, path: str, translator: FeedTranslator, block_size: int, adapters: Mapping[int, str]
    ) -> Draining:
        async def drain() -> list[Any]:
            try:
                documents = await server.post_json(path, {}, timeout_s=_DRAIN_TIMEOUT_S)
            except InvalidRequest:  # releases differ in the method
                documents = await server.get_json(path)
            return documents if isinstance(documents, list) else []

        url = self._address.url
        draining = Draining(url, translator, self.tell, drain, block_size, adapters, ReaderLock(url))
        self.spawn(draining.run())
        return draining

    def _tell_mode(self, info: EngineInfo) -> None:
        way = "token ids" if self._tokens is not None else "relayed requests"
        _log.info("attached to %s at %s: %s, %s", info.card.name, self._address.url, info.engine, way)
        if self._following is None:
            _log.warning(
                "%s sends no KV events: what it has cached will only be guessed from what is sent there%s",
                self._address.url,
                f" ({self._found.events_hint})" if self._found is not None and self._found.events_hint else "",
            )

    # ---- work

    def send(self, stream: OpenStream, tokens: "array[int]") -> None:
        server, found = self._server, self._found
        assert server is not None
        assert found is not None
        request = stream.request
        if self._tokens is None:
            if request.resumed_tokens:
                raise EngineFailed("the server was lost in the middle of a relayed answer, which cannot be taken up")
            path, body = relayed_request(request, (found.model, *found.aliases, *found.adapters), found.model)
            self._answer(request.stream, self._relay(server, stream, path, body))
            return
        num_resumed = len(request.resumed_tokens) // TOKEN_ID_BYTES
        if num_resumed >= request.sampling.max_tokens:
            raise InvalidRequest(f"{num_resumed} tokens are there already of {request.sampling.max_tokens}")
        salt = salt_of(request.namespace, self._own_namespace(request.adapter))
        if isinstance(self._following, Draining):
            self._following.wake()
        if request.export is not None:
            hands = _hands_over(self._tokens)
            prefill = hands.prefill(found.model, request, tokens, salt)
            self._answer(request.stream, self._prefill(server, hands, request, prefill))
            return
        asked = self._tokens.request(found.model, request, tokens, salt)
        answer = Answer(self._tokens.reader(request), self._expected_cached(stream) if self._following else None)
        if not request.ticket:
            self._answer(request.stream, self._stream_tokens(server, request, asked, answer))
            return
        again = self._tokens.request(found.model, msgspec.structs.replace(request, ticket=b""), tokens, salt)
        self._answer(request.stream, self._stream_with_ticket(server, request, asked, again, answer))

    def _own_namespace(self, adapter: str | None) -> bytes:
        """That the server keeps by itself."""
        return self._namespaces.get(adapter or "", self.default_namespace)

    async def sleep(self) -> None:
        assert self._server is not None
        await _sleeps(self._dialect).sleep(self._server)

    async def wake(self) -> None:
        assert self._server is not None
        await _sleeps(self._dialect).wake(self._server)

    def cancel(self, streams: Sequence[int]) -> None:
        """The connection is closed, which servers take as a wish to stop; `_stream_tokens` tells those that do not."""
        for number in streams:
            task = self._answers.pop(number, None)
            if task is not None:
                task.cancel()

    def load(self) -> LoadReport:
        said, num_blocks = self._said or ServerLoad(0, 0, 0.0), self.info.kv_blocks
        # What is sent counts as running as far as the server's slots go; others may send there too.
        running = max(min(len(self.open), self.info.max_num_seqs), said.num_running)
        return self.load_report(
            num_running=running,
            num_waiting=max(len(self.open) - running, said.num_waiting),
            kv_blocks_free=num_blocks - round(said.kv_usage * num_blocks),
        )

    async def _stream_with_ticket(
        self,
        server: Server,
        request: EngineRequest,
        asked: tuple[str, bytes],
        again: tuple[str, bytes],
        answer: Answer,
    ) -> None:
        """A ticket whose KV is gone, or does not come in time, costs a prefill here: `again` asks without it."""
        assert self._tokens is not None
        try:
            async with asyncio.timeout(_TICKET_S) as limit:
                await self._stream_tokens(server, request, asked, answer, limit)
            return
        except TimeoutError:
            reason = f"no token within {_TICKET_S:.0f} s"
        except HeadwaterError as error:
            if answer.begun or isinstance(error, Unreachable):
                raise
            reason = str(error)
        _log.warning(
            "the server prefills itself, its ticket is void: %s", reason, extra={"request_id": request.request_id}
        )
        second = Answer(self._tokens.reader(request), None)
        await self._stream_tokens(server, request, again, second)

    async def _stream_tokens(
        self,
        server: Server,
        request: EngineRequest,
        asked: tuple[str, bytes],
        answer: Answer,
        limit: asyncio.Timeout | None = None,
    ) -> None:
        """`limit`: on the time until the first token."""
        try:
            async with server.stream(*asked, {"x-request-id": f"{request.request_id}-{request.stream}"}) as response:
                if response.status != 200:
                    answer.complete = True
                    raise error_for(response.status, await response.content.read(_MAX_ERROR_BYTES), response.headers)
                async for piece in response.content.iter_any():
                    for output in answer.feed(piece):
                        if limit is not None:
                            limit.reschedule(None)
                        self._gathered.take(output)
                    if answer.goes_on:
                        break
        finally:
            if not answer.complete:
                self._abort_there(server, request)
        if not answer.ended:
            raise WorkerLost("the attached server ended its answer without saying why")

    async def _prefill(self, server: Server, hands: HandsOver, request: EngineRequest, asked: tuple[str, Any]) -> None:
        """For another server, which fetches the KV."""
        path, body = asked
        timeout_s = request.export.hold_s if request.export is not None else _PATIENCE_S
        answer = await server.post_json(path, body, timeout_s=timeout_s)
        self._gathered.take(hands.prefilled(request, answer))

    def _abort_there(self, server: Server, request: EngineRequest) -> None:
        """An answer was left before the server had come to its end."""
        aborts = _aborts(self._tokens)
        if aborts is not None and not self.paused and len(self._aborting) < _MAX_ABORTING:
            task = asyncio.get_running_loop().create_task(_told_to_abort(server, *aborts.abort(request)))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _relay(self, server: Server, stream: OpenStream, path: str, body: bytes) -> None:
        number = stream.request.stream
        async with server.stream(path, body, {"x-request-id": stream.request.request_id}) as response:
            if response.status != 200:
                raise error_for(response.status, await response.content.read(_MAX_ERROR_BYTES), response.headers)
            async for piece in response.content.iter_any():
                self._gathered.take(SequenceOutput(number, [0] * max(1, piece.count(b"\n\n")), relayed=piece))
        self._gathered.take(SequenceOutput(number, [], "stop"))

    def _answer(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answers[number] = task
        task.add_done_callback(lambda done: self._answered(number, done))

    def _answered(self, number: int, task: "asyncio.Task[None]") -> None:
        if self._answers.get(number) is task:
            del self._answers[number]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if not isinstance(error, HeadwaterError):
            _log.error("reading an answer failed", exc_info=error)
            error = EngineFailed(f"reading the attached server's answer failed: {error!r}")
        if isinstance(error, Unreachable):
            self._lose(error)
        self._gathered.take(SequenceOutput.failed(number, error))

    def _expected_cached(self, stream: OpenStream) -> int:
        """What the events say is resident; the server need not say itself."""
        count, block_size = self.num_resident(self.block_ids(stream.request)), self.info.card.block_size
        # The last token is always computed, and with it the rest of its block.
        return min(count, (stream.num_prompt_tokens - 1) // block_size) * block_size

    # ---- whether it is there

    async def _watch(self, server: Server, dialect: Dialect) -> None:
        while True:
            await asyncio.sleep(_PROBE_S)
            try:
                if self.paused:
                    await self._try_again(server, dialect)
                else:
                    said = self._said = await dialect.load(server)
                    if said is None:
                        await dialect.is_healthy(server)
                    else:
                        self.totals.preemptions = said.preemptions
                self._failing_since = None
                self.note_changed()
            except HeadwaterError as error:
                self._on_trouble(error)

    def _on_trouble(self, error: HeadwaterError) -> None:
        now = self.clock.now()
        self._failing_since = self._failing_since or now
        if isinstance(error, Unreachable) or now - self._failing_since > _PATIENCE_S:
            self._lose(error)

    def _lose(self, error: HeadwaterError) -> None:
        if self.paused:
            return
        _log.warning("the attached server is lost: %s", error)
        self.pause(Unavailable(f"the server at {self._address.url} does not answer", retry_after_s=_RETRY_S))
        self.cancel(list(self._answers))
        if self._following is not None:
            self._following.forget()

    async def _try_again(self, server: Server, dialect: Dialect) -> None:
        await dialect.is_healthy(server)
        found = await dialect.describe(server)
        if self._found is not None and found.identity != self._found.identity:
            self.fail(EngineFailed(f"{self._address.url} came back as {found.model}, {found.max_model_len} tokens"))
            return
        _log.info("the attached server is back")
        self.resume()


async def _told_to_abort(server: Server, path: str, body: bytes) -> None:
    with contextlib.suppress(HeadwaterError):  # it is gone, or has long ended the answer
        await server.post(path, body)


def _hands_over(dialect: object) -> HandsOver:
    if not isinstance(dialect, HandsOver):
        raise InvalidRequest("this kind of server computes no prompts for others", param="export")
    return dialect


def _sleeps(dialect: object) -> Sleeps:
    if not isinstance(dialect, Sleeps):
        raise ConfigError("this kind of server cannot sleep")
    return dialect


def _aborts(dialect: object) -> Aborts | None:
    return dialect if isinstance(dialect, Aborts) else None


async def _learn(dialect: object, texts: ModelTexts) -> None:
    if isinstance(dialect, Learns):
        await dialect.learn(texts)


def _own_part(flag: str, words: Sequence[str], number: int) -> str | None:
    """Of a list in the order of the servers."""
    if words and number >= len(words):
        raise ConfigError(f"{flag} has {len(words)} entries, and none for attached server {number + 1}")
    return words[number] if words else None


def _adapters(words: Sequence[str]) -> dict[str, str]:
    """Folders by name."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder) or name in found:
            raise ConfigError(f"--attach-adapters {word}: expected NAME=FOLDER, each name once")
        found[name] = folder
    return found


def _token_dialect(dialect: Dialect) -> TokenDialect | None:
    return dialect if isinstance(dialect, TokenDialect) else None
