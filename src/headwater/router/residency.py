"""What workers hold: the prefix index behind the cluster view, fed by their events, or by guesses about the silent."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from headwater.kv.index import TIERS, PrefixIndex, block_keys
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored, WorkerEvent
from headwater.router.approximate import LearnedBlocks
from headwater.types import BLOCK_ID_BYTES, Tier, WorkerId

Knowledge = Literal["events", "approximate", "none"]
"""How it is known what a worker holds: it tells, or it is guessed from what was sent there, or not (yet) at all."""

_CHURN_WINDOW_BLOCKS = 20_000.0

_TIER_WORTH: dict[Tier, float] = {"host": 0.9, "disk": 0.6, "peer": 0.6, "object": 0.3}
"""Part of the time to compute a block that having it there saves, at a worker that has not said what loads take."""


class Residency:
    """Blocks per worker and tier, and who has told about them."""

    def __init__(self, max_blocks: int) -> None:
        self.index = PrefixIndex(max_blocks)
        self.learned = LearnedBlocks(self.index)
        self._tiers: set[Tier] = {"device"}
        self._tellers: set[str] = set()
        self._worth: dict[str, Mapping[Tier, float]] = {}
        self._recent_stored = self._recent_removed = 0.0

    def add_worker(self, worker_id: str) -> None:
        self.index.add_worker(WorkerId(worker_id))

    def remove_worker(self, worker_id: str) -> None:
        self.learned.told(worker_id)
        self.index.remove_worker(WorkerId(worker_id))
        self._tellers.discard(worker_id)
        self._worth.pop(worker_id, None)

    def note_loads(self, worker_id: str, token_ms: Mapping[Tier, float], compute_token_ms: float) -> None:
        """What loading a token takes a worker, by tier, and what computing it would. Loads that are slower are left
        alone by workers: they save nothing, and cost nothing."""
        if compute_token_ms > 0:
            saved = {tier: 1.0 - load_ms / compute_token_ms for tier, load_ms in token_ms.items() if load_ms >= 0}
            self._worth[worker_id] = {tier: max(0.0, part) for tier, part in saved.items()}

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

        A block comes from the nearest tier that has it, and counts for what it saves. At least one token is always left
        to compute.
        """
        reach: dict[WorkerId, int] = self.index.match(keys)
        saved: dict[WorkerId, float] = dict(reach)
        if len(self._tiers) > 1:
            for tier in TIERS[1:]:
                if tier in self._tiers:
                    self._add_tier(tier, self.index.match(keys, tier), reach, saved)
        return {worker: min(int(blocks * block_size), prompt_tokens - 1) for worker, blocks in saved.items()}

    def _add_tier(
        self, tier: Tier, found: Mapping[WorkerId, int], reach: dict[WorkerId, int], saved: dict[WorkerId, float]
    ) -> None:
        """What a tier has beyond the nearer ones."""
        for worker, blocks in found.items():
            more = blocks - reach.get(worker, 0)
            if more > 0:
                worth = self._worth.get(worker, _TIER_WORTH).get(tier, _TIER_WORTH[tier])
                reach[worker] = blocks
                saved[worker] = saved.get(worker, 0.0) + more * worth
