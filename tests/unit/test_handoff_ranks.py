"""Blocks between groups of unequal tensor-parallel size: cut on paper, and moved between agents."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from headwater.errors import TransferRefused
from headwater.handoff.ranks import MAX_PIECES, HeadLayout, cuts, heads_of, reads
from headwater.transfer.agent import Agent
from headwater.transfer.options import AgentOptions
from headwater.transfer.regions import Region

KEY = b"k" * 32
OUTER, HEAD_BYTES, BLOCKS = 6, 12, 9
Array = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def split(whole: Array, num_ranks: int) -> list[bytearray]:
    """What each rank holds of blocks [block, outer, heads, bytes]."""
    heads = whole.shape[2]
    return [bytearray(whole[:, :, list(heads_of(rank, num_ranks, heads)), :].tobytes()) for rank in range(num_ranks)]


@contextlib.contextmanager
def group(held: list[bytearray], block_bytes: int, backend: str) -> Iterator[list[tuple[Agent, Region]]]:
    """A rank each, with an agent of its own."""
    with contextlib.ExitStack() as stack:
        members = []
        for rank, content in enumerate(held):
            agent = stack.enter_context(
                Agent(f"{backend}-{rank}-{id(held)}", AgentOptions(key=KEY, backends=(backend,)))
            )
            region = agent.allocate(len(content), block_bytes=block_bytes)
            region.view[:] = content
            members.append((agent, region))
        yield members


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("source", "target", "heads"), [(4, 2, 8), (1, 4, 4), (2, 1, 4), (2, 8, 4), (8, 2, 4), (2, 2, 8)]
)
def test_ranks_read_their_heads_from_ranks_of_another_group(backend: str, source: int, target: int, heads: int) -> None:
    layout = HeadLayout(OUTER, heads, HEAD_BYTES)
    whole = np.random.default_rng(1).integers(0, 256, (BLOCKS, OUTER, heads, HEAD_BYTES), dtype=np.uint8)
    there_blocks, here_blocks = [7, 0, 3, 4], [1, 2, 8, 5]
    empty = [bytearray(BLOCKS * layout.rank_bytes(target)) for _ in range(target)]
    with (
        group(split(whole, source), layout.rank_bytes(source), backend) as there,
        group(empty, layout.rank_bytes(target), backend) as here,
    ):
        sources = [region.blocks(there_blocks) for _, region in there]
        for rank, (agent, region) in enumerate(here):
            pairs = reads(layout, sources, region.blocks(here_blocks), target, rank)
            assert len(pairs) <= max(1, source // target)
            for local, remote in pairs:
                agent.add_peer(next(other.card() for other, _ in there if other.name == remote.agent))
                agent.read(local, remote).run()
            wanted = np.zeros_like(whole)
            wanted[here_blocks] = whole[there_blocks]
            assert bytes(region.view) == bytes(split(wanted, target)[rank])


@pytest.mark.parametrize(
    ("source", "target"), [(1, 1), (1, 4), (4, 1), (2, 4), (4, 2), (8, 2), (2, 8), (8, 8), (16, 4)]
)
@pytest.mark.parametrize("heads", [4, 8])
def test_every_head_comes_once(source: int, target: int, heads: int) -> None:
    layout = HeadLayout(OUTER, heads, HEAD_BYTES)
    for rank in range(target):
        taken = cuts(layout, source, target, rank)
        assert sum(cut.num_bytes for cut in taken) == layout.row_bytes(target)
        covered = [byte for cut in taken for byte in range(cut.target_offset, cut.target_offset + cut.num_bytes)]
        assert sorted(covered) == list(range(layout.row_bytes(target)))
        assert all(cut.source_offset + cut.num_bytes <= layout.row_bytes(source) for cut in taken)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    layout = HeadLayout(num_outer=30, num_heads=8, head_bytes=100)
    with pytest.raises(TransferRefused, match="do not divide"):
        cuts(layout, 3, 1, 0)
    with pytest.raises(TransferRefused, match="cannot be repeated"):
        cuts(layout, 12, 1, 0)
    absurd = HeadLayout(MAX_PIECES + 1, 8, 2)
    assert len(cuts(absurd, 4, 4, 0)) == 1, "whole blocks move in one piece"
    with pytest.raises(TransferRefused, match="pieces"):
        cuts(absurd, 4, 2, 0)
    with Agent("here", AgentOptions(key=KEY, backends=("shm",))) as agent:
        region = agent.allocate(4096, block_bytes=1024)
        with pytest.raises(TransferRefused, match="are not 30 rows of 800 bytes"):
            reads(layout, [region.blocks([0])] * 2, region.blocks([0]), 1, 0)
