"""Queues of small numbers, from oldest to newest, in which any member can be taken out in constant time.

One pair of arrays links all queues: 8 bytes per number, however many queues there are. A number is in at most one.
"""

from array import array
from collections.abc import Iterator


class SlotQueues:
    """`num_queues` queues over the numbers 0 to `num_slots` - 1."""

    def __init__(self, num_slots: int, num_queues: int) -> None:
        nodes = num_slots + num_queues
        self._num_slots = num_slots
        self._newer = array("I", range(nodes))
        self._older = array("I", range(nodes))
        self._lengths = [0] * num_queues

    def length(self, queue: int) -> int:
        return self._lengths[queue]

    def push(self, queue: int, slot: int) -> None:
        """Add as the newest."""
        anchor = self._num_slots + queue
        newest = self._older[anchor]
        self._newer[newest] = slot
        self._older[slot] = newest
        self._newer[slot] = anchor
        self._older[anchor] = slot
        self._lengths[queue] += 1

    def push_oldest(self, queue: int, slot: int) -> None:
        anchor = self._num_slots + queue
        oldest = self._newer[anchor]
        self._older[oldest] = slot
        self._newer[slot] = oldest
        self._older[slot] = anchor
        self._newer[anchor] = slot
        self._lengths[queue] += 1

    def unlink(self, queue: int, slot: int) -> None:
        newer, older = self._newer[slot], self._older[slot]
        self._newer[older] = newer
        self._older[newer] = older
        self._lengths[queue] -= 1

    def oldest(self, queue: int) -> int | None:
        slot = self._newer[self._num_slots + queue]
        return None if slot >= self._num_slots else slot

    def from_oldest(self, queue: int) -> Iterator[int]:
        """The queue must not change meanwhile."""
        slot = self._newer[self._num_slots + queue]
        while slot < self._num_slots:
            yield slot
            slot = self._newer[slot]
