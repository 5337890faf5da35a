"""Which block goes when room is needed. A policy orders the blocks of each tenant group; who is over its share is
decided above (`headwater.kv.room`), and what may not go now (leased, pinned) is told by `usable`.

Blocks of one chain are added and touched tail first, so that a tail is older than what it hangs on and goes before it.
"""

from array import array
from collections.abc import Callable
from typing import Literal, Protocol

from headwater.kv.queues import SlotQueues

PolicyName = Literal["lru", "s3fifo", "cost"]
Usable = Callable[[int], bool]
Worth = Callable[[int], float]
"""For a slot, the milliseconds per byte that having it saves whoever asks for it."""

_MAX_EXAMINED = 4096
"""Blocks given another round per victim; beyond it the oldest that may go goes."""
_SMALL_SHARE = 0.1
_MAX_USES = 3
_MAX_CREDIT = 3
_WORTH_MEMORY = 1 / 256


class Policy(Protocol):
    """Slots are small numbers. Every call is cheap; `victim` leaves its choice in place until `discard`."""

    def add(self, slot: int, group: int, key: int) -> None:
        """A block is new. `key`: 64 bits of its id."""
        ...

    def touch(self, slot: int) -> None: ...

    def discard(self, slot: int, *, evicted: bool) -> None: ...

    def group_of(self, slot: int) -> int:
        """As it was told when the block was new, or was moved."""
        ...

    def move(self, slot: int, group: int) -> None:
        """To another group, as its oldest."""
        ...

    def victim(self, group: int, usable: Usable) -> int | None:
        """The block of the group to give up next, or None if none is usable."""
        ...


def make_policy(name: PolicyName, num_slots: int, num_groups: int, worth: Worth) -> Policy:
    if name == "lru":
        return Lru(num_slots, num_groups)
    return S3Fifo(num_slots, num_groups) if name == "s3fifo" else CostAware(num_slots, num_groups, worth)


class _ByUse:
    """Keeps blocks in the order in which they were last used, in one queue per group."""

    def __init__(self, num_slots: int, num_groups: int) -> None:
        self._queues = SlotQueues(num_slots, num_groups)
        self._group = array("H", bytes(2 * num_slots))

    def add(self, slot: int, group: int, key: int) -> None:
        self._group[slot] = group
        self._queues.push(group, slot)

    def touch(self, slot: int) -> None:
        group = self._group[slot]
        self._queues.unlink(group, slot)
        self._queues.push(group, slot)

    def discard(self, slot: int, *, evicted: bool) -> None:
        self._queues.unlink(self._group[slot], slot)

    def group_of(self, slot: int) -> int:
        return self._group[slot]

    def move(self, slot: int, group: int) -> None:
        self._queues.unlink(self._group[slot], slot)
        self._group[slot] = group
        self._queues.push_oldest(group, slot)


class Lru(_ByUse):
    """Least recently used first."""

    def victim(self, group: int, usable: Usable) -> int | None:
        queues = self._queues
        for _ in range(min(_MAX_EXAMINED, queues.length(group))):
            slot = queues.oldest(group)
            if slot is None or usable(slot):
                return slot
            # Out of the way, so that a thousand pinned blocks are not passed again for every victim.
            queues.unlink(group, slot)
            queues.push(group, slot)
        return next(filter(usable, queues.from_oldest(group)), None)


class S3Fifo:
    """Three queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023): what is asked for once
    passes through a small queue; what is asked for again moves to the main one; what comes back soon after it went
    starts there. One sweep of cold blocks therefore evicts at most a tenth of what is warm."""

    def __init__(self, num_slots: int, num_groups: int) -> None:
        self._queues = SlotQueues(num_slots, 2 * num_groups)
        self._queue_of = array("H", bytes(2 * num_slots))
        self._uses = bytearray(num_slots)
        self._keys = array("Q", bytes(8 * num_slots))
        self._ghosts: list[dict[int, None]] = [{} for _ in range(num_groups)]

    def add(self, slot: int, group: int, key: int) -> None:
        returned = self._ghosts[group].pop(key, self) is None
        self._uses[slot] = 0
        self._keys[slot] = key
        self._push(slot, 2 * group + returned)

    def touch(self, slot: int) -> None:
        self._uses[slot] = min(_MAX_USES, self._uses[slot] + 1)

    def discard(self, slot: int, *, evicted: bool) -> None:
        group, main = divmod(self._queue_of[slot], 2)
        self._queues.unlink(2 * group + main, slot)
        if evicted and not main:
            ghosts = self._ghosts[group]
            ghosts[self._keys[slot]] = None
            while len(ghosts) > max(16, self._queues.length(2 * group + 1)):
                del ghosts[next(iter(ghosts))]

    def group_of(self, slot: int) -> int:
        return self._queue_of[slot] // 2

    def move(self, slot: int, group: int) -> None:
        queue = self._queue_of[slot]
        self._queues.unlink(queue, slot)
        self._queue_of[slot] = 2 * group + queue % 2
        self._queues.push_oldest(self._queue_of[slot], slot)

    def victim(self, group: int, usable: Usable) -> int | None:
        small, main = 2 * group, 2 * group + 1
        for _ in range(_MAX_EXAMINED):
            held = self._queues.length(small), self._queues.length(main)
            from_small = held[0] > _SMALL_SHARE * sum(held) or not held[1]
            slot = self._queues.oldest(small if from_small else main)
            if slot is None:
                return None
            uses = self._uses[slot]
            if uses == 0 and usable(slot):
                return slot
            self._queues.unlink(self._queue_of[slot], slot)
            self._uses[slot] = 0 if from_small else max(0, uses - 1)
            self._push(slot, main if uses or not from_small else small)
        everything = (slot for queue in (small, main) for slot in self._queues.from_oldest(queue))
        return next(filter(usable, everything), None)

    def _push(self, slot: int, queue: int) -> None:
        self._queue_of[slot] = queue
        self._queues.push(queue, slot)


class CostAware(_ByUse):
    """Least recently used first, but a block that saves much more than most is spared: one more round for each
    doubling over the mean, at most three. Deep blocks of long prompts and of large models earn that."""

    def __init__(self, num_slots: int, num_groups: int, worth: Worth) -> None:
        super().__init__(num_slots, num_groups)
        self._credit = bytearray(num_slots)
        self._worth = worth
        self._mean_worth = 0.0

    def add(self, slot: int, group: int, key: int) -> None:
        self._credit[slot] = self._credit_of(slot)
        super().add(slot, group, key)

    def touch(self, slot: int) -> None:
        self._credit[slot] = self._credit_of(slot)
        super().touch(slot)

    def victim(self, group: int, usable: Usable) -> int | None:
        queues, credit = self._queues, self._credit
        for _ in range(min(_MAX_EXAMINED, _MAX_CREDIT * queues.length(group))):
            slot = queues.oldest(group)
            if slot is None or not (credit[slot] or not usable(slot)):
                return slot
            credit[slot] = max(0, credit[slot] - 1)
            queues.unlink(group, slot)
            queues.push(group, slot)
        return next(filter(usable, queues.from_oldest(group)), None)

    def _credit_of(self, slot: int) -> int:
        worth = self._worth(slot)
        mean = self._mean_worth
        self._mean_worth = worth if not mean else mean + _WORTH_MEMORY * (worth - mean)
        credit = 0
        while credit < _MAX_CREDIT and worth >= (2 << credit) * mean > 0:
            credit += 1
        return credit
