"""KV of tensor-parallel workers: who holds which heads, and what the blocks of a part of them are called. Pure.

A worker of rank r among n holds an n-th of the KV heads; where there are more workers than heads, neighbours hold the
same one. What is kept by head is therefore of use to any number of workers.
"""

from hashlib import blake2b

from headwater.errors import ConfigError
from headwater.types import BLOCK_ID_BYTES


def heads_of(rank: int, size: int, num_heads: int) -> range:
    """Heads that a worker holds. Raises `ConfigError` if they cannot be divided."""
    if not 0 <= rank < size or (num_heads % size and size % num_heads):
        raise ConfigError(f"{num_heads} KV heads cannot be divided among {size} workers (rank {rank})")
    if size >= num_heads:
        head = rank * num_heads // size
        return range(head, head + 1)
    each = num_heads // size
    return range(rank * each, (rank + 1) * each)


def is_first_holder(rank: int, size: int, num_heads: int) -> bool:
    """Whether no worker before this one holds the same heads: it stands for all of those."""
    return not rank or heads_of(rank - 1, size, num_heads) != heads_of(rank, size, num_heads)


def part_ids(ids: bytes, layout: str, part: int) -> bytes:
    """What the parts of blocks are called whose first parts are `ids`. Part 0 is the first.

    All bits differ from those of the first by what hashing layout and part gives. Two parts have one id only where the
    hashes of two prefixes differ by just that: as likely as that they are the same.
    """
    if not part:
        return ids
    mask = blake2b(f"{part}/{layout}".encode(), digest_size=BLOCK_ID_BYTES, person=b"hw-kv-part").digest()
    masks = mask * (len(ids) // BLOCK_ID_BYTES)
    return (int.from_bytes(ids) ^ int.from_bytes(masks)).to_bytes(len(ids))
