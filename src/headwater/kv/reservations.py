"""Who writes which blocks, and until when. Pure bookkeeping for `headwater.kv.lifecycle`."""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum

from headwater.kv.block import Block


class Refusal(Enum):
    """Why nothing was reserved for a block."""

    PRESENT = "present"
    BUSY = "busy"
    """Another holder is writing it."""
    FULL = "full"


@dataclass(slots=True)
class Reservation:
    """Places of one family, all of one size."""

    holder: int
    family: int
    slot_bytes: int
    deadline: float
    blocks: dict[int, tuple[Block, int]] = field(default_factory=dict[int, tuple[Block, int]])
    """Per slot: block, offset."""
    stranded: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.blocks) * self.slot_bytes


class Reservations:
    """By ticket. They all last equally long, so they run out in the order in which they began."""

    def __init__(self) -> None:
        self._reservations: dict[int, Reservation] = {}
        self._order: deque[tuple[float, int]] = deque()
        self._of_holder: dict[int, set[int]] = {}
        self.writing: set[bytes] = set()
        """Ids of blocks that somebody writes and nobody else may."""
        self.num_bytes = 0

    def __getitem__(self, ticket: int) -> Reservation:
        return self._reservations[ticket]

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._reservations.values())

    def begin(self, ticket: int, reservation: Reservation) -> None:
        self._reservations[ticket] = reservation
        self._order.append((reservation.deadline, ticket))
        self._of_holder.setdefault(reservation.holder, set()).add(ticket)
        self.num_bytes += reservation.num_bytes

    def end(self, holder: int, ticket: int) -> Reservation | None:
        """Take it out of the books; None if it is not this holder's, or over."""
        reservation = self._reservations.get(ticket)
        if reservation is None or reservation.holder != holder:
            return None
        del self._reservations[ticket]
        self._release_ids(reservation)
        self.num_bytes -= reservation.num_bytes
        tickets = self._of_holder[holder]
        tickets.discard(ticket)
        if not tickets:
            del self._of_holder[holder]
        return reservation

    def of(self, holder: int) -> list[int]:
        """Tickets of a holder."""
        return list(self._of_holder.get(holder, ()))

    def strand(self, families: Collection[int]) -> None:
        """What is being written of these is called off."""
        for reservation in self._reservations.values():
            if reservation.family in families:
                self._strand(reservation)

    def strand_due(self, now: float) -> int:
        """Those that have run out are called off; how many."""
        number = 0
        while self._order and self._order[0][0] <= now:
            reservation = self._reservations.get(self._order.popleft()[1])
            if reservation is not None and not reservation.stranded:
                self._strand(reservation)
                number += 1
        return number

    @property
    def num_stranded(self) -> int:
        """Places that wait for a late writer."""
        return sum(len(one.blocks) for one in self._reservations.values() if one.stranded)

    def check(self) -> None:
        """For tests."""
        live = [one for one in self._reservations.values() if not one.stranded]
        assert self.writing == {block.id for one in live for block, _ in one.blocks.values()}
        assert {ticket for tickets in self._of_holder.values() for ticket in tickets} == self._reservations.keys()
        assert self.num_bytes == sum(one.num_bytes for one in self._reservations.values())

    def _strand(self, reservation: Reservation) -> None:
        self._release_ids(reservation)
        reservation.stranded = True

    def _release_ids(self, reservation: Reservation) -> None:
        if not reservation.stranded:
            self.writing.difference_update([block.id for block, _ in reservation.blocks.values()])
