"""How a worker is told to leave: once, so that it drains, and again, so that it goes at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Leaving:
    """Lives on the event loop."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        """Time for what is open to end."""
        self._told = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def told(self) -> bool:
        return self._told.is_set()

    @property
    def hurried(self) -> bool:
        """Whether it was told twice."""
        return self._hurried.is_set()

    def tell(self) -> None:
        if self.told:
            self._hurried.set()
        self._told.set()

    def must(self) -> None:
        """There is no other way, and no hurry for those who have left it time."""
        self._told.set()

    def shorten(self, within_s: float) -> None:
        """Never lengthens it."""
        self.within_s = min(max(0.0, within_s), self.within_s)

    async def wait(self) -> None:
        await self._told.wait()

    async def unless_told(self, work: Coroutine[Any, Any, object]) -> bool:
        """Whether the work was done before; else it is cancelled. Raises what the work raises."""
        done = await _before(self._told, work)
        if done is None:
            return False
        done.result()
        return True

    async def unless_hurried(self, work: Coroutine[Any, Any, object]) -> None:
        """The work, as far as it comes."""
        await _before(self._hurried, work)


async def _before(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> asyncio.Future[object] | None:
    """The work, if it came to an end before the event did; else it is cancelled."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
