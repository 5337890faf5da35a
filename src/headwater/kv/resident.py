"""Which blocks are resident, told from events: the mirror behind snapshots, and a check on the events themselves.

A dict in order of storing has parents before children, since a child is never stored before its parent nor outlives
it. Refuses events that cannot be true.
"""

from collections.abc import Iterable

from headwater.errors import InternalError
from headwater.kv.identity import split_block_ids
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.types import BLOCK_ID_BYTES


class ResidentBlocks:
    """The set that stored, removed and cleared events of one tier add up to."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block_id: bytes) -> bool:
        return block_id in self._parents

    def num_leading(self, joined: bytes) -> int:
        """How many blocks of a chain, from its start, are there: none is there without the one before it."""
        low, high = 0, len(joined) // BLOCK_ID_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            if joined[(middle - 1) * BLOCK_ID_BYTES : middle * BLOCK_ID_BYTES] in self._parents:
                low = middle
            else:
                high = middle - 1
        return low

    def apply(self, event: BlocksStored | BlocksRemoved | BlocksCleared) -> None:
        match event:
            case BlocksStored(block_ids=joined, parent=parent):
                self._store(joined, parent)
            case BlocksRemoved(block_ids=joined):
                self._remove(joined)
            case BlocksCleared():
                self._parents.clear()

    def snapshot(self) -> list[BlocksStored]:
        """Events from which an empty set becomes this one."""
        return stored_runs(self._parents.items())

    def _store(self, joined: bytes, parent: bytes | None) -> None:
        for block_id in split_block_ids(joined):
            if block_id in self._parents:
                raise InternalError(f"block {block_id.hex()} stored twice")
            self._parents[block_id] = parent
            parent = block_id

    def _remove(self, joined: bytes) -> None:
        for block_id in split_block_ids(joined):
            if block_id not in self._parents:
                raise InternalError(f"block {block_id.hex()} removed but not resident")
            del self._parents[block_id]


def stored_runs(blocks: Iterable[tuple[bytes, bytes | None]]) -> list[BlocksStored]:
    """Join (id, parent id) pairs, parents before children, into as few runs as their order gives."""
    events: list[BlocksStored] = []
    run = bytearray()
    run_parent: bytes | None = None
    previous: bytes | None = None
    for block_id, parent in blocks:
        if not run or parent != previous:
            if run:
                events.append(BlocksStored(bytes(run), run_parent))
            run = bytearray()
            run_parent = parent
        run += block_id
        previous = block_id
    if run:
        events.append(BlocksStored(bytes(run), run_parent))
    return events
