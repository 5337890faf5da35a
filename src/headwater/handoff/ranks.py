"""How KV blocks are cut between groups of workers of unequal tensor-parallel size.

A rank of such a group holds some of a layer's heads. In a block the heads come one after the other, `num_outer` times:
our CPU kernels' layout has one time per layer, with keys and values of all tokens of a head together; a layout with the
heads inside the tokens has one time per layer, token, and keys or values.

Each time is a row of a rank's block, and what one rank reads of another is the same part of every row: so a region of
blocks is described as one of rows, and all blocks of a pair of ranks move in one transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headwater.errors import TransferRefused
from headwater.transfer.blocks import Blocks, pack_runs

MAX_PIECES = 4096
"""Of a block, that are worth moving one by one."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of every row that moves from one rank to another."""

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

    def row_bytes(self, num_ranks: int) -> int:
        """Of one rank."""
        return len(heads_of(0, num_ranks, self.num_heads)) * self.head_bytes

    def rank_bytes(self, num_ranks: int) -> int:
        """Of a block of one rank."""
        return self.num_outer * self.row_bytes(num_ranks)


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
    found: list[Cut] = []
    for source_rank, heads in _sources(wanted, source_ranks, layout.num_heads):
        held = heads_of(source_rank, source_ranks, layout.num_heads)
        source, target = (heads[0] - held[0]) * layout.head_bytes, (heads[0] - wanted[0]) * layout.head_bytes
        found.append(Cut(source_rank, source, target, len(heads) * layout.head_bytes))
    whole = source_ranks == target_ranks or layout.num_outer == 1
    pieces = len(found) * (1 if whole else layout.num_outer)
    if pieces > MAX_PIECES:
        raise TransferRefused(
            f"between {source_ranks} and {target_ranks} ranks each block falls into {pieces} pieces, "
            f"more than {MAX_PIECES}: use the same number on both sides"
        )
    return found


def reads(
    layout: HeadLayout, sources: Sequence[Blocks], here: Blocks, target_ranks: int, target_rank: int
) -> list[tuple[Blocks, Blocks]]:
    """Pairs of descriptors (here, there), a transfer each, that fill the blocks of one rank from those of all ranks of
    another group, which hold the same tokens in the same order. Raises `TransferRefused`."""
    here_row, there_row = layout.row_bytes(target_ranks), layout.row_bytes(len(sources))
    return [
        (
            _rows(here, layout.num_outer, here_row, cut.target_offset, cut.num_bytes),
            _rows(sources[cut.source_rank], layout.num_outer, there_row, cut.source_offset, cut.num_bytes),
        )
        for cut in cuts(layout, len(sources), target_ranks, target_rank)
    ]


def _rows(blocks: Blocks, num_rows: int, row_bytes: int, offset: int, num_bytes: int) -> Blocks:
    """The same part of every row of these blocks."""
    if not blocks.block_bytes == blocks.stride == num_rows * row_bytes:
        raise TransferRefused(
            f"blocks of {blocks.block_bytes} bytes, {blocks.stride} apart, are not {num_rows} rows of {row_bytes} bytes"
        )
    rows = [row for index in blocks.indices() for row in range(index * num_rows, (index + 1) * num_rows)]
    return msgspec.structs.replace(
        blocks, base=blocks.base + offset, stride=row_bytes, block_bytes=num_bytes, runs=pack_runs(rows)
    )


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
