"""Descriptors: what they name, how they are cut into parts, and what they refuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import TransferRefused
from headwater.transfer.blocks import (
    MAX_CHUNK_BYTES,
    MAX_CHUNK_SPANS,
    MAX_RUNS,
    Blocks,
    check_pair,
    chunks_of,
    joined,
    pack_runs,
)

INDICES = st.lists(st.integers(0, 300), min_size=1, max_size=60)


def blocks(indices: list[int], *, size: int = 64, stride: int = 64, base: int = 0) -> Blocks:
    return Blocks("a", 1, 1, base, stride, size, pack_runs(indices))


@given(INDICES)
def test_indices_come_back_in_order(indices: list[int]) -> None:
    made = blocks(indices)
    assert made.indices() == indices
    assert made.count == len(indices)
    assert made.num_bytes == 64 * len(indices)


def test_a_long_run_costs_eight_bytes() -> None:
    assert len(pack_runs(range(5, 1_000_000))) == 8
    assert pack_runs(range(5, 9)) == pack_runs([5, 6, 7, 8])
    assert blocks(list(range(0, 10, 2))).indices() == [0, 2, 4, 6, 8]


@given(INDICES, st.data())
def test_positions_select(indices: list[int], data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, len(indices) - 1), min_size=1))
    assert blocks(indices).select(positions).indices() == [indices[position] for position in positions]


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=80),
    st.sampled_from([(64, 64, 64), (32, 64, 64), (64, 128, 64), (64, 64, 100)]),
    st.integers(0, 50),
)
def test_parts_pair_every_byte_with_its_own(
    pairs: list[tuple[int, int]], layout: tuple[int, int, int], base: int
) -> None:
    size, here, there = layout
    local = blocks([one for one, _ in pairs], size=size, stride=here, base=base)
    remote = blocks([other for _, other in pairs], size=size, stride=there, base=2 * base)
    expected = [(base + one * here + at, 2 * base + other * there + at) for one, other in pairs for at in range(size)]
    got = [
        (to + at, fro + at)
        for chunk in chunks_of(local, remote)
        for to, fro, length in zip(chunk.local, chunk.remote, chunk.lengths, strict=True)
        for at in range(length)
    ]
    assert got == expected


def test_neighbours_on_both_sides_are_one_span() -> None:
    (chunk,) = chunks_of(blocks(list(range(10, 20))), blocks(list(range(30, 40))))
    assert (chunk.local, chunk.remote, chunk.lengths) == ([640], [1920], [640])


def test_parts_are_bounded() -> None:
    scattered = chunks_of(blocks(list(range(0, 5000, 2))), blocks(list(range(1, 5001, 2))))
    assert [len(chunk.lengths) for chunk in scattered] == [MAX_CHUNK_SPANS, MAX_CHUNK_SPANS, 500]
    big = 3 * MAX_CHUNK_BYTES + 5
    parts = chunks_of(blocks([0], size=big, stride=big), blocks([1], size=big, stride=big))
    assert [chunk.num_bytes for chunk in parts] == [MAX_CHUNK_BYTES] * 3 + [5]
    assert parts[-1].local == [3 * MAX_CHUNK_BYTES]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1, max_size=30))
def test_joining_keeps_the_bytes(spans: list[tuple[int, int]]) -> None:
    def flat(offsets: list[int], lengths: list[int]) -> list[int]:
        return [at for offset, length in zip(offsets, lengths, strict=True) for at in range(offset, offset + length)]

    offsets, lengths = [offset for offset, _ in spans], [length for _, length in spans]
    starts, sizes = joined(offsets, lengths)
    assert flat(starts, sizes) == flat(offsets, lengths)
    assert all(one + size != other for one, size, other in zip(starts, sizes, starts[1:], strict=False))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (blocks([3]), "end at byte 256"),
        (blocks([0], base=193), "end at byte 257"),
        (Blocks("a", 1, 1, 0, 63, 64, pack_runs([0])), "do not fit a stride"),
        (Blocks("a", 1, 1, 0, 64, 0, pack_runs([0])), "do not fit a stride"),
        (Blocks("a", 1, 1, 0, 64, 64, b""), "0 bytes of runs"),
        (Blocks("a", 1, 1, 0, 64, 64, bytes(7)), "7 bytes of runs"),
        (Blocks("a", 1, 1, 0, 64, 64, bytes(8)), "without blocks"),
        (Blocks("a", 1, 1, 0, 64, 64, bytes(8 * MAX_RUNS + 8)), "bytes of runs"),
        (Blocks("a", 1, 1, 0, 64, 64, b"\xff" * 8), "end at byte"),
    ],
)
def test_what_lies_outside_is_refused(made: Blocks, says: str) -> None:
    with pytest.raises(TransferRefused, match=says):
        made.check(255 if "256" in says else 256)


@pytest.mark.parametrize("indices", [[-1], [2**32], ["a"], [1.5]])
def test_what_is_no_index_is_refused(indices: list[int]) -> None:
    with pytest.raises(TransferRefused, match="block indices"):
        pack_runs(indices)


def test_lists_must_match() -> None:
    assert check_pair(blocks([1, 2]), blocks([9, 4])) == 2
    with pytest.raises(TransferRefused, match="2 blocks here, 1 there"):
        check_pair(blocks([1, 2]), blocks([9]))
    with pytest.raises(TransferRefused, match="64 bytes here, of 32 there"):
        check_pair(blocks([1]), blocks([9], size=32))
