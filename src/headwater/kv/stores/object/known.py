"""Which blocks are known to be in the bucket, by run. Pure, bounded, least recently used runs first out."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headwater.kv.block import ROOT
from headwater.kv.stores.object.runs import RunShape


@dataclass(slots=True, eq=False)
class KnownRun:
    """One object. `ids[i]` is None where the id was never told here, or the block was removed here."""

    name: bytes
    shape: RunShape
    ids: list[bytes | None]
    removed: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Blocks that are in the object but count as absent until they are put again."""

    @property
    def num_blocks(self) -> int:
        return sum(block_id is not None for block_id in self.ids)


class KnownBlocks:
    """See the module docstring."""

    def __init__(self) -> None:
        self._runs: OrderedDict[bytes, KnownRun] = OrderedDict()
        self._at: dict[bytes, tuple[KnownRun, int]] = {}
        self._removed: dict[bytes, tuple[KnownRun, int]] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, block_id: bytes) -> bool:
        return block_id in self._at

    def find(self, block_id: bytes) -> tuple[KnownRun, int] | None:
        return self._at.get(block_id)

    def run(self, name: bytes) -> KnownRun | None:
        return self._runs.get(name)

    def touch(self, run: KnownRun) -> None:
        if run.name in self._runs:
            self._runs.move_to_end(run.name)

    def learn(self, shape: RunShape, name: bytes, ids: Iterable[tuple[int, bytes]]) -> list[int]:
        """Indices of the blocks that were not known before. A block lies in one known run only: the first one stays."""
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = KnownRun(name, shape, [None] * shape.num_blocks)
        self._runs.move_to_end(name)
        fresh: list[int] = []
        for index, block_id in ids:
            if run.ids[index] is None and block_id not in self._removed and block_id not in self._at:
                run.ids[index] = block_id
                self._at[block_id] = run, index
                fresh.append(index)
        return fresh

    def restore(self, block_id: bytes) -> bool:
        """Whether a removed block is still there: it is known again."""
        found = self._removed.pop(block_id, None)
        if found is None:
            return False
        run, index = self._at[block_id] = found
        del run.removed[index]
        run.ids[index] = block_id
        return True

    def remove(self, block_id: bytes) -> KnownRun | None:
        """The run that the block was in."""
        found = self._at.pop(block_id, None)
        if found is None:
            return None
        run, index = self._removed[block_id] = found
        run.ids[index] = None
        run.removed[index] = block_id
        return run

    def forget(self, name: bytes) -> list[bytes]:
        """Forget a whole run: the ids that are not known any more."""
        run = self._runs.pop(name, None)
        if run is None:
            return []
        gone = [block_id for block_id in run.ids if block_id is not None]
        for block_id in gone:
            del self._at[block_id]
        for block_id in run.removed.values():
            del self._removed[block_id]
        return gone

    def oldest(self) -> KnownRun | None:
        return next(iter(self._runs.values()), None)

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        """(id, parent) of every block that others are told of as of now, parents before children within a run; where
        the parent is not known the block stands as the first of a chain."""
        return _pairs([run.ids.copy() for run in self._runs.values() if not run.shape.beside])


def _pairs(runs: Sequence[Sequence[bytes | None]]) -> Iterator[tuple[bytes, bytes]]:
    for ids in runs:
        parent: bytes | None = None
        for block_id in ids:
            if block_id is not None:
                yield block_id, parent or ROOT
            parent = block_id
