"""Turns at a slow medium: a few at a time, the most urgent first, the line bounded, every wait with a deadline."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum

from headwater.errors import DeadlineExceeded, Overloaded


class Priority(IntEnum):
    """Lower goes first."""

    DEMANDED = 0
    """A request waits for it."""
    EXPECTED = 1
    """A request that was routed here will ask for it."""
    BACKGROUND = 2


class Turns:
    """`num_turns` at once, `max_waiting` in line."""

    def __init__(self, num_turns: int, max_waiting: int) -> None:
        self._free = num_turns
        self._max_waiting = max_waiting
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []
        self._serial = 0

    @property
    def num_waiting(self) -> int:
        return sum(not turn.done() for _, _, turn in self._line)

    @asynccontextmanager
    async def turn(self, priority: Priority, timeout_s: float) -> AsyncIterator[None]:
        """Raises `Overloaded` when the line is full, `DeadlineExceeded` when the turn does not come in time."""
        await self._enter(priority, timeout_s)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, priority: Priority, timeout_s: float) -> None:
        if self._free:
            self._free -= 1
            return
        if self.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} others wait already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serial += 1
        heapq.heappush(self._line, (priority, self._serial, turn))
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError:
            self._give_up(turn)
            raise DeadlineExceeded(f"no turn within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    def _give_up(self, turn: "asyncio.Future[None]") -> None:
        """The turn may have come at the same instant: then it is for the next."""
        if turn.done() and not turn.cancelled():
            self._leave()

    def _leave(self) -> None:
        while self._line:
            turn = heapq.heappop(self._line)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
