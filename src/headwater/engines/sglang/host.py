"""SGLang's `Engine` on a thread of its own, with an event loop of its own.

SGLang's side of the process takes signals for itself where it runs on the main thread, stops the loop it runs on while
it loads, and wakes up for every token. So it is kept apart: requests go over one by one, and what comes back is handed
over once per turn of its loop, whatever the number of sequences.

The parts of SGLang that are used: `Engine`, its `async_generate`, `get_server_info` and `shutdown`, and of its
`tokenizer_manager` `abort_request`, `get_loads` and `model_config`.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
import uvloop

from headwater.engines.sglang_wire.answers import Chunk, gave_up
from headwater.errors import ConfigError, EngineFailed, HeadwaterError, InternalError, ModelError

_log = logging.getLogger(__name__)

_LOADS_S = 0.25
_ABORT_AGAIN_S = 0.05
_ABORTS = 600
"""SGLang ignores an abort of what has not reached its scheduler yet, so it is told until the sequence has ended."""
_END_TIMEOUT_S = 5.0

News = tuple[int, Chunk | HeadwaterError | None]
"""A stream, and what has come of it: None when its iterator has come to its end."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Summed over data-parallel ranks."""

    num_waiting: int
    used_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """What SGLang turned out to be."""

    server_info: dict[str, Any]
    context_len: int
    vocab_size: int
    architecture: str
    dtype: str


class SglangHost:
    """What it is given is called on the event loop that made the host."""

    def __init__(
        self,
        on_news: Callable[[list[News]], None],
        on_loads: Callable[[Loads], None],
        on_failed: Callable[[HeadwaterError], None],
    ) -> None:
        self._home = asyncio.get_running_loop()
        self._on_news = on_news
        self._on_loads = on_loads
        self._on_failed = on_failed
        self._loop = uvloop.new_event_loop()
        self._thread: threading.Thread | None = None
        self._engine: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._names: dict[int, str] = {}
        self._pending: list[News] = []
        self._polling: asyncio.Task[None] | None = None

    async def start(self, server_args: Any) -> Started:
        """Raises `ConfigError`, `ModelError`."""
        started: Future[Started] = Future()
        started.set_running_or_notify_cancel()  # who does not wait any longer cannot stop it from loading
        self._thread = threading.Thread(target=self._run, args=(server_args, started), name="sglang", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(started)

    def generate(self, stream: int, name: str, arguments: dict[str, Any]) -> None:
        self._do(self._begin, stream, name, arguments)

    def abort(self, streams: Sequence[int]) -> None:
        self._do(self._abort_all, list(streams))

    async def close(self, timeout_s: float) -> None:
        """Bounded: a thread that does not come to its end is left."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._do(self._stop)
        await asyncio.to_thread(thread.join, timeout_s)
        if thread.is_alive():
            _log.warning("SGLang did not shut down within %g s", timeout_s)

    # ---- on SGLang's thread

    def _run(self, server_args: Any, started: "Future[Started]") -> None:
        asyncio.set_event_loop(self._loop)
        try:
            started.set_result(self._launch(server_args))
        except HeadwaterError as error:
            started.set_exception(error)
        except (ValueError, TypeError, NotImplementedError) as error:
            started.set_exception(ConfigError(f"SGLang: {error}"))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the thread's boundary
            failed = ModelError(f"SGLang did not start: {error!r}", hint="its own log, above, says why")
            failed.__cause__ = error
            started.set_exception(failed)
        else:
            self._serve()
        finally:
            if self._engine is not None:
                self._engine.shutdown()
            asyncio.set_event_loop(None)
            self._loop.close()

    def _launch(self, server_args: Any) -> Started:
        from sglang.srt.entrypoints.engine import Engine

        self._engine = Engine(server_args=server_args)
        model = self._engine.tokenizer_manager.model_config
        architectures = getattr(model.hf_config, "architectures", None) or ["unknown"]
        return Started(
            server_info=self._engine.get_server_info(),
            context_len=int(model.context_len),
            vocab_size=int(model.vocab_size),
            architecture=str(architectures[0]),
            dtype=str(model.dtype).removeprefix("torch."),
        )

    def _serve(self) -> None:
        self._polling = self._loop.create_task(self._poll_loads())
        self._polling.add_done_callback(self._polled)
        try:
            if self._thread is not None:  # else it was closed while it was loading
                self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end())

    def _stop(self) -> None:
        if self._polling is not None:  # while it is loading, SGLang runs the loop
            self._loop.stop()

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)

    def _begin(self, stream: int, name: str, arguments: dict[str, Any]) -> None:
        self._names[stream] = name
        task = self._tasks[stream] = self._loop.create_task(self._generate(stream, name, arguments))
        task.add_done_callback(lambda _: self._ended(stream))

    async def _generate(self, stream: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            chunks = await self._engine.async_generate(rid=name, **arguments)
            async for chunk in chunks:
                self._tell(stream, msgspec.convert(chunk, Chunk))
        except ValueError as error:  # how SGLang refuses
            self._tell(stream, gave_up(HTTPStatus.BAD_REQUEST, str(error)))
        except Exception as error:  # noqa: BLE001 - the task's boundary
            _log.exception("SGLang failed with a request")
            self._tell(stream, InternalError(f"SGLang could not make sense of this request: {error!r}"))

    def _ended(self, stream: int) -> None:
        self._tasks.pop(stream, None)
        self._names.pop(stream, None)
        self._tell(stream, None)

    def _abort_all(self, streams: Sequence[int]) -> None:
        for stream in streams:
            self._abort(stream)

    def _abort(self, stream: int, tries: int = _ABORTS) -> None:
        name = self._names.get(stream)
        if name is not None and tries:
            self._engine.tokenizer_manager.abort_request(rid=name)
            self._loop.call_later(_ABORT_AGAIN_S, self._abort, stream, tries - 1)

    async def _poll_loads(self) -> None:
        while True:
            ranks = await self._engine.tokenizer_manager.get_loads(include=["core"])
            loads = Loads(
                sum(rank.num_waiting_reqs for rank in ranks),
                sum(rank.num_used_tokens for rank in ranks),
                sum(rank.max_total_num_tokens for rank in ranks),
            )
            self._hand_over(self._on_loads, loads)
            await asyncio.sleep(_LOADS_S)

    def _polled(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._hand_over(self._on_failed, EngineFailed(f"SGLang does not say how busy it is: {error!r}"))

    def _tell(self, stream: int, news: Chunk | HeadwaterError | None) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append((stream, news))

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        self._hand_over(self._on_news, pending)

    def _hand_over(self, take: Callable[[Any], None], what: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the worker's loop is gone, and with it who would listen
            self._home.call_soon_threadsafe(take, what)

    def _do(self, work: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # SGLang's loop is closed: everything has ended
            self._loop.call_soon_threadsafe(work, *args)
