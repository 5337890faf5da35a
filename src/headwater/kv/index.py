"""The prefix index: which worker holds which prefix, in which tier.

A block id names its whole prefix, so one flat table from block to the set of its holders answers everything. Sets of
workers are bit masks over slots, so a look-up costs the same for one worker and for a thousand. Within one worker and
tier residency is prefix-closed (a parent is evicted after its children), so the masks along a prompt only shrink and
a look-up gallops from change to change instead of walking. Feeding it blocks whose parents are not resident is
allowed; they are found once the parents come.

Ids are cut to 64 bits: a false match needs a collision under the namespace's secret key and costs a wrong price,
never a wrong answer, because engines match full ids. The table is bounded: over `max_blocks` new blocks are not
recorded (and counted), which keeps what is there prefix-closed.

Cost per resident block, one holder: about 130 bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from struct import unpack
from sys import byteorder

from headwater.types import BLOCK_ID_BYTES, Tier, WorkerId

_LITTLE_ENDIAN = byteorder == "little"

TIERS: tuple[Tier, ...] = ("device", "host", "disk", "peer", "object")


def block_keys(joined: bytes) -> Sequence[int]:
    """The index keys of joined block ids: the first 8 bytes of each."""
    if _LITTLE_ENDIAN:
        return memoryview(joined)[: len(joined) // BLOCK_ID_BYTES * BLOCK_ID_BYTES].cast("Q")[::2]
    return unpack(f"<{len(joined) // BLOCK_ID_BYTES * 2}Q", joined)[::2]


@dataclass(slots=True)
class _TierTable:
    """Residency in one tier. Both maps say the same thing, seen from the block and from the worker."""

    holders: dict[int, int] = field(default_factory=dict[int, int])
    blocks_of: dict[int, set[int]] = field(default_factory=dict[int, set[int]])


@dataclass(frozen=True, slots=True)
class IndexStats:
    num_blocks: dict[Tier, int]
    """Distinct blocks per tier."""
    num_residencies: dict[Tier, int]
    """(block, worker) pairs per tier."""
    num_predicted: int
    num_dropped: int
    """Blocks not recorded because the index was full."""


class PrefixIndex:
    """See the module docstring. Not thread-safe; all calls are cheap."""

    def __init__(self, max_blocks: int = 8_000_000) -> None:
        self.max_blocks = max_blocks
        self._slots: dict[WorkerId, int] = {}
        self._workers: dict[int, WorkerId] = {}
        self._free_slots: list[int] = []
        self._tables: dict[Tier, _TierTable] = {tier: _TierTable() for tier in TIERS}
        self._predicted: dict[int, int | dict[int, int]] = {}
        """Per block, the one slot that it is predicted on once, as most are, or how often it is on which slots."""
        self._dropped = 0

    # Workers

    def add_worker(self, worker: WorkerId) -> None:
        if worker in self._slots:
            return
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        self._slots[worker] = slot
        self._workers[slot] = worker

    def remove_worker(self, worker: WorkerId) -> None:
        """Forget a worker and all it holds, in O(its blocks)."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        for tier in TIERS:
            self.clear(worker, tier)
        self.forget_all(worker)
        del self._slots[worker], self._workers[slot]
        self._free_slots.append(slot)

    # Residency

    def store(self, worker: WorkerId, keys: Sequence[int], tier: Tier = "device") -> None:
        slot = self._slots[worker]
        table = self._tables[tier]
        holders = table.holders
        blocks = table.blocks_of.setdefault(slot, set())
        bit = 1 << slot
        keys = list(keys)
        if len(keys) <= self.max_blocks - len(holders) and holders.keys().isdisjoint(keys):
            holders.update(dict.fromkeys(keys, bit))
            blocks.update(keys)
            return
        room = self.max_blocks - len(holders)
        for key in keys:
            held = holders.get(key)
            if held is None:
                if room <= 0:
                    self._dropped += 1
                    continue
                room -= 1
                holders[key] = bit
            elif not held & bit:
                holders[key] = held | bit
            blocks.add(key)

    def remove(self, worker: WorkerId, keys: Iterable[int], tier: Tier = "device") -> None:
        """Blocks it does not hold are ignored."""
        slot = self._slots[worker]
        table = self._tables[tier]
        blocks = table.blocks_of.get(slot)
        if blocks is None:
            return
        holders, bit = table.holders, 1 << slot
        for key in keys:
            held = holders.get(key, 0)
            if held == bit:
                del holders[key]
            elif held & bit:
                holders[key] = held ^ bit
            else:
                continue
            blocks.remove(key)

    def clear(self, worker: WorkerId, tier: Tier) -> None:
        slot = self._slots[worker]
        table = self._tables[tier]
        self.remove(worker, list(table.blocks_of.get(slot, ())), tier)
        table.blocks_of.pop(slot, None)

    # Predictions: routed, not yet computed

    def predict(self, worker: WorkerId, keys: Sequence[int]) -> None:
        """Count these blocks as resident on the device of `worker` until `forget` is called as often."""
        slot = self._slots[worker]
        predicted = self._predicted
        keys = list(keys)
        if predicted.keys().isdisjoint(keys):
            fresh = dict.fromkeys(keys, slot)
            if len(fresh) == len(keys):
                predicted.update(fresh)
                return
        for key in keys:
            known = predicted.get(key)
            if known is None:
                predicted[key] = slot
            elif isinstance(known, dict):
                known[slot] = known.get(slot, 0) + 1
            else:
                predicted[key] = {slot: 2} if known == slot else {known: 1, slot: 1}

    def forget(self, worker: WorkerId, keys: Sequence[int]) -> None:
        """Take back one `predict` of the same blocks."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        for key in keys:
            known = self._predicted.pop(key)
            if isinstance(known, dict):
                self._predicted[key] = known
                self._uncount(key, known, slot, 1)

    def forget_all(self, worker: WorkerId) -> None:
        """Take back all predictions for a worker: what was sent there is lost."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        for key, known in list(self._predicted.items()):
            if isinstance(known, dict):
                if slot in known:
                    self._uncount(key, known, slot, known[slot])
            elif known == slot:
                del self._predicted[key]

    def _uncount(self, key: int, counts: dict[int, int], slot: int, times: int) -> None:
        if counts[slot] > times:
            counts[slot] -= times
        else:
            del counts[slot]
        if not counts:
            del self._predicted[key]
        elif len(counts) == 1 and next(iter(counts.values())) == 1:
            self._predicted[key] = next(iter(counts))

    # Look-ups

    def match(self, keys: Sequence[int], tier: Tier = "device") -> dict[WorkerId, int]:
        """Blocks of the longest resident prefix per worker; workers without any are left out."""
        matched: dict[WorkerId, int] = {}
        position = 0
        mask = self._mask(keys, 0, tier) if keys else 0
        while mask:
            end = self._end_of_run(keys, position, mask, tier)
            after = self._mask(keys, end, tier) & mask if end < len(keys) else 0
            for slot in _bits(mask & ~after):
                matched[self._workers[slot]] = end
            position, mask = end, after
        return matched

    def _mask(self, keys: Sequence[int], position: int, tier: Tier) -> int:
        key = keys[position]
        mask = self._tables[tier].holders.get(key, 0)
        if tier == "device" and self._predicted and (known := self._predicted.get(key)) is not None:
            if isinstance(known, dict):
                for slot in known:
                    mask |= 1 << slot
            else:
                mask |= 1 << known
        return mask

    def _end_of_run(self, keys: Sequence[int], start: int, mask: int, tier: Tier) -> int:
        """First position after `start` not held by all of `mask` (prefix-closed, so galloping is exact)."""
        held, step = start, 1
        while held + step < len(keys) and self._mask(keys, held + step, tier) & mask == mask:
            held += step
            step *= 2
        low, high = held + 1, min(held + step, len(keys))
        while low < high:
            middle = (low + high) // 2
            if self._mask(keys, middle, tier) & mask == mask:
                low = middle + 1
            else:
                high = middle
        return low

    # Oversight

    def stats(self) -> IndexStats:
        return IndexStats(
            num_blocks={tier: len(table.holders) for tier, table in self._tables.items()},
            num_residencies={
                tier: sum(len(blocks) for blocks in table.blocks_of.values()) for tier, table in self._tables.items()
            },
            num_predicted=len(self._predicted),
            num_dropped=self._dropped,
        )

    def check(self) -> None:
        """Both views of every tier agree. Linear in the number of blocks: for idle time and tests."""
        for tier, table in self._tables.items():
            seen: dict[int, int] = {}
            for slot, blocks in table.blocks_of.items():
                assert slot in self._workers, f"{tier}: blocks of a worker that is gone"
                for key in blocks:
                    seen[key] = seen.get(key, 0) | 1 << slot
            assert seen == table.holders, f"{tier}: holders and blocks disagree"
        for known in self._predicted.values():
            counts = known if isinstance(known, dict) else {known: 1}
            assert counts, "a prediction of nobody"
            assert counts.keys() <= self._workers.keys(), "a prediction for a worker that is gone"
            assert all(count > 0 for count in counts.values()), "a prediction that does not count"


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
