"""An engine of its own on a thread of its own, for callers without an event loop.

The bridge is one queue in and a callback per output; the thread owns the engine from start to close. As many sequences
are in flight as the engine runs at once, twice over; the rest wait here, so any number of prompts may be given.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo, ProgressSink
from headwater.engines.registry import create_engine
from headwater.errors import EngineFailed, HeadwaterError
from headwater.protocol.events import WorkerEvent
from headwater.protocol.request import EngineRequest, SequenceOutput

_START_TIMEOUT_S = 3600.0
_CLOSE_TIMEOUT_S = 30.0

ResultT = TypeVar("ResultT")
OnOutput = Callable[[SequenceOutput], bool]
"""Takes an output; whether the sequence is to be stopped."""


class EngineThread:
    """Start, run requests, close. Also the engine's listener."""

    def __init__(self, config: EngineConfig, progress: ProgressSink) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headwater-engine", daemon=True)
        self._thread.start()
        self._engine = create_engine(config)
        self._takers: dict[int, OnOutput] = {}
        self._waiting: list[tuple[EngineRequest, OnOutput]] = []
        self._streams = 0
        self._done: queue.SimpleQueue[HeadwaterError | None] = queue.SimpleQueue()
        self._closed = False
        try:
            self.info: EngineInfo = self._call(self._engine.start(self, progress)).result(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run(self, requests: list[tuple[EngineRequest, OnOutput]]) -> None:
        """Until all have ended. Raises what ends the engine; errors of single sequences are theirs to tell."""
        if not requests:
            return
        self._loop.call_soon_threadsafe(self._begin, requests)
        error = self._done.get()
        if error is not None:
            raise error

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._call(self._engine.close()).result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._loop.close()

    # EngineListener, on the thread

    def on_step(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            take = self._takers.get(output.stream)
            if take is None:
                continue
            stop = take(output)
            if stop or output.finish_reason is not None:
                del self._takers[output.stream]
                if output.finish_reason is None:
                    self._engine.abort([output.stream])
        self._feed()

    def on_events(self, events: list[WorkerEvent]) -> None:
        """Nobody routes to this engine."""

    def on_failed(self, error: HeadwaterError) -> None:
        self._takers.clear()
        self._waiting.clear()
        self._done.put(error if isinstance(error, EngineFailed) else EngineFailed(str(error)))

    def _begin(self, requests: list[tuple[EngineRequest, OnOutput]]) -> None:
        self._waiting = requests[::-1]
        self._feed()

    def _feed(self) -> None:
        most = 2 * self.info.max_num_seqs
        ready: list[EngineRequest] = []
        while self._waiting and len(self._takers) < most:
            request, take = self._waiting.pop()
            self._streams += 1
            request.stream = self._streams
            self._takers[request.stream] = take
            ready.append(request)
        if ready:
            self._engine.submit(ready)
        elif not self._takers:
            self._done.put(None)

    def _call(self, work: Coroutine[Any, Any, ResultT]) -> "Future[ResultT]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)
