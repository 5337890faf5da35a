"""What workers probably hold that tell nothing about their KV blocks, learned from what was sent there.

A prompt counts as held from its first token on, for a time to live and within the worker's capacity; its end is
forgotten before its beginning, as engines evict. A worker counts as silent after a few prompts without any event, and
as not caching at all when it keeps computing what it should have had. The first event ends all guessing.
"""

from collections import OrderedDict
from collections.abc import Sequence

from headwater.kv.index import PrefixIndex
from headwater.types import WorkerId

_SILENT_AFTER = 3
"""Prompts of at least one full block that brought no event."""
_SILENT_AFTER_S = 2.0
"""Events may take a little longer than tokens."""
_CACHELESS_AFTER = 5
"""Prompts in a row of which nothing was found that should have been there."""
_DEFAULT_CAPACITY_BLOCKS = 8192
_SWEEP_S = 1.0


class _Learned:
    """One worker."""

    __slots__ = ("blocks", "caches", "misses", "prompts", "silent", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.silent = False
        self.blocks: OrderedDict[int, float] = OrderedDict()
        """When each expires; the next to go first."""
        self.prompts = 0
        self.misses = 0
        self.caches = True


class LearnedBlocks:
    """Writes into the prefix index like events would. Its methods are for silent workers only, but for `told`."""

    def __init__(self, index: PrefixIndex, ttl_s: float = 120.0) -> None:
        self.newly_silent: list[str] = []
        """Workers found to be silent, for whoever tells the operator, who clears it."""
        self._index = index
        self._ttl_s = ttl_s
        self._workers: dict[str, _Learned] = {}
        self._next_sweep = 0.0

    def is_silent(self, worker_id: str) -> bool:
        """Whether enough prompts went there to be sure that it tells nothing."""
        learned = self._workers.get(worker_id)
        return learned is not None and learned.silent

    def caches(self, worker_id: str) -> bool:
        learned = self._workers.get(worker_id)
        return learned is None or learned.caches

    def num_blocks(self, worker_id: str) -> int:
        learned = self._workers.get(worker_id)
        return len(learned.blocks) if learned is not None else 0

    def learn(self, worker_id: str, keys: Sequence[int], capacity: int, now: float) -> None:
        """A prompt has been computed there. `capacity`: blocks that fit, 0 if unknown."""
        if not keys:
            return
        learned = self._workers.get(worker_id)
        if learned is None:
            learned = self._workers[worker_id] = _Learned(now)
        learned.prompts += 1
        if not learned.silent and learned.prompts >= _SILENT_AFTER and now - learned.since >= _SILENT_AFTER_S:
            learned.silent = True
            self.newly_silent.append(worker_id)
        if learned.caches:
            self._keep(worker_id, learned, keys, capacity, now)

    def _keep(self, worker_id: str, learned: _Learned, keys: Sequence[int], capacity: int, now: float) -> None:
        blocks, until = learned.blocks, now + self._ttl_s
        self._index.store(WorkerId(worker_id), [key for key in keys if key not in blocks])
        for key in reversed(keys):
            blocks[key] = until
            blocks.move_to_end(key)
        surplus = len(blocks) - (capacity or _DEFAULT_CAPACITY_BLOCKS)
        if surplus > 0:
            self._drop(worker_id, [blocks.popitem(last=False)[0] for _ in range(surplus)])

    def note_cached(self, worker_id: str, expected_tokens: int, cached_tokens: int) -> None:
        """The worker said how much of a prompt it had."""
        learned = self._workers.get(worker_id)
        if learned is None:
            return
        if cached_tokens > 0:
            learned.misses, learned.caches = 0, True
        elif expected_tokens > 0:
            learned.misses += 1
            if learned.misses >= _CACHELESS_AFTER:
                learned.caches = False
                self._clear(worker_id, learned)

    def sweep(self, now: float) -> None:
        """Forget what has outlived its time; cheap when called often."""
        if now < self._next_sweep or not self._workers:
            return
        self._next_sweep = now + _SWEEP_S
        for worker_id, learned in self._workers.items():
            blocks = learned.blocks
            expired: list[int] = []
            while blocks and next(iter(blocks.values())) <= now:
                expired.append(blocks.popitem(last=False)[0])
            self._drop(worker_id, expired)

    def told(self, worker_id: str) -> None:
        """It sends events after all, or is gone."""
        learned = self._workers.pop(worker_id, None)
        if learned is not None:
            self._clear(worker_id, learned)

    def _clear(self, worker_id: str, learned: _Learned) -> None:
        self._drop(worker_id, list(learned.blocks))
        learned.blocks.clear()

    def _drop(self, worker_id: str, keys: Sequence[int]) -> None:
        if keys:
            self._index.remove(WorkerId(worker_id), keys)
