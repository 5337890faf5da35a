"""`AttachedEngine`: a server that runs already becomes a worker, without being restarted or changed.

Two ways. *Tokens*: the server takes and gives token ids and its tokenizer is at hand; then the frontend's whole
pipeline works as with any engine, and KV events and load are the server's own. *Relay*: any other OpenAI-compatible
server; requests and answers pass as they are. A server that goes away ends what it was doing with a retryable error
and gets nothing until it is back; one that comes back as something else ends this worker. One that only says nothing
gets nothing new, and has longer until what it does is given up. Load reports say which (`LoadReport.away`).
"""

import asyncio
import logging
from array import array
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from headwater.config.schema import EngineConfig
from headwater.engines.attached.answer import Answer
from headwater.engines.attached.cards import Describer
from headwater.engines.attached.dialects.base import (
    Description,
    Dialect,
    HandsOver,
    Learns,
    ServerLoad,
    Sleeps,
    TokenDialect,
)
from headwater.engines.attached.dialects.detect import detect
from headwater.engines.attached.exchanges import Asked, Exchanges
from headwater.engines.attached.http import ASK_TIMEOUT_S, Server, ServerAddress, Silent, Unreachable
from headwater.engines.attached.relay import relayed_request
from headwater.engines.attached.texts import server_texts
from headwater.engines.base import ALONE, EngineInfo, Placement, Progress, ProgressSink
from headwater.engines.external import OpenStream
from headwater.engines.gathered import Gathered
from headwater.engines.kv_feed.draining import Draining, ReaderLock
from headwater.engines.kv_feed.following import Following
from headwater.engines.kv_feed.owners import BlockOwners
from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.kv_feed.translate import FeedTranslator, salt_of
from headwater.engines.limits import num_resumed
from headwater.engines.pace import Pace, PacedEngine
from headwater.engines.texts import ModelTexts
from headwater.errors import (
    ConfigError,
    EngineFailed,
    HeadwaterError,
    InvalidRequest,
    StreamLost,
    Unavailable,
    WorkerLost,
)
from headwater.kv.identity import namespace
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import LoadReport
from headwater.protocol.request import EngineRequest, SequenceOutput

_log = logging.getLogger(__name__)

