"""What takes long about a request is done on a thread of its own, so that the steps of all others go on meanwhile.

One thread, in the order of arrival: a client with costly grammars holds up other grammars, never plain requests. The
line is bounded; beyond that a request is `Overloaded`. Lives on the event loop and reports back there.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headwater.errors import HeadwaterError, InternalError, Overloaded
from headwater.protocol.request import EngineRequest

_log = logging.getLogger(__name__)

_MAX_PENDING = 256

Prepare = Callable[[EngineRequest], None]
OnPrepared = Callable[[EngineRequest, HeadwaterError | None], None]


class Preparation:
    """Nothing is reported about requests that were aborted, nor after `close`."""

    def __init__(self, prepare: Prepare, on_prepared: OnPrepared) -> None:
        self._prepare = prepare
        self._on_prepared = on_prepared
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._pending: dict[int, asyncio.Future[HeadwaterError | None]] = {}

    def begin(self, request: EngineRequest) -> None:
        """Raises `Overloaded`."""
        if len(self._pending) >= _MAX_PENDING:
            raise Overloaded(f"{_MAX_PENDING} requests with structured output wait for their grammars")
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._run, request)
        self._pending[request.stream] = future
        future.add_done_callback(partial(self._done, request))

    def abort(self, streams: Sequence[int]) -> None:
        for stream in streams:
            future = self._pending.pop(stream, None)
            if future is not None:
                future.cancel()

    async def close(self, timeout_s: float) -> None:
        """Wait for what is under way, so that it does not report to an event loop that is gone."""
        pending = list(self._pending.values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        if pending:
            await asyncio.wait(pending, timeout=timeout_s)

    def _run(self, request: EngineRequest) -> HeadwaterError | None:
        """On the thread."""
        try:
            self._prepare(request)
        except HeadwaterError as error:
            return error
        except Exception:  # noqa: BLE001 - the thread's boundary
            _log.exception("a request could not be prepared")
            return InternalError("the request could not be prepared")
        return None

    def _done(self, request: EngineRequest, future: "asyncio.Future[HeadwaterError | None]") -> None:
        if self._pending.pop(request.stream, None) is not None and not future.cancelled():
            self._on_prepared(request, future.result())
