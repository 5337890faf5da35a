"""Blocks of tensor-parallel workers: what a shard is called, and how to make one shard out of others. Pure.

A block is a number of equal planes (layers times keys and values, and tokens where a plane is one token), and in each
plane the heads of the shard lie side by side. A worker of rank r among n holds an n-th of the heads; where there are
more workers than heads, neighbours hold the same one. So a block of a shard is a set of slices of the blocks that
another number of workers stored, and a store filled by four workers can serve two, or one, or eight.
"""

from typing import NamedTuple

from headwater.errors import ConfigError


class ShardShape(NamedTuple):
    """Of the blocks of one model, whatever the number of workers."""

    num_planes: int
    num_heads: int
    """KV heads of the whole model."""
    head_bytes: int
    """Of one head in one plane."""

    def block_bytes(self, size: int) -> int:
        """Of a block of one worker among `size`."""
        return self.num_planes * len(heads_of(0, size, self.num_heads)) * self.head_bytes


class Slice(NamedTuple):
    """A part of a block to be copied."""

    rank: int
    """The shard whose block it comes from."""
    source: int
    target: int
    num_bytes: int


def shard_layout(layout: str, rank: int, size: int) -> str:
    """What to call the layout of a shard, so that its blocks have ids of their own."""
    return layout if size == 1 else f"{layout}.tp{rank}of{size}"


def heads_of(rank: int, size: int, num_heads: int) -> range:
    """Heads that a worker holds. Raises `ConfigError` if they cannot be divided."""
    if not 0 <= rank < size or (num_heads % size and size % num_heads):
        raise ConfigError(f"{num_heads} KV heads cannot be divided among {size} workers (rank {rank})")
    if size >= num_heads:
        head = rank * num_heads // size
        return range(head, head + 1)
    each = num_heads // size
    return range(rank * each, (rank + 1) * each)


def reslice(shape: ShardShape, rank: int, size: int, stored_size: int) -> list[Slice]:
    """How a block of worker `rank` among `size` is put together from blocks that `stored_size` workers stored."""
    wanted = heads_of(rank, size, shape.num_heads)
    target_plane = len(wanted) * shape.head_bytes
    slices: list[Slice] = []
    at = wanted.start
    while at < wanted.stop:
        source_rank = at * stored_size // shape.num_heads
        held = heads_of(source_rank, stored_size, shape.num_heads)
        count = min(held.stop, wanted.stop) - at
        source_plane = len(held) * shape.head_bytes
        for plane in range(shape.num_planes):
            source = plane * source_plane + (at - held.start) * shape.head_bytes
            target = plane * target_plane + (at - wanted.start) * shape.head_bytes
            slices.append(Slice(source_rank, source, target, count * shape.head_bytes))
        at += count
    return slices
