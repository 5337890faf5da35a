"""The last batches of a publisher, encoded, within a bound of bytes."""

from collections import deque
from itertools import islice


class ReplayRing:
    """Batches with consecutive sequence numbers; the oldest give way."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._batches: deque[bytes] = deque()
        self._first = 0
        """Sequence number of the oldest batch kept."""

    @property
    def end(self) -> int:
        """Sequence number of the next batch."""
        return self._first + len(self._batches)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def append(self, batch: bytes) -> None:
        self._batches.append(batch)
        self._bytes += len(batch)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._batches.popleft())
            self._first += 1

    def recall(self, first: int, max_bytes: int) -> list[bytes] | None:
        """Batches from `first` on, at least one if there is any, up to `max_bytes`. None: not kept any more."""
        if not self._first <= first <= self.end:
            return None
        found: list[bytes] = []
        size = 0
        for batch in islice(self._batches, first - self._first, None):
            size += len(batch)
            if found and size > max_bytes:
                break
            found.append(batch)
        return found
