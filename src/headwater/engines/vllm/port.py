"""`StagingPort`: the KV port of vLLM, whose blocks are copied to and from slots of host memory (`Staging`).

    load    slots are taken -> the loader fills them -> the request goes to vLLM, which copies them into blocks of its
            own and computes the last token -> first output: the slots are free
    export  slots are taken -> the request goes to vLLM, which fills them step by step -> released, and vLLM has said
            that it writes no more: the slots are free

vLLM reserves blocks only when a request's KV is here, so a request that waits for a slow prefill worker holds nothing
of the device. Where slots are short a prompt is computed here, or refused to whoever wants it: nobody waits for slots.
vLLM samples the first token itself, from the last token of the prompt: seeds, penalties and grammars are as without a
hand-off. Blocks are not offered to tiers: vLLM's own connectors do that. Lives on the event loop.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headwater.engines.base import KvLoader, KvMemory, KvReader, KvWatcher
from headwater.engines.external import OpenStream
from headwater.engines.load_reports import Totals
from headwater.engines.vllm.staging import Staging
from headwater.errors import HeadwaterError, InvalidRequest, Overloaded, WorkerLost
from headwater.kv.connectors.vllm_staging import Ended, Exported, ExportParams, LoadParams
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.scheduler.exchange import WORD_S
from headwater.scheduler.outside import (
    BlocksExported,
    ExportWaits,
    FirstToken,
    Held,
    LoadEnd,
    LoadEnded,
    LoadStarted,
)

_log = logging.getLogger(__name__)

_WARNING_S = 60.0


class PortOwner(Protocol):
    """What the port needs of its engine."""

    open: dict[int, OpenStream]
    totals: Totals

    def submit(self, requests: Sequence[EngineRequest]) -> None: ...

    def abort(self, streams: Sequence[int]) -> None: ...

    def hand_over(self, stream: OpenStream, tokens: "array[int]", params: dict[str, Any] | None) -> None:
        """To vLLM. Raises a `HeadwaterError` to refuse it, after `unsent`."""
        ...

    def deliver(self, outputs: Sequence[SequenceOutput]) -> None: ...

    def end(self, stream: int, error: HeadwaterError) -> None: ...

    def num_resident(self, block_ids: bytes) -> int: ...

    def block_ids(self, request: EngineRequest) -> bytes: ...


@dataclass(slots=True)
class _Load:
    loader: KvLoader
    stream: OpenStream
    tokens: "array[int]"
    first_block: int
    slots: list[int]
    timer: asyncio.TimerHandle
    num_arrived: int
    """Blocks from the start of the sequence on."""
    num_cached: int = 0
    """Tokens, as the client is told."""
    ending: bool = False
    """The loader was told to stop."""
    handed_over: bool = False


@dataclass(slots=True)
class _Export:
    first_block: int
    slots: list[int]
    timer: asyncio.TimerHandle
    num_out: dict[int, int]
    """Blocks in their slots, by rank."""
    reader: KvReader | None
    num_tokens: int
    """To be computed, as far as known."""
    num_announced: int = 0
    output: SequenceOutput | None = None
    """The first token, until all blocks are out."""
    writers: set[int] = field(default_factory=set[int])
    """Ranks that may still write."""
    released: bool = False

    @property
    def is_out(self) -> bool:
        return self.num_announced == len(self.slots)


class StagingPort:
    """Implements `KvPort`."""

    def __init__(self, staging: Staging, owner: PortOwner, block_size: int) -> None:
        self.blocks: KvMemory = staging.blocks
        self._staging = staging
        self._owner = owner
        self._size = block_size
        self._loop = asyncio.get_running_loop()
        self._loaders: dict[int, tuple[KvLoader, float]] = {}
        """Of requests that are just being submitted."""
        self._readers: dict[int, KvReader] = {}
        """Likewise."""
        self._loads: dict[int, _Load] = {}
        self._exports: dict[int, _Export] = {}
        self._teller: asyncio.TimerHandle | None = None
        self._steps_told = 0
        self._next_warning = 0.0
        staging.on_news = self._on_news

    def num_resident(self, block_ids: bytes) -> int:
        return self._owner.num_resident(block_ids)

    # ---- loading, asked by the loader

    def submit_loading(self, request: EngineRequest, loader: KvLoader, timeout_s: float) -> None:
        self._loaders[request.stream] = (loader, timeout_s)
        self._owner.submit([request])
        if self._loaders.pop(request.stream, None) is not None:  # refused before it came to `begin`
            self._tell_ended(loader, request.stream, "aborted")

    def arrived(self, stream: int, num_blocks: int) -> None:
        load = self._loads.get(stream)
        if load is not None:
            load.num_arrived = max(load.num_arrived, num_blocks)

    def loaded(self, stream: int, num_blocks: int, *, cached: bool = True) -> None:
        load = self._loads.get(stream)
        if load is not None:
            load.num_arrived = num_blocks
            load.num_cached = (num_blocks if cached else load.first_block) * self._size
            self._hand_over(stream, load)

    def prefilled(self, stream: int, first: FirstToken) -> None:
        load = self._loads.get(stream)
        if load is not None:
            load.num_arrived = load.first_block + len(load.slots)
            load.num_cached = max(first.num_cached_tokens, load.first_block * self._size)
            self._hand_over(stream, load)

    def stopped(self, stream: int) -> None:
        load = self._loads.get(stream)
        if load is not None:
            load.num_cached = load.first_block * self._size
            self._hand_over(stream, load)

    # ---- reading, asked by the reader

    def read(self, stream: int, reader: KvReader) -> None:
        self._readers[stream] = reader

    def release(self, stream: int, after_s: float = 0.0) -> None:
        self._readers.pop(stream, None)
        export = self._exports.get(stream)
        if export is not None:
            export.reader = None
            export.timer.cancel()
            export.timer = self._loop.call_later(after_s, self._let_go, stream)
        if stream in self._owner.open:
            self._owner.abort([stream])

    def hold(self, block_id: bytes, hold_s: float, on_held: Callable[[Held], None]) -> None:
        self._loop.call_soon(on_held, Held(0, ()))

    def drop(self, hold: int) -> None:
        """Nothing is held here."""

    def watch(self, watcher: KvWatcher) -> None:
        """vLLM says which blocks it has, but they cannot be read."""

    # ---- told by the engine

    def begin(self, stream: OpenStream, tokens: "array[int]") -> bool:
        """Whether KV is to come first; the request is handed over from here then."""
        number = stream.request.stream
        loader, timeout_s = self._loaders.pop(number, (None, 0.0))
        if loader is None:
            return False
        resident = self._owner.num_resident(self._owner.block_ids(stream.request))
        first = min(resident, (len(tokens) - 1) // self._size)
        slots = self._staging.take(-(-len(tokens) // self._size) - first)
        if slots is None:
            self._tell_full()
            self._tell_ended(loader, number, "late")
            return False
        timer = self._loop.call_later(timeout_s, self._stop_load, number, "late")
        self._loads[number] = _Load(loader, stream, tokens, first, slots, timer, first)
        self._loop.call_soon(self._started, number)
        return True

    def export(self, stream: OpenStream, num_tokens: int) -> dict[str, Any] | None:
        """What vLLM is to do for whoever reads the blocks of this request. Raises `Overloaded`."""
        number, order = stream.request.stream, stream.request.export
        if order is None:
            return None
        count = -(-num_tokens // self._size) - order.first_block
        if count <= 0:
            raise InvalidRequest(f"the prompt has no block {order.first_block}", param="export")
        slots = self._staging.take(count)
        if slots is None:
            self._tell_full()
            raise Overloaded(f"{count} blocks do not fit the {self._staging.num_free} free of --kv-staging")
        timer = self._loop.call_later(order.hold_s, self._let_go, number)
        ranks = range(self._staging.num_ranks)
        num_new = num_tokens - min(stream.request.expected_cached_tokens, num_tokens - 1)
        out, reader = dict.fromkeys(ranks, 0), self._readers.pop(number, None)
        self._exports[number] = _Export(order.first_block, slots, timer, out, reader, num_new, writers=set(ranks))
        if self._teller is None:
            self._teller = self._loop.call_later(WORD_S, self._tell_waiting)
        return ExportParams(number, order.first_block, slots).request_params()

    def unsent(self, stream: int) -> None:
        """vLLM does not get this request after all."""
        if stream in self._loads:
            self._drop_load(stream)
        export = self._exports.get(stream)
        if export is not None:
            export.writers.clear()
            self._let_go(stream)

    def leaving(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Outputs of a step on their way out; those of exports are kept until all blocks can be read."""
        if not self._loads and not self._exports:
            return outputs
        return [output for output in outputs if self._leaves(output)]

    def _leaves(self, output: SequenceOutput) -> bool:
        number = output.stream
        load, export = self._loads.get(number), self._exports.get(number)
        if load is not None:
            output.num_cached_tokens = load.num_cached
            self._drop_load(number)
        if export is not None and not export.is_out and output.error is None:
            export.output = output
            return False
        return True

    def cancelled(self, stream: int) -> bool:
        """The sequence ended or was aborted. Whether vLLM never got it."""
        load = self._loads.get(stream)
        if load is None:
            return False
        if load.handed_over:
            # vLLM may still copy from its slots, into blocks that nobody will use.
            self._drop_load(stream)
            return False
        self._stop_load(stream, "aborted")
        return True

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    def waits_for_kv(self, stream: int) -> bool:
        load = self._loads.get(stream)
        return load is not None and not load.handed_over

    def close(self) -> None:
        """Whoever loads must stop; nothing is announced any more."""
        for stream, load in list(self._loads.items()):
            if not load.handed_over:
                self._stop_load(stream, "aborted")
        for export in self._exports.values():
            export.timer.cancel()
        if self._teller is not None:
            self._teller.cancel()
        self._readers.clear()

    # ---- inner life

    def _tell_full(self) -> None:
        """Now and then."""
        now = self._loop.time()
        if now >= self._next_warning:
            self._next_warning = now + _WARNING_S
            free, size = self._staging.num_free, self.blocks.block_bytes / 2**20
            _log.warning("--kv-staging is full (%d blocks of %.1f MiB are free): no hand-off for some", free, size)

    def _started(self, stream: int) -> None:
        load = self._loads.get(stream)
        if load is not None and not load.ending:
            load.loader.on_load(LoadStarted(stream, load.first_block, tuple(load.slots), len(load.tokens)))

    def _stop_load(self, stream: int, reason: LoadEnd) -> None:
        load = self._loads.get(stream)
        if load is not None and not load.ending and not load.handed_over:
            load.ending = True
            load.timer.cancel()
            self._tell_ended(load.loader, stream, reason)

    def _tell_ended(self, loader: KvLoader, stream: int, reason: LoadEnd) -> None:
        self._loop.call_soon(loader.on_load_ended, LoadEnded(stream, reason))

    def _hand_over(self, stream: int, load: _Load) -> None:
        """With what has arrived, unless nobody waits for it any more."""
        if load.handed_over:
            return
        load.timer.cancel()
        if stream not in self._owner.open:
            self._drop_load(stream)
            return
        load.handed_over = True
        num_filled = max(0, load.num_arrived - load.first_block)
        self._staging.give_back(load.slots[num_filled:])
        del load.slots[num_filled:]
        num_tokens = min((load.first_block + num_filled) * self._size, len(load.tokens))
        params = LoadParams(load.first_block, num_tokens, list(load.slots)).request_params()
        load.stream.request.expected_cached_tokens = num_tokens
        try:
            self._owner.hand_over(load.stream, load.tokens, params if num_filled else None)
        except HeadwaterError as error:
            self._owner.end(stream, error)

    def _drop_load(self, stream: int) -> None:
        load = self._loads.pop(stream)
        load.timer.cancel()
        self._staging.give_back(load.slots)

    def _on_news(self, news: Exported | Ended) -> None:
        export = self._exports.get(news.stream)
        if export is None:
            return
        if isinstance(news, Ended):
            export.writers.discard(news.rank)
            self._settle(news.stream, export)
            return
        export.num_out[news.rank] = news.num_blocks
        first, count = export.num_announced, min(export.num_out.values())
        if count <= first:
            return
        export.num_announced = count
        if export.reader is not None:
            slots = tuple(export.slots[first:count])
            export.reader.on_exported(BlocksExported(news.stream, export.first_block + first, slots))
        if export.is_out and export.output is not None:
            output, export.output = export.output, None
            self._owner.deliver([output])

    def _tell_waiting(self) -> None:
        """Readers of what vLLM has not begun are told that it is in line, if steps go on. vLLM serves in order."""
        ahead = tokens = 0
        lives, self._steps_told = self._owner.totals.steps > self._steps_told, self._owner.totals.steps
        for stream, export in self._exports.items():
            if export.released or export.is_out:
                continue
            tokens += export.num_tokens
            if lives and not export.num_announced and export.reader is not None and stream in self._owner.open:
                export.reader.on_waiting(ExportWaits(stream, ahead, tokens))
            ahead += 1
        self._teller = self._loop.call_later(WORD_S, self._tell_waiting) if ahead else None

    def _let_go(self, stream: int) -> None:
        export = self._exports.get(stream)
        if export is None:
            return
        export.released, export.reader = True, None
        export.timer.cancel()
        if export.output is not None:
            export.output = None
            self._owner.end(stream, WorkerLost("its KV blocks could not be read in time"))
        self._settle(stream, export)

    def _settle(self, stream: int, export: _Export) -> None:
        """Slots that vLLM may still write to are given to nobody."""
        if export.released and not export.writers:
            del self._exports[stream]
            self._staging.give_back(export.slots)
