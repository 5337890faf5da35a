"""Sleep and wake of a worker whose engine can: it keeps its place in the registry, where it is not ready meanwhile.

    ready --Sleep--> draining: nothing new, streams finish or move on --> asleep: the engine's memory is given back
    asleep --Wake--> ready

What cannot fall asleep is ready again; what does not wake up has failed.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from headwater.engines.base import Engine, Sleeper
from headwater.errors import EngineFailed, HeadwaterError, Unavailable
from headwater.worker.record import WorkerRecord

_log = logging.getLogger(__name__)

_LOOK_S = 0.05


class NapOwner(Protocol):
    """The worker."""

    @property
    def num_streams(self) -> int: ...

    def refuse(self, error: HeadwaterError | None) -> None:
        """Everything new, from now on, or nothing any more."""
        ...

    def end_open(self, error: HeadwaterError) -> None: ...

    def on_failed(self, error: HeadwaterError) -> None: ...


class Nap:
    """One change after the other. Lives on the event loop."""

    def __init__(self, engine: Engine, record: WorkerRecord, owner: NapOwner, within_s: Callable[[], float]) -> None:
        self._engine = engine
        self._record = record
        self._owner = owner
        self._within_s = within_s
        self._asleep = False
        self._num_failed = 0
        self._change: asyncio.Task[None] | None = None

    def sleep(self) -> None:
        self._begin(True)

    def wake(self) -> None:
        self._begin(False)

    def close(self) -> None:
        if self._change is not None:
            self._change.cancel()

    def _begin(self, asleep: bool) -> None:
        if isinstance(self._engine, Sleeper):
            self._change = asyncio.ensure_future(self._to(asleep, self._engine, self._change))
        else:
            _log.warning("a frontend asked this worker to sleep or wake, which its engine cannot")

    async def _to(self, asleep: bool, engine: Sleeper, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            await asyncio.gather(former, return_exceptions=True)
        if asleep != self._asleep:
            await (self._fall_asleep(engine) if asleep else self._wake_up(engine))

    async def _fall_asleep(self, engine: Sleeper) -> None:
        resting = Unavailable("this worker sleeps", retry_after_s=5.0)
        self._owner.refuse(resting)
        await self._record.change(state="draining")
        for _ in range(round(self._within_s() / _LOOK_S)):
            if not self._owner.num_streams:
                break
            await asyncio.sleep(_LOOK_S)
        self._owner.end_open(resting)
        try:
            await engine.sleep()
        except HeadwaterError as error:
            _log.error("this worker cannot sleep and goes on: %s", error)
            self._owner.refuse(None)
            self._num_failed += 1
            await self._record.change(state="ready", num_failed_sleeps=self._num_failed)
        else:
            self._asleep = True
            await self._record.change(state="asleep")
            _log.info("asleep")

    async def _wake_up(self, engine: Sleeper) -> None:
        try:
            await engine.wake()
        except HeadwaterError as error:
            self._owner.on_failed(EngineFailed(f"it does not wake up: {error}"))
            return
        self._asleep = False
        self._owner.refuse(None)
        await self._record.change(state="ready")
        _log.info("awake")
