"""How KV blocks are cut between groups of workers of unequal tensor-parallel size.

A rank of such a group holds some of a layer's heads. In a block the heads come one after the other, `num_outer` times:
our CPU kernels' layout has one time per layer, with keys and values of all tokens of a head together; a layout with the
heads inside the tokens has one time per layer, token, and keys or values.
"""

from dataclasses import dataclass

from headwater.errors import TransferRefused

MAX_RUNS = 4096
"""Pieces of a block that are worth moving one by one."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece of every block that moves from one rank to another."""

    source_rank: int
    source_offset: int
    target_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A block of a whole model, by its heads."""

    num_outer: int
    """Times that all heads come in a block, ..."""
    num_heads: int
    head_bytes: int
    """... and the bytes of one head each time."""

    def rank_bytes(self, num_ranks: int) -> int:
        """Of a block of one rank."""
        return self.num_outer * len(heads_of(0, num_ranks, self.num_heads)) * self.head_bytes


def heads_of(rank: int, num_ranks: int, num_heads: int) -> range:
    """The heads of one rank; with fewer heads than ranks, neighbours hold the same one."""
    if num_ranks <= num_heads:
        if num_heads % num_ranks:
            raise TransferRefused(f"{num_heads} KV heads do not divide among {num_ranks} ranks")
        each = num_heads // num_ranks
        return range(rank * each, (rank + 1) * each)
    if num_ranks % num_heads:
        raise TransferRefused(f"{num_heads} KV heads cannot be repeated on {num_ranks} ranks")
    head = rank * num_heads // num_ranks
    return range(head, head + 1)


def cuts(layout: HeadLayout, source_ranks: int, target_ranks: int, target_rank: int) -> list[Cut]:
    """What one target rank reads of whom. Raises `TransferRefused` where that is not worth it or impossible."""
    wanted = heads_of(target_rank, target_ranks, layout.num_heads)
    here = len(wanted) * layout.head_bytes
    found: list[Cut] = []
    for source_rank, heads in _sources(wanted, source_ranks, layout.num_heads):
        held = heads_of(source_rank, source_ranks, layout.num_heads)
        there, size = len(held) * layout.head_bytes, len(heads) * layout.head_bytes
        source, target = (heads[0] - held[0]) * layout.head_bytes, (heads[0] - wanted[0]) * layout.head_bytes
        found += [
            Cut(source_rank, outer * there + source, outer * here + target, size) for outer in range(layout.num_outer)
        ]
    found = _joined(found)
    if len(found) > MAX_RUNS:
        raise TransferRefused(
            f"between {source_ranks} and {target_ranks} ranks each block falls into {len(found)} pieces, "
            f"more than {MAX_RUNS}: use the same number on both sides"
        )
    return found


def _sources(wanted: range, num_ranks: int, num_heads: int) -> list[tuple[int, range]]:
    """Ranks that together hold the heads, each head once."""
    found: list[tuple[int, range]] = []
    next_head = wanted.start
    for rank in range(num_ranks):
        held = heads_of(rank, num_ranks, num_heads)
        if held.start <= next_head < held.stop and next_head < wanted.stop:
            heads = range(next_head, min(held.stop, wanted.stop))
            found.append((rank, heads))
            next_head = heads.stop
    return found


def _joined(found: list[Cut]) -> list[Cut]:
    """Neighbours on both sides as one."""
    joined: list[Cut] = []
    for cut in found:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source_rank == cut.source_rank
            and last.source_offset + last.num_bytes == cut.source_offset
            and last.target_offset + last.num_bytes == cut.target_offset
        ):
            joined[-1] = Cut(last.source_rank, last.source_offset, last.target_offset, last.num_bytes + cut.num_bytes)
        else:
            joined.append(cut)
    return joined
