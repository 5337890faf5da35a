"""Where a prefix is at home: consistent hashing of its first tokens over the workers.

It decides between equal prices, always in the same way, so that a cold prefix that comes twice at once is computed
once, and joining or leaving workers move few homes.
"""

from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

_POINTS_PER_WORKER = 32
_HOME_TOKENS = 1024


class Named(Protocol):
    @property
    def worker_id(self) -> str: ...


class HomeRing:
    """A ring of hash points; rebuilt when the set of workers changes."""

    def __init__(self) -> None:
        self._workers: Sequence[Named] = ()
        self._points: list[int] = []
        self._owners: list[str] = []

    def place(self, workers: Sequence[Named]) -> None:
        """Let these be the workers. Cheap as long as it is the same object, which must not change."""
        if self._workers is not workers:
            self._workers = workers
            self._rebuild([worker.worker_id for worker in workers])

    def home(self, keys: Sequence[int], block_size: int) -> str | None:
        """The worker that the first 1,024 tokens name; None for a prompt without a full block."""
        if not keys or not self._owners:
            return None
        return self._owner(keys[min(len(keys), max(1, _HOME_TOKENS // block_size)) - 1])

    def home_of(self, name: str) -> str | None:
        """The worker that a name leads to."""
        return self._owner(_point(name)) if self._owners else None

    def _owner(self, point: int) -> str:
        return self._owners[bisect(self._points, point) % len(self._owners)]

    def _rebuild(self, worker_ids: Sequence[str]) -> None:
        points = [
            (_point(f"{worker_id}/{number}"), worker_id)
            for worker_id in worker_ids
            for number in range(_POINTS_PER_WORKER)
        ]
        points.sort()
        self._points = [point for point, _ in points]
        self._owners = [worker_id for _, worker_id in points]


def _point(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
