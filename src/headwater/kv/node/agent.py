"""A node's store for engines without an event loop: the client on a thread of its own.

    with StoreAgent(default_socket(), "vllm-0") as store:
        runs = store.match(chain)                              # bounded by `timeout_s`; [] if it takes longer
        load = store.load(chain, buffers, timeout_s=2.0)       # a Future of the number of blocks loaded
        store.offer(chain, payloads)                           # a Future of the number stored

`load`, `offer` and `prefetch` return at once. Buffers must stay as they are until the future has a result: a load that
is to end early gets a short `timeout_s`, for a future that was cancelled does not say when the last byte was written.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from headwater.errors import StoreClosed
from headwater.kv.node.client import OnArrived, Part, StoreClient
from headwater.kv.node.link import OnEvents
from headwater.kv.node.store import Piece
from headwater.kv.pricing import TierRun

T = TypeVar("T")

_CLOSE_S = 30.0
_MATCH_S = 0.05


class StoreAgent:
    """See the module docstring. May be used from any thread."""

    def __init__(self, path: Path, name: str, *, patience_s: float = 2.0, on_events: OnEvents | None = None) -> None:
        """Waits up to `patience_s` for the store; without one, nothing is found until it comes. `on_events` is told on
        the agent's thread."""
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kv-agent", daemon=True)
        self._thread.start()
        self.client = self._call(_started(path, name, on_events, patience_s)).result(patience_s + _CLOSE_S)
        self._closed = False

    def num_in_host(self, ids: bytes) -> int:
        """As `StoreClient.num_in_host`: microseconds, asks nobody."""
        return self.client.num_in_host(ids)

    def match(self, chain: Piece, *, timeout_s: float = _MATCH_S, ask_s: float = 0.0) -> list[TierRun]:
        """As `StoreClient.match`; waits no longer than this. `ask_s`: how long of it others may be asked."""
        asked = self.ask(chain, ask_s=ask_s)
        try:
            return asked.result(timeout_s)
        except FutureTimeoutError:
            asked.cancel()
            return []

    def ask(self, chain: Piece, *, ask_s: float = 0.0, num_parts: int = 1) -> "Future[list[TierRun]]":
        """As `StoreClient.match`, for callers that do not wait; the future may be cancelled."""
        return self._call(self.client.match(chain, timeout_s=ask_s, num_parts=num_parts))

    def load(
        self, chain: Piece, into: Sequence[memoryview], *, timeout_s: float, on_arrived: OnArrived | None = None
    ) -> "Future[int]":
        """`on_arrived` is told on the agent's thread."""
        return self._call(self.client.load(chain, into, timeout_s=timeout_s, on_arrived=on_arrived))

    def load_parts(self, parts: Sequence[Part], *, timeout_s: float) -> "Future[int]":
        return self._call(self.client.load_parts(parts, timeout_s=timeout_s))

    def offer(self, chain: Piece, payloads: Sequence[memoryview]) -> "Future[int]":
        return self._call(self.client.offer(chain, payloads))

    def prefetch(self, chain: Piece, *, timeout_s: float) -> "Future[int]":
        return self._call(self.client.prefetch(chain, timeout_s=timeout_s))

    def close(self) -> None:
        """Idempotent. No buffer is used any more when it returns."""
        if self._closed:
            return
        self._call(self.client.close()).result(_CLOSE_S)
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        if self._loop.is_closed():
            work.close()
            raise StoreClosed("the store's agent is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _started(path: Path, name: str, on_events: OnEvents | None, patience_s: float) -> StoreClient:
    client = StoreClient(path, name, on_events=on_events)
    await client.start(patience_s=patience_s)
    return client
