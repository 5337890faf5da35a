"""Finding what has to go so that a block fits: whose, which, and when a whole chunk of another size. Pure; nothing is
evicted here."""

from collections.abc import Sequence

from headwater.kv.leases import Leases, Pins
from headwater.kv.policies import Policy
from headwater.kv.shares import Shares
from headwater.kv.space import Space, slot_bytes_for
from headwater.kv.table import BlockTable

_CHUNK_TRIES = 4


class Room:
    """Over the parts of one ledger."""

    def __init__(
        self, table: BlockTable, space: Space, policy: Policy, shares: Shares, leases: Leases, pins: Pins
    ) -> None:
        self._table, self._space, self._policy, self._shares = table, space, policy, shares
        self._readers, self._pins = leases.readers, pins

    def victim(self, group: int, keep: frozenset[int], slot_bytes: int = 0) -> int | None:
        """The block to give up next for a block of this group, none of `keep`; of that size, if one is given."""

        def usable(slot: int) -> bool:
            if self._readers[slot] or slot in self._pins or slot in keep:
                return False
            return not slot_bytes or self._space.slot_bytes_at(self._table.offset_of(slot)) == slot_bytes

        payers = self._shares.payers(group)
        return next((slot for payer in payers if (slot := self._policy.victim(payer, usable)) is not None), None)

    def for_payload(self, payload_bytes: int, group: int, keep: frozenset[int]) -> list[int]:
        """Blocks whose eviction makes room for one such payload: one of that size, or a whole chunk of blocks of
        another size if those are next to go. Empty if nothing may go."""
        wanted = slot_bytes_for(payload_bytes)
        for _ in range(_CHUNK_TRIES):
            victim = self.victim(group, keep)
            if victim is None:
                return []
            offset = self._table.offset_of(victim)
            if self._space.slot_bytes_at(offset) == wanted:
                return [victim]
            neighbours = self._space.neighbours(offset)
            payers = tuple(self._shares.payers(group))
            if all(self._may_go(slot, payers, keep) for slot in neighbours):
                return neighbours
            keep = keep.union(neighbours)
        alike = self.victim(group, keep, wanted)
        return [] if alike is None else [alike]

    def _may_go(self, slot: int, payers: Sequence[int], keep: frozenset[int]) -> bool:
        if self._table.read(slot) is None or self._readers[slot] or slot in self._pins or slot in keep:
            return False
        return self._policy.group_of(slot) in payers
