"""Blocks that wait in memory until their run is whole, in any order of arrival. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from headwater.kv.block import Block
from headwater.kv.shares import OTHERS, Shares
from headwater.kv.stores.object.known import KnownRun
from headwater.kv.stores.object.runs import RunShape


@dataclass(frozen=True, slots=True)
class Loose:
    """A block with its bytes: a copy of our own, or for the length of one call the caller's."""

    shape: RunShape
    block: Block
    payload: memoryview
    group: int = OTHERS
    """Of tenants: to whom its bytes are charged while it waits here."""


@dataclass(frozen=True, slots=True)
class WholeRun:
    """All that an object is made of, in order: blocks at hand, before them perhaps some that another object has."""

    shape: RunShape
    start: int
    borrowed: tuple[KnownRun, int] | None
    """The first so many blocks are the same as in that object."""
    loose: list[Loose]

    @property
    def name(self) -> bytes:
        return self.loose[-1].block.id


Finder = Callable[[bytes], "Loose | tuple[KnownRun, int] | None"]


class Gathering:
    """See the module docstring. The oldest is dropped first when there is no room: the caller sees to that. What waits
    counts in `shares`."""

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = shares or Shares()
        self._loose: dict[bytes, Loose] = {}
        self._waiting: dict[bytes, set[bytes]] = {}
        """For the id of a block that is missing, the last blocks of runs that wait for it."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._loose)

    def get(self, block_id: bytes) -> Loose | None:
        return self._loose.get(block_id)

    def add(self, loose: Loose) -> None:
        """Takes a copy of the bytes."""
        self._loose[loose.block.id] = replace(loose, payload=memoryview(bytes(loose.payload)))
        self.num_bytes += len(loose.payload)
        self._shares.charge(loose.group, len(loose.payload))

    def pop(self, block_id: bytes) -> Loose | None:
        loose = self._loose.pop(block_id, None)
        if loose is not None:
            self.num_bytes -= len(loose.payload)
            self._shares.charge(loose.group, -len(loose.payload))
        return loose

    def regroup(self, group_of: Callable[[RunShape], int]) -> None:
        """Charge what waits to the groups that its tenants belong to now."""
        for block_id, loose in self._loose.items():
            group = group_of(loose.shape)
            if group != loose.group:
                self._shares.charge(loose.group, -len(loose.payload))
                self._shares.charge(group, len(loose.payload))
                self._loose[block_id] = replace(loose, group=group)

    def oldest(self) -> list[Loose]:
        return list(self._loose.values())

    def made_whole(self, shape: RunShape, blocks: Iterable[Block], find: Finder) -> list[WholeRun]:
        """The runs of which one of `blocks`, found by `find` now, was the missing piece."""
        lasts: set[bytes] = set()
        for block in blocks:
            if block.position % shape.num_blocks == shape.num_blocks - 1:
                lasts.add(block.id)
            lasts |= self._waiting.pop(block.id, set())
        runs = (self._assemble(shape, last, find) for last in lasts)
        return [run for run in runs if run is not None]

    def trim(self) -> None:
        """Forget to wait for runs whose last block is not here any more."""
        for missing in [key for key, lasts in self._waiting.items() if lasts.isdisjoint(self._loose)]:
            del self._waiting[missing]

    def _assemble(self, shape: RunShape, last: bytes, find: Finder) -> WholeRun | None:
        loose: list[Loose] = []
        wanted = last
        while len(loose) < shape.num_blocks:
            found = find(wanted)
            if isinstance(found, tuple):
                run, index = found
                fits = run.shape == shape and index + 1 + len(loose) == shape.num_blocks
                if not loose or not fits or None in run.ids[: index + 1]:
                    return None
                return WholeRun(shape, _start(loose), (run, index + 1), loose[::-1])
            if found is None or found.shape != shape:
                if loose:
                    self._waiting.setdefault(wanted, set()).add(last)
                return None
            loose.append(found)
            wanted = found.block.parent
        return WholeRun(shape, _start(loose), None, loose[::-1])


def _start(loose: list[Loose]) -> int:
    position, count = loose[0].block.position, loose[0].shape.num_blocks
    return position // count * count
