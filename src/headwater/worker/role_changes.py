"""The role of one worker, which frontends may change where it is adaptive: one change after the other."""

import asyncio
import logging

from headwater.engines.base import Engine
from headwater.types import Role
from headwater.worker.record import WorkerRecord

_log = logging.getLogger(__name__)


class RoleChanges:
    """Lives on the event loop."""

    def __init__(self, engine: Engine, record: WorkerRecord) -> None:
        self._engine = engine
        self._record = record
        self._adaptive = False
        self._change: asyncio.Task[None] | None = None

    async def begin(self, role: Role, *, adaptive: bool) -> None:
        """With the engine ready."""
        self._adaptive = adaptive
        await self._engine.set_role(role)

    def ask(self, role: Role) -> None:
        if self._adaptive:
            self._change = asyncio.ensure_future(self._to(role, self._change))
        else:
            _log.warning("a frontend asked for the role %s, but this worker's is fixed (--role adaptive)", role)

    def close(self) -> None:
        if self._change is not None:
            self._change.cancel()

    async def _to(self, role: Role, former: asyncio.Task[None] | None) -> None:
        """What runs goes on; the cluster learns where to send what comes next."""
        if former is not None:
            await asyncio.gather(former, return_exceptions=True)
        await self._engine.set_role(role)
        if await self._record.change(role=role):
            _log.info("this worker's role is %s now", role)
