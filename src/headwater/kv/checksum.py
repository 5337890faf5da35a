"""The checksum of a stored block: XXH3-64 over its payload, seeded with its id.

The seed binds content to name: bytes of another block, however intact, do not verify. It finds damage, not malice;
who may write to a store is decided elsewhere.
"""

from xxhash import xxh3_64_intdigest

_SEED_BYTES = 8


def checksum(block_id: bytes, payload: bytes | bytearray | memoryview) -> int:
    """64 bits. Needs no copy of the payload."""
    return xxh3_64_intdigest(payload, int.from_bytes(block_id[:_SEED_BYTES], "little"))
