"""Blocks that somebody outside the scheduler still reads or writes: they are not given to others meanwhile.

A hold is named by its key, keeps a reference to each of its blocks, and ends when it is released or when its time is
up. Blocks that may still be written have no such time: nobody may have them before the writer has let go.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headwater.kv.pool import BlockPool

NEVER = float("inf")

HoldKey = tuple[str, int]
"""What for, and a number of the caller's."""


class _Hold(NamedTuple):
    blocks: list[int]
    until: float


class Holds:
    """Named references to blocks of a pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_key: dict[HoldKey, _Hold] = {}
        self._next_end = NEVER

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: HoldKey) -> bool:
        return key in self._by_key

    @property
    def num_blocks(self) -> int:
        """Different blocks under any hold."""
        return len({block for hold in self._by_key.values() for block in hold.blocks})

    def tables(self) -> list[list[int]]:
        return [hold.blocks for hold in self._by_key.values()]

    def hold(self, key: HoldKey, blocks: Sequence[int], until: float = NEVER) -> None:
        """Keep these blocks, in prefix order; an older hold of that name is released."""
        self._pool.acquire(blocks)
        self.release(key)
        if blocks:
            self._by_key[key] = _Hold(list(blocks), until)
            self._next_end = min(self._next_end, until)

    def shorten(self, key: HoldKey, until: float) -> None:
        """End a hold earlier than was said; unknown ones are ignored."""
        hold = self._by_key.get(key)
        if hold is not None and until < hold.until:
            self._by_key[key] = _Hold(hold.blocks, until)
            self._next_end = min(self._next_end, until)

    def release(self, key: HoldKey) -> None:
        """Unknown ones are ignored."""
        hold = self._by_key.pop(key, None)
        if hold is not None:
            self._pool.free(hold.blocks)

    def expire(self, now: float) -> list[HoldKey]:
        """Release those whose time is up, and say which."""
        if now < self._next_end:
            return []
        ended = [key for key, hold in self._by_key.items() if hold.until <= now]
        for key in ended:
            self.release(key)
        self._next_end = min([hold.until for hold in self._by_key.values()], default=NEVER)
        return ended
