"""Turns at a slow medium: the most urgent first, a bounded line, and no turn lost when somebody gives up."""

import asyncio

import pytest

from headwater.errors import DeadlineExceeded, Overloaded
from headwater.kv.node.turns import Priority, Turns
from headwater.runtime.conformance import on_loop


class TestTurns:
    @on_loop
    async def test_the_most_urgent_goes_first_and_equals_in_order(self) -> None:
        turns = Turns(1, 10)
        went: list[str] = []

        async def use(name: str, priority: Priority) -> None:
            async with turns.turn(priority, 5.0):
                went.append(name)

        async with turns.turn(Priority.BACKGROUND, 5.0):
            waiting = [
                asyncio.create_task(use(name, priority))
                for name, priority in (
                    ("spill", Priority.BACKGROUND),
                    ("expected", Priority.EXPECTED),
                    ("first", Priority.DEMANDED),
                    ("second", Priority.DEMANDED),
                )
            ]
            await asyncio.sleep(0)
            assert turns.num_waiting == 4
            assert went == []
        await asyncio.gather(*waiting)
        assert went == ["first", "second", "expected", "spill"]

    @on_loop
    async def test_the_line_is_bounded_and_waits_end(self) -> None:
        turns = Turns(1, 1)
        async with turns.turn(Priority.DEMANDED, 5.0):
            patient = asyncio.create_task(turns._enter(Priority.DEMANDED, 0.01))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="1 others wait"):
                await turns._enter(Priority.DEMANDED, 5.0)
            with pytest.raises(DeadlineExceeded, match="no turn"):
                await patient
            assert turns.num_waiting == 0

    @on_loop
    async def test_a_turn_that_comes_to_one_who_leaves_is_for_the_next(self) -> None:
        turns = Turns(1, 10)
        async with turns.turn(Priority.DEMANDED, 5.0):
            leaves = asyncio.create_task(turns._enter(Priority.DEMANDED, 5.0))
            await asyncio.sleep(0)
        leaves.cancel()  # its turn has come, and it does not know yet
        await asyncio.gather(leaves, return_exceptions=True)
        assert leaves.cancelled()
        async with turns.turn(Priority.DEMANDED, 0.0):
            pass
