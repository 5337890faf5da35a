"""KV events that are had by taking them out of the engine's queue, for engines that publish none.

There can be one reader: what one takes, no other gets. On one host a lock keeps the second one waiting; across hosts
the gaps show, and a reader that keeps finding them stands back for a while. The engine is asked often while it works,
rarely while it rests, and each wait is bounded.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.engines.kv_feed.drained import DrainedEvents
from headwater.engines.kv_feed.following import Telling
from headwater.engines.kv_feed.translate import FeedTranslator
from headwater.errors import HeadwaterError
from headwater.protocol.events import WorkerEvent
from headwater.runtime.private_folder import default_run_folder, ensure_private

_log = logging.getLogger(__name__)

_BUSY_S = 0.05
_IDLE_S = 1.0
_LINGER_S = 1.0
"""How long an engine that had news is asked often."""
_MAX_GAPS = 3
"""In a row: then somebody else reads too."""
_STAND_BACK_S = 60.0
_LOCK_RETRY_S = 5.0

Drain = Callable[[], Awaitable[Sequence[Any]]]
"""What has come since the last call. Raises `HeadwaterError`; what it would have brought is lost then."""


class ReaderLock:
    """Whether this process is the reader on this host of what `name` has."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._folder = folder or default_run_folder()
        self._path = self._folder / f"kv-events-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
        self._fd: int | None = None

    def acquire(self) -> bool:
        """At once, or not."""
        if self._fd is None:
            ensure_private(self._folder)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Draining(Telling):
    """`run` until `close`. `wake` says that the engine has got something to do."""

    def __init__(
        self,
        name: str,
        translator: FeedTranslator,
        tell: Callable[[list[WorkerEvent]], None],
        drain: Drain,
        block_size: int,
        adapters: Mapping[int, str] | None = None,
        lock: ReaderLock | None = None,
    ) -> None:
        super().__init__(name, translator, tell)
        self._drain = drain
        self._events = DrainedEvents(self, block_size, adapters)
        self._lock = lock
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._busy_until = self._loop.time() + _LINGER_S
        self._gaps = 0
        self._trouble = ""
        """What was last said of drains that fail, while they do."""

    def wake(self) -> None:
        self._woken.set()

    def forget(self) -> None:
        self._events.reset()
        super().forget()

    async def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    async def run(self) -> None:
        await self._await_turn()
        while True:
            await self._ask()
            if self._gaps >= _MAX_GAPS:
                await self._stand_back()
            await self._rest()

    async def _await_turn(self) -> None:
        if self._lock is None or self._lock.acquire():
            return
        _log.warning("another process of this host reads the KV events of %s, which only one can", self._name)
        mine = False
        while not mine:
            await asyncio.sleep(_LOCK_RETRY_S)
            mine = self._lock.acquire()
        _log.warning("reading the KV events of %s from here on", self._name)

    async def _ask(self) -> None:
        lost = self._events.num_lost
        try:
            documents = await self._drain()
        except HeadwaterError as error:
            self._events.lose(str(error))
            self._busy_until = 0.0
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("the KV events of %s cannot be read: %s", self._name, error)
            return
        self._trouble = ""
        self._events.take(documents)
        if documents:
            self._gaps = self._gaps + 1 if self._events.num_lost > lost else 0
            self._busy_until = self._loop.time() + _LINGER_S

    async def _stand_back(self) -> None:
        _log.error(
            "KV events of %s keep missing: somebody else reads them too, or its buffer (event_buffer_max_size) is too "
            "small; not read for %d s, meanwhile it is only guessed what it has cached",
            self._name,
            _STAND_BACK_S,
        )
        self.forget()
        self._gaps = 0
        await asyncio.sleep(_STAND_BACK_S)

    async def _rest(self) -> None:
        if self._woken.is_set():
            self._woken.clear()
            self._busy_until = self._loop.time() + _LINGER_S
        if self._loop.time() < self._busy_until:
            await asyncio.sleep(_BUSY_S)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), _IDLE_S)
