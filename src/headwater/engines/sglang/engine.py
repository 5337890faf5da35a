"""`SglangEngine`: SGLang's engine driven from the worker process, token ids in and out, no second HTTP hop.

Batches are not invariant: a moved sequence goes on with what SGLang makes of prompt and output so far. When one of
SGLang's processes dies, SGLang ends this process too; the supervisor starts it again.
"""

import asyncio
import secrets
from array import array
from collections.abc import Sequence

from headwater.config.schema import EngineConfig
from headwater.engines.base import ALONE, EngineInfo, Placement, Progress, ProgressSink
from headwater.engines.external import OpenStream
from headwater.engines.gathered import Gathered
from headwater.engines.kv_feed.following import Following
from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.kv_feed.translate import FeedTranslator, salt_of
from headwater.engines.pace import Pace, PacedEngine
from headwater.engines.sglang.arguments import names_in, sglang_arguments
from headwater.engines.sglang.describe import engine_info, settings_of
from headwater.engines.sglang.host import Loads, News, SglangHost
from headwater.engines.sglang.installed import check_installed
from headwater.engines.sglang_wire.answers import Chunk, SglangReader
from headwater.engines.sglang_wire.arguments import generate_arguments
from headwater.engines.sglang_wire.settings import SglangSettings
from headwater.engines.starting import pulse
from headwater.engines.texts import texts_and_weights
from headwater.errors import HeadwaterError, WorkerLost
from headwater.kv.connectors.names import NameLog
from headwater.kv.connectors.sglang_naming import PageNames
from headwater.kv.pricing import ComputeRate
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import LoadReport
from headwater.protocol.request import SequenceOutput
from headwater.runtime.owned_folder import OwnedFolder

_SHUTDOWN_TIMEOUT_S = 15.0


class SglangEngine(PacedEngine):
    """See `headwater.engines.base.Engine`."""

    def __init__(self, config: EngineConfig, placement: Placement = ALONE) -> None:
        super().__init__(config)
        self._placement = placement
        self._host: SglangHost | None = None
        self._settings = SglangSettings()
        self._readers: dict[int, SglangReader] = {}
        self._gathered = Gathered(self.deliver_step)
        self._loads = Loads(0, 0, 0)
        self._nonce = secrets.token_hex(4)
        self._following: Following | None = None
        self._folder: OwnedFolder | None = None
        self._log: NameLog | None = None
        self._names: PageNames | None = None
        """With a store that SGLang goes to."""

    # ---- life

    async def open_engine(self, progress: ProgressSink) -> EngineInfo:
        check_installed()
        texts, model = await asyncio.to_thread(texts_and_weights, self.config, "sglang", progress)
        folder = self._folder = OwnedFolder("sglang-")
        arguments = await asyncio.to_thread(sglang_arguments, self.config, model, folder.path, self._placement)
        if arguments.store:
            self._log = NameLog(names_in(folder.path))
        self._host = SglangHost(self._on_news, self._on_loads, self.fail)
        async with pulse("SGLang", progress):
            started = await self._host.start(arguments.server)
        settings = self._settings = settings_of(started)
        adapters = _adapters(arguments.server)
        info = engine_info(self.config, texts, started, settings, adapters, stored=arguments.store)
        if self._log is not None:
            self._names = PageNames(self._log, info.card.block_size)
        self.pace = Pace(info.max_num_batched_tokens)
        self._follow_events(info.card, arguments.feeds)
        progress(Progress("ready", detail=info.card.name))
        return info

    async def close_engine(self) -> None:
        if self._following is not None:
            await self._following.close()
        if self._host is not None:
            await self._host.close(_SHUTDOWN_TIMEOUT_S)
        if self._log is not None:
            self._log.close()
        if self._folder is not None:
            self._folder.close()

    def _follow_events(self, card: ModelCard, feeds: list[FeedAddress]) -> None:
        if feeds and self._settings.block_size is not None:
            translator = FeedTranslator(card.fingerprint, card.kv_layout, card.block_size)
            tell = self.tell if self._names is None else self.tell_device
            self._following = Following("SGLang", feeds, translator, tell)

    # ---- work

    def send(self, stream: OpenStream, tokens: "array[int]") -> None:
        request, host = stream.request, self._host
        assert host is not None
        salt = salt_of(request.namespace, self.default_namespace)
        arguments = generate_arguments(request, tokens, salt, self._settings)
        arguments.pop("extra_key", None)  # not among the arguments of `Engine`, which knows the salt
        self._readers[request.stream] = SglangReader(request, incremental=True)
        if self._names is not None and request.adapter is None:  # SGLang names those by a number of its own
            self._names.begin(request.stream, self.naming(request), tokens, salt)
        host.generate(request.stream, f"hw-{self._nonce}-{request.stream}.", arguments)

    def cancel(self, streams: Sequence[int]) -> None:
        for stream in streams:
            self._forget_reader(stream)
        if self._host is not None:
            self._host.abort(streams)

    def load(self) -> LoadReport:
        said, num_blocks = self._loads, self.info.kv_blocks
        waiting = self.num_beyond_slots(said.num_waiting)
        usage = said.used_tokens / said.total_tokens if said.total_tokens and self.open else 0.0
        return self.load_report(
            num_running=len(self.open) - waiting,
            num_waiting=waiting,
            kv_blocks_free=num_blocks - round(min(1.0, usage) * num_blocks),
        )

    def price(self, rate: ComputeRate) -> None:
        if self._log is not None:
            self._log.price(rate)

    # ---- what comes back

    def _on_news(self, news: list[News]) -> None:
        for stream, what in news:
            reader = self._readers.get(stream)
            if reader is None:
                continue
            try:
                output = self._read(stream, reader, what)
            except HeadwaterError as error:
                output = SequenceOutput.failed(stream, error)
            if output is not None:
                if self._names is not None:
                    self._names.grow(stream, _all_tokens(output))
                if output.finish_reason is not None:
                    self._forget_reader(stream)
                self._gathered.take(output)

    def _forget_reader(self, stream: int) -> None:
        self._readers.pop(stream, None)
        if self._names is not None:
            self._names.end(stream)

    def _read(self, stream: int, reader: SglangReader, what: Chunk | HeadwaterError | None) -> SequenceOutput | None:
        if isinstance(what, HeadwaterError):
            raise what
        if what is None:
            raise WorkerLost("SGLang ended this sequence without saying why")
        known = reader.num_retractions
        output = reader.read(what)
        self.totals.preemptions += reader.num_retractions - known
        if output is not None and reader.left and self._host is not None:
            self._host.abort([stream])
        return output

    def _on_loads(self, loads: Loads) -> None:
        self._loads = loads
        self.note_changed()


def _all_tokens(output: SequenceOutput) -> list[int]:
    """The one that ends it is in SGLang's cache as well."""
    return output.token_ids if output.stop_token_id is None else [*output.token_ids, output.stop_token_id]


def _adapters(server_args: object) -> list[str]:
    """Names of the LoRA adapters it was given: `NAME=PATH`, a path, or what its parser has made of them."""
    given = getattr(server_args, "lora_paths", None) or ()
    names = given if isinstance(given, dict) else [_adapter_name(one) for one in given]
    return [str(name) for name in names]


def _adapter_name(one: object) -> str:
    if isinstance(one, dict):
        return str(one["lora_name"])
    name: object = getattr(one, "lora_name", None)
    return str(name) if name is not None else str(one).partition("=")[0]
