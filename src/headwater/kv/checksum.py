"""The checksum of a stored block: XXH3-64 over its payload, seeded with its id.

The seed binds content to name: bytes of another block, however intact, do not verify. It finds damage, not malice;
who may write to a store is decided elsewhere.
"""

from xxhash import xxh3_64, xxh3_64_intdigest

_SEED_BYTES = 8
_SMALL_BYTES = 64 << 10
"""From here on a call that lets other threads run meanwhile costs little more."""


def checksum(block_id: bytes, payload: bytes | bytearray | memoryview) -> int:
    """64 bits. Needs no copy of the payload."""
    if len(payload) < _SMALL_BYTES:
        return xxh3_64_intdigest(payload, _seed(block_id))
    total = Checksum(block_id)
    total.add(payload)
    return total.value()


class Checksum:
    """The same, of a payload that comes in parts."""

    __slots__ = ("_hasher",)

    def __init__(self, block_id: bytes) -> None:
        self._hasher = xxh3_64(seed=_seed(block_id))

    def add(self, part: bytes | bytearray | memoryview) -> None:
        self._hasher.update(part)

    def value(self) -> int:
        return self._hasher.intdigest()


def _seed(block_id: bytes) -> int:
    return int.from_bytes(block_id[:_SEED_BYTES], "little")
