"""Rules on the wire."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import PayloadTooLarge
from headwater.runtime import wire


@given(st.lists(st.integers() | st.text(), max_size=40).filter(lambda items: all(_fits(item) for item in items)))
def test_joined_frames_are_one_array(items: list[object]) -> None:
    joined = wire.join_frames([msgspec.msgpack.encode(item) for item in items])
    assert msgspec.msgpack.decode(joined) == items


def _fits(item: object) -> bool:
    return not isinstance(item, int) or -(2**63) <= item < 2**64


def test_long_arrays_have_the_longer_header() -> None:
    for count in (15, 16, 17, 1024):
        assert msgspec.msgpack.decode(wire.join_frames([b"\x01"] * count)) == [1] * count


@given(st.lists(st.integers(1, 60), min_size=1, max_size=50))
def test_batches_fit_and_keep_the_order(sizes: list[int]) -> None:
    frames = [bytes([number % 250]) * size for number, size in enumerate(sizes)]
    limit, wire.MAX_MESSAGE_BYTES = wire.MAX_MESSAGE_BYTES, 100
    try:
        batches = wire.split_batches(frames)
        assert [frame for batch in batches for frame in batch] == frames
        assert all(len(wire.join_frames(batch)) <= 100 for batch in batches)
        for one, two in itertools.pairwise(batches):
            assert sum(map(len, [*one, two[0]])) > 97, "split too early"
    finally:
        wire.MAX_MESSAGE_BYTES = limit


def test_many_small_frames_are_split_by_number() -> None:
    assert [len(batch) for batch in wire.split_batches([b"\x01"] * 2500)] == [1024, 1024, 452]


def test_a_frame_that_cannot_fit_is_refused_by_size() -> None:
    assert wire.check_size(b"x" * 10) == b"x" * 10
    with pytest.raises(PayloadTooLarge, match="33,554,432"):
        wire.check_size(bytes(wire.MAX_MESSAGE_BYTES))


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ((1, 0), (1, 0), True),
        ((1, 1), (1, 0), True),
        ((1, 0), (1, 1), True),
        ((1, 2), (1, 0), False),
        ((1, 0), (1, 2), False),
        ((2, 0), (1, 0), False),
        ((0, 9), (1, 0), False),
    ],
)
def test_versions(theirs: tuple[int, int], ours: tuple[int, int], fits: bool) -> None:
    reason = wire.explain_incompatible(theirs, ours)
    assert (reason is None) == fits
    if reason is not None:
        assert f"{theirs[0]}.{theirs[1]}" in reason
        assert f"{ours[0]}.{ours[1]}" in reason
