"""What became resident in one tier and what went, gathered into events. Bounded: a reader that stays away too long gets
the tier's present state instead of its history."""

from collections.abc import Callable, Iterable

from headwater.kv.block import ROOT
from headwater.kv.resident import stored_runs
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.types import BLOCK_ID_BYTES, Tier

TierEvent = BlocksStored | BlocksRemoved | BlocksCleared

_MAX_RUN_BLOCKS = 1024


class Journal:
    """`max_events`: how many may gather between two readings."""

    def __init__(self, tier: Tier, max_events: int = 10_000) -> None:
        self.tier = tier
        self._max_events = max_events
        self._events: list[TierEvent] = []
        self._stored = bytearray()
        self._stored_parent: bytes | None = None
        self._removed = bytearray()
        self.overflowed = False

    def stored(self, block_id: bytes, parent: bytes) -> None:
        self._flush_removed()
        follows = self._stored[-BLOCK_ID_BYTES:] == parent and len(self._stored) < _MAX_RUN_BLOCKS * BLOCK_ID_BYTES
        if not follows:
            self._flush_stored()
            self._stored_parent = None if parent == ROOT else parent
        self._stored += block_id

    def removed(self, block_id: bytes) -> None:
        self._flush_stored()
        self._removed += block_id
        if len(self._removed) >= _MAX_RUN_BLOCKS * BLOCK_ID_BYTES:
            self._flush_removed()

    def drain(self, resident: Callable[[], Iterable[tuple[bytes, bytes]]]) -> list[TierEvent]:
        """Events since the last call. `resident` gives (id, parent) of all blocks: asked only if there were too many,
        since that may cost more than all events."""
        self._flush_removed()
        self._flush_stored()
        events, self._events = self._events, []
        if not self.overflowed:
            return events
        self.overflowed = False
        runs = stored_runs((block_id, None if parent == ROOT else parent) for block_id, parent in resident())
        return [BlocksCleared(self.tier), *(BlocksStored(run.block_ids, run.parent, self.tier) for run in runs)]

    def _flush_stored(self) -> None:
        if self._stored:
            self._note(BlocksStored(bytes(self._stored), self._stored_parent, self.tier))
            self._stored.clear()

    def _flush_removed(self) -> None:
        if self._removed:
            self._note(BlocksRemoved(bytes(self._removed), self.tier))
            self._removed.clear()

    def _note(self, event: TierEvent) -> None:
        if len(self._events) >= self._max_events:
            self._events.clear()
            self.overflowed = True
        if not self.overflowed:
            self._events.append(event)
