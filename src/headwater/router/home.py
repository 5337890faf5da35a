"""Where a prefix is at home: consistent hashing of its first tokens over the workers.

It decides between equal prices, always in the same way, so that a cold prefix that comes twice at once is computed
once, and joining or leaving workers move few homes.
"""

from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b

_POINTS_PER_WORKER = 32
_HOME_TOKENS = 1024


class HomeRing:
    """A ring of hash points; rebuilt when the set of workers changes."""

    def __init__(self) -> None:
        self._workers: tuple[str, ...] = ()
        self._points: list[int] = []
        self._owners: list[str] = []

    def home(self, keys: Sequence[int], block_size: int, workers: Sequence[str]) -> str | None:
        """The worker that the first 1,024 tokens name; None for a prompt without a full block."""
        if not keys:
            return None
        if self._workers != tuple(workers):
            self._rebuild(tuple(workers))
        key = keys[min(len(keys), max(1, _HOME_TOKENS // block_size)) - 1]
        return self._owners[bisect(self._points, key) % len(self._owners)]

    def _rebuild(self, workers: tuple[str, ...]) -> None:
        points = [
            (int.from_bytes(blake2b(f"{worker}/{number}".encode(), digest_size=8).digest(), "little"), worker)
            for worker in workers
            for number in range(_POINTS_PER_WORKER)
        ]
        points.sort()
        self._workers = workers
        self._points = [point for point, _ in points]
        self._owners = [worker for _, worker in points]
