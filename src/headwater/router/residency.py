"""What workers hold: the prefix index behind the cluster view, fed by their events, or by guesses about the silent."""

from collections.abc import Iterable, Sequence
from typing import Literal

from headwater.kv.index import PrefixIndex, block_keys
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored, WorkerEvent
from headwater.router.approximate import LearnedBlocks
from headwater.types import BLOCK_ID_BYTES, Tier, WorkerId

Knowledge = Literal["events", "approximate", "none"]
"""How it is known what a worker holds: it tells, or it is guessed from what was sent there, or not (yet) at all."""

_CHURN_WINDOW_BLOCKS = 20_000.0

_TIER_WORTH: dict[Tier, float] = {"device": 1.0, "host": 0.9, "disk": 0.6, "peer": 0.6, "object": 0.3}
"""Part of the recompute time that a block saves, until transfers are priced by the time model."""


class Residency:
    """Blocks per worker and tier, and who has told about them."""

    def __init__(self, max_blocks: int) -> None:
        self.index = PrefixIndex(max_blocks)
        self.learned = LearnedBlocks(self.index)
        self._tiers: set[Tier] = {"device"}
        self._tellers: set[str] = set()
        self._recent_stored = self._recent_removed = 0.0

    def add_worker(self, worker_id: str) -> None:
        self.index.add_worker(WorkerId(worker_id))

    def remove_worker(self, worker_id: str) -> None:
        self.learned.told(worker_id)
        self.index.remove_worker(WorkerId(worker_id))
        self._tellers.discard(worker_id)

    def knowledge(self, worker_id: str) -> Knowledge:
        if worker_id in self._tellers:
            return "events"
        return "approximate" if self.learned.num_blocks(worker_id) else "none"

    def sends_events(self, worker_id: str) -> bool | None:
        """None: it has not been given enough to know."""
        if worker_id in self._tellers:
            return True
        return False if self.learned.is_silent(worker_id) else None

    def computed(self, worker_id: str, keys: Sequence[int], capacity: int, now: float) -> None:
        """A prompt was computed by a worker, which is all that is known of one that sends no events."""
        if worker_id not in self._tellers:
            self.learned.learn(worker_id, keys, capacity, now)

    @property
    def churn(self) -> float:
        """Blocks displaced per block stored, lately and over all workers: 0 while caches fill, 1 when they are full."""
        return min(1.0, self._recent_removed / self._recent_stored) if self._recent_stored else 0.0

    def apply(self, worker_id: str, event: WorkerEvent) -> None:
        worker = WorkerId(worker_id)
        match event:
            case BlocksStored():
                self._tiers.add(event.tier)
                if worker_id not in self._tellers:
                    self._tellers.add(worker_id)
                    self.learned.told(worker_id)
                self._note_stored(len(event.block_ids) // BLOCK_ID_BYTES)
                self.index.store(worker, block_keys(event.block_ids), event.tier)
            case BlocksRemoved():
                self._recent_removed += len(event.block_ids) // BLOCK_ID_BYTES
                self.index.remove(worker, block_keys(event.block_ids), event.tier)
            case BlocksCleared():
                self.learned.told(worker_id)
                for tier in (event.tier,) if event.tier is not None else tuple(self._tiers):
                    self.index.clear(worker, tier)
            case _:
                pass

    def _note_stored(self, blocks: int) -> None:
        remaining = max(0.0, 1.0 - blocks / _CHURN_WINDOW_BLOCKS)
        self._recent_stored = self._recent_stored * remaining + blocks
        self._recent_removed *= remaining

    def rebuild(self, worker_id: str, stored: Iterable[BlocksStored]) -> None:
        """Replace all that is known of a worker."""
        self.apply(worker_id, BlocksCleared())
        for event in stored:
            self.apply(worker_id, event)

    def cached_tokens(self, keys: Sequence[int], block_size: int, prompt_tokens: int) -> dict[str, int]:
        """Prompt tokens that each worker need not compute; workers that hold none are left out.

        A block in a slower tier counts for what it saves. At least one token is always left to compute.
        """
        worth: dict[str, float] = {}
        for tier in self._tiers:
            for worker, blocks in self.index.match(keys, tier).items():
                saved = blocks * _TIER_WORTH[tier]
                worth[worker] = max(worth.get(worker, 0.0), saved)
        return {worker: min(int(blocks * block_size), prompt_tokens - 1) for worker, blocks in worth.items()}
