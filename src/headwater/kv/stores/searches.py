"""Questions to others that go on when whoever asked has no time left: what they find is known to the next who asks."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Searches:
    """At most `limit` go on by themselves; beyond that a question ends with its asker."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, search: Coroutine[Any, Any, None]) -> None:
        """Raises what the search raises, if the caller still waits for it."""
        if len(self._running) >= self._limit:
            await search
            return
        task = asyncio.create_task(search)
        self._running.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waited, or to nobody