_PROBE_S = 1.0
_PATIENCE_S = 30.0
"""How long a server that is connected to may not answer before it is given up."""
_RETRY_S = 2.0
_DRAIN_TIMEOUT_S = 30.0
"""Some servers answer only when no event has come for two seconds."""


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
        self._exchanges: Exchanges | None = None
        self._dialect: Dialect | None = None
        self._tokens: TokenDialect | None = None
        self._found: Description | None = None
        self._following: Following | Draining | None = None
        self._owners: BlockOwners | None = None
        self._adapters = _adapters(config.attach_adapters)
        self._publishes = _own_part("--attach-kv-events", config.attach_kv_events, placement.index)
        self._answers: dict[int, asyncio.Task[None]] = {}
        self._whole: set[int] = set()
        """Streams whose answer comes all at once."""
        self._gathered = Gathered(self._take, lambda: self.num_generating)
        self._said: ServerLoad | None = None
        self._heard = 0.0
        """When it last answered a look or sent tokens, by the clock's `now`."""
        self._away = ""
        """Why nothing is to be sent there."""

    # ---- life

    async def open_engine(self, progress: ProgressSink) -> EngineInfo:
        server = self._server = Server(self._address)
        dialect, found = await self._await_server(server, progress)
        self._dialect, self._found = dialect, found
        self._exchanges = Exchanges(server, dialect, self._gathered.take, lambda: self.paused)
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
        self.relays = texts is None
        info = describer.with_tokens(texts) if texts is not None else describer.relayed()
        if texts is not None:
            self._follow_events(server, info.card, found)
        self.spawn(self._watch(server, dialect))
        self._tell_mode(info)
        progress(Progress("ready", detail=info.card.name))
        return info

    async def close_engine(self) -> None:
        answers = list(self._answers.values())
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        if self._exchanges is not None:
            await self._exchanges.close()
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
        if found.drained is not None:
            self._owners = BlockOwners(card.block_size, namespace(card.fingerprint, card.kv_layout))
        translator = FeedTranslator(card.fingerprint, card.kv_layout, card.block_size, self._owners)
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
        exchanges, found, request = self._exchanges, self._found, stream.request
        assert exchanges is not None
        assert found is not None
        if self._tokens is None:
            if request.resumed_tokens:
                raise StreamLost("the server was lost in the middle of a relayed answer, which cannot be taken up")
            relayed = relayed_request(request, (found.model, *found.aliases, *found.adapters), found.model)
            if not relayed.streamed:
                self._whole.add(request.stream)
            self._answer(request.stream, exchanges.relay(request, (relayed.path, relayed.body)))
        else:
            self._send_tokens(exchanges, self._tokens, found.model, stream, tokens)

    def _send_tokens(
        self, exchanges: Exchanges, dialect: TokenDialect, model: str, stream: OpenStream, tokens: "array[int]"
    ) -> None:
        request = stream.request
        num_resumed(request)  # refuses what is complete
        salt = salt_of(request.namespace, self.own_namespace(request.adapter))
        if isinstance(self._following, Draining):
            self._following.wake()

        def ask(request: EngineRequest, cached: int | None) -> tuple[Asked, Answer]:
            return dialect.request(model, request, tokens, salt), Answer(dialect.reader(request), cached)

        cached = self._expected_cached(stream) if self._following else None
        if request.export is not None:
            hands = _hands_over(dialect)
            asked = hands.prefill(model, request, tokens, salt)
            work = exchanges.prefill(hands, request, asked, request.export.hold_s)
        elif request.ticket:
            again = partial(ask, msgspec.structs.replace(request, ticket=b""), None)
            work = exchanges.stream_with_ticket(request, *ask(request, cached), again)
        else:
            work = exchanges.stream(request, *ask(request, cached))
        if self._owners is not None:
            self._owners.begin(request.stream, tokens, self.namespace_of(request), request.adapter)
        self._answer(request.stream, work)

    async def sleep(self) -> None:
        assert self._server is not None
        await _sleeps(self._dialect).sleep(self._server)

    async def wake(self) -> None:
        assert self._server is not None
        await _sleeps(self._dialect).wake(self._server)

    def cancel(self, streams: Sequence[int]) -> None:
        """Whoever reads an answer leaves it, and `Exchanges` sees to it that the server stops."""
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
            away=self._away,
            num_whole=len(self._whole),
        )

    def _answer(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answers[number] = task
        task.add_done_callback(lambda done: self._answered(number, done))

    def _answered(self, number: int, task: "asyncio.Task[None]") -> None:
        if self._answers.get(number) is task:
            del self._answers[number]
        self._whole.discard(number)
        if self._owners is not None:
            self._owners.end(number, asyncio.get_running_loop().time())
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
        self._heard = self.clock.now()
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
                self._heard = self.clock.now()
                if not self.paused:  # a request may have met it away while it still answered this look
                    self._away = ""
            except HeadwaterError as error:
                self._on_trouble(error)
            self.note_changed()

    def _take(self, outputs: list[SequenceOutput]) -> None:
        if not self.paused and any(output.token_ids for output in outputs):
            self._heard, self._away = self.clock.now(), ""
        self.deliver_step(outputs)

    def _on_trouble(self, error: HeadwaterError) -> None:
        silent_s = self.clock.now() - self._heard
        if isinstance(error, Unreachable) or silent_s > _PATIENCE_S:
            self._lose(error)
        elif isinstance(error, Silent) and silent_s >= ASK_TIMEOUT_S and not self._away:
            _log.warning("%s: it gets nothing new until it does", error)
            self._away = error.message

    def _lose(self, error: HeadwaterError) -> None:
        if self.paused:
            return
        _log.warning("the attached server is lost: %s", error)
        self._away = f"the server at {self._address.url} does not answer"
        self.pause(Unavailable(self._away, retry_after_s=_RETRY_S))
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


def _hands_over(dialect: object) -> HandsOver:
    if not isinstance(dialect, HandsOver):
        raise InvalidRequest("this kind of server computes no prompts for others", param="export")
    return dialect


def _sleeps(dialect: object) -> Sleeps:
    if not isinstance(dialect, Sleeps):
        raise ConfigError("this kind of server cannot sleep")
    return dialect


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
