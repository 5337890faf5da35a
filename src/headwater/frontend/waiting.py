"""How much memory requests may hold while they wait in a line of the frontend's own."""

from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import Overloaded

_MAX_BYTES = 64 * 1024 * 1024


class Waiting:
    """One account for all lines."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """For the time of a wait. Raises `Overloaded` for what is too much beside the others; one alone never is."""
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                f"requests of {self._num_bytes:,} bytes wait to be read; with {num_bytes:,} more it would be over the "
                f"limit of {self._max_bytes:,}"
            )
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes
