"""Who reads which slots, and until when; and which slots are pinned. Pure bookkeeping for `headwater.kv.lifecycle`."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _Lease(NamedTuple):
    holder: int
    slots: Sequence[int]


class Leases:
    """Readers per slot. Leases all last equally long, so they run out in the order in which they began."""

    def __init__(self, num_slots: int) -> None:
        self._leases: dict[int, _Lease] = {}
        self._order: deque[tuple[float, int]] = deque()
        self._of_holder: dict[int, set[int]] = {}
        self.readers = array("I", bytes(4 * num_slots))
        """How many leases each slot is under."""

    def begin(self, holder: int, ticket: int, slots: Sequence[int], deadline: float) -> None:
        for slot in slots:
            self.readers[slot] += 1
        self._leases[ticket] = _Lease(holder, slots)
        self._order.append((deadline, ticket))
        self._of_holder.setdefault(holder, set()).add(ticket)

    def slots(self, holder: int, ticket: int) -> Sequence[int] | None:
        """None if it is not this holder's, or over."""
        lease = self._leases.get(ticket)
        return lease.slots if lease is not None and lease.holder == holder else None

    def end(self, ticket: int) -> list[int]:
        """The slots that nobody reads any more."""
        lease = self._leases.pop(ticket)
        tickets = self._of_holder[lease.holder]
        tickets.discard(ticket)
        if not tickets:
            del self._of_holder[lease.holder]
        left: list[int] = []
        for slot in lease.slots:
            self.readers[slot] -= 1
            if not self.readers[slot]:
                left.append(slot)
        return left

    def of(self, holder: int) -> list[int]:
        """Tickets of a holder."""
        return list(self._of_holder.get(holder, ()))

    def due(self, now: float) -> list[int]:
        """Tickets of leases that have run out, once each."""
        tickets: list[int] = []
        while self._order and self._order[0][0] <= now:
            ticket = self._order.popleft()[1]
            if ticket in self._leases:
                tickets.append(ticket)
        return tickets

    def check(self) -> None:
        """For tests."""
        readers = [0] * len(self.readers)
        for lease in self._leases.values():
            for slot in lease.slots:
                readers[slot] += 1
        assert readers == list(self.readers), "readers are miscounted"
        assert {ticket for tickets in self._of_holder.values() for ticket in tickets} == self._leases.keys()
        assert all(self._of_holder.values())


class Pins:
    """Slots that stay until a time, `max_bytes` together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pins: dict[int, tuple[float, int]] = {}
        self.num_bytes = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self._pins

    def pin(self, slot: int, slot_bytes: int, until: float) -> bool:
        """Also prolongs. False when there is no room for one more."""
        present = self._pins.get(slot)
        if present is None:
            if self.num_bytes + slot_bytes > self._max_bytes:
                return False
            self.num_bytes += slot_bytes
        self._pins[slot] = max(until, present[0]) if present else until, slot_bytes
        return True

    def unpin(self, slot: int) -> bool:
        present = self._pins.pop(slot, None)
        if present is None:
            return False
        self.num_bytes -= present[1]
        return True

    def expire(self, now: float) -> None:
        for slot in [slot for slot, (until, _) in self._pins.items() if until <= now]:
            self.unpin(slot)

    def check(self, committed: Iterable[int]) -> None:
        """For tests."""
        assert self._pins.keys() <= set(committed), "a pin on a block that is not there"
        assert self.num_bytes == sum(slot_bytes for _, slot_bytes in self._pins.values()) <= self._max_bytes
