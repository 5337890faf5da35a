"""The checksum of a stored block: XXH3-64 over its payload, seeded with its id.

The seed binds content to name: bytes of another block, however intact, do not verify. It finds damage, not malice;
who may write to a store is decided elsewhere.
"""

from struct import Struct

from xxhash import xxh3_64, xxh3_64_intdigest

_seed = Struct("<Q").unpack_from
AT_ONCE_BYTES = 512 << 10
"""Up to here one call sums it, half as fast again as in parts: over too soon to be worth letting other threads run, and
what was just copied is still in the cache of the processor."""


def checksum(block_id: bytes, payload: bytes | bytearray | memoryview) -> int:
    """64 bits. Needs no copy of the payload."""
    if len(payload) <= AT_ONCE_BYTES:
        return xxh3_64_intdigest(payload, _seed(block_id)[0])
    total = Checksum(block_id)
    total.add(payload)
    return total.value()


class Checksum:
    """The same, of a payload that comes in parts."""

    __slots__ = ("_hasher",)

    def __init__(self, block_id: bytes) -> None:
        self._hasher = xxh3_64(seed=_seed(block_id)[0])

    def add(self, part: bytes | bytearray | memoryview) -> None:
        self._hasher.update(part)

    def value(self) -> int:
        return self._hasher.intdigest()
