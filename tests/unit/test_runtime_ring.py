"""The replay ring: bounded, and honest about what it no longer has."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.runtime.events.ring import ReplayRing


@given(sizes=st.lists(st.integers(1, 40), max_size=60), first=st.integers(-2, 70), limit=st.integers(1, 100))
def test_recall_gives_consecutive_batches_or_none(sizes: list[int], first: int, limit: int) -> None:
    ring = ReplayRing(max_bytes=200)
    batches = [bytes([number]) * size for number, size in enumerate(sizes)]
    for item in batches:
        ring.append(item)
    assert ring.end == len(batches)
    assert ring.num_bytes <= 200
    kept = 0
    while kept < len(batches) and sum(map(len, batches[len(batches) - kept - 1 :])) <= 200:
        kept += 1
    found = ring.recall(first, limit)
    if first < len(batches) - kept or first > len(batches):
        assert found is None
    else:
        assert found is not None
        assert found == batches[first : first + len(found)]
        assert found or first == len(batches)
        assert len(found) <= 1 or sum(map(len, found)) <= limit
        rest = batches[first + len(found) :]
        assert not rest or sum(map(len, found)) + len(rest[0]) > limit
