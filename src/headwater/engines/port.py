"""`CorePort`: the KV port of engines that are made of an `EngineCore`. See `headwater.engines.base.KvPort`.

Lives on the event loop, like the engine. What it is asked goes to the core as commands, in order with submissions and
aborts; what the core tells comes back as news, and is handed to the loader, reader or watcher that it concerns.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from headwater.engines.base import KvLoader, KvMemory, KvReader, KvWatcher
from headwater.engines.core import EngineCore
from headwater.engines.loop import Command
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.scheduler.outside import (
    BlocksCommitted,
    BlocksExported,
    ExportWaits,
    FirstToken,
    Held,
    KvNews,
    LoadEnded,
    LoadStarted,
)

_NOTHING: Sequence[SequenceOutput] = ()


class PortOwner(Protocol):
    """What the port needs of its engine."""

    def submit_as(self, request: EngineRequest, command: Command) -> None:
        """Take a request like any other, but hand it to the core by this command."""
        ...

    def call(self, command: Command) -> None: ...

    def forget(self, stream: int) -> None:
        """The stream is not open any more; nothing of it is to be delivered."""
        ...

    def call_soon(self, work: Callable[[], None]) -> None:
        """On the event loop, from the core."""
        ...

    def num_resident(self, block_ids: bytes) -> int: ...


class CorePort:
    """Implements `KvPort`."""

    def __init__(self, blocks: KvMemory, owner: PortOwner) -> None:
        self.blocks = blocks
        self._owner = owner
        self._loaders: dict[int, KvLoader] = {}
        self._readers: dict[int, KvReader] = {}
        self._watchers: list[KvWatcher] = []

    def num_resident(self, block_ids: bytes) -> int:
        return self._owner.num_resident(block_ids)

    # ---- loading

    def submit_loading(self, request: EngineRequest, loader: KvLoader, timeout_s: float) -> None:
        self._loaders[request.stream] = loader
        self._owner.submit_as(request, lambda core: core.submit_loading(request, timeout_s))

    def arrived(self, stream: int, num_blocks: int) -> None:
        self._do(lambda core: core.arrived(stream, num_blocks))

    def loaded(self, stream: int, num_blocks: int, *, cached: bool = True) -> None:
        self._loaders.pop(stream, None)
        self._do(lambda core: core.loaded(stream, num_blocks, cached=cached))
        self._do(lambda core: core.stopped(stream))

    def prefilled(self, stream: int, first: FirstToken) -> None:
        self._loaders.pop(stream, None)
        self._do(lambda core: core.prefilled(stream, first))
        self._do(lambda core: core.stopped(stream))

    def stopped(self, stream: int) -> None:
        self._loaders.pop(stream, None)
        self._do(lambda core: core.stopped(stream))

    # ---- reading

    def read(self, stream: int, reader: KvReader) -> None:
        self._readers[stream] = reader

    def release(self, stream: int, after_s: float = 0.0) -> None:
        self._readers.pop(stream, None)
        self._owner.forget(stream)
        self._do(lambda core: core.release(stream, after_s))

    def hold(self, block_id: bytes, hold_s: float, on_held: Callable[[Held], None]) -> None:
        self._owner.call(partial(self._hold, block_id, hold_s, on_held))

    def drop(self, hold: int) -> None:
        self._do(lambda core: core.drop(hold))

    def watch(self, watcher: KvWatcher) -> None:
        self._watchers.append(watcher)
        self._do(lambda core: core.watch())

    # ---- from the core

    def on_news(self, news: list[KvNews]) -> None:
        """One step's, in order."""
        committed: list[BlocksCommitted] = []
        for one in news:
            match one:
                case LoadStarted():
                    if loader := self._loaders.get(one.stream):
                        loader.on_load(one)
                case LoadEnded():
                    self._end_load(one)
                case BlocksExported():
                    if reader := self._readers.get(one.stream):
                        reader.on_exported(one)
                case ExportWaits():
                    if reader := self._readers.get(one.stream):
                        reader.on_waiting(one)
                case BlocksCommitted():
                    committed.append(one)
        if committed:
            for watcher in self._watchers:
                watcher.on_committed(committed)

    def refused(self, stream: int) -> None:
        """A request did not get as far as the core."""
        if stream in self._loaders:
            self._end_load(LoadEnded(stream, "aborted"))

    def close(self) -> None:
        """The core is gone: whoever loads must stop."""
        for stream in list(self._loaders):
            self.refused(stream)
        self._readers.clear()

    def _end_load(self, ended: LoadEnded) -> None:
        loader = self._loaders.pop(ended.stream, None)
        if loader is None:
            self.stopped(ended.stream)
        else:
            loader.on_load_ended(ended)

    def _hold(
        self, block_id: bytes, hold_s: float, on_held: Callable[[Held], None], core: EngineCore
    ) -> Sequence[SequenceOutput]:
        self._owner.call_soon(partial(on_held, core.hold(block_id, hold_s)))
        return _NOTHING

    def _do(self, action: Callable[[EngineCore], None]) -> None:
        def command(core: EngineCore) -> Sequence[SequenceOutput]:
            action(core)
            return _NOTHING

        self._owner.call(command)
