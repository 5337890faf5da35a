"""The mirror of resident blocks, and the shared length of two chains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InternalError
from headwater.kv.identity import chain_block_ids, namespace, num_shared_blocks
from headwater.kv.resident import ResidentBlocks
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")
KEY = namespace("model", "layout")


def test_events_add_up_and_the_snapshot_has_parents_first() -> None:
    resident = ResidentBlocks()
    resident.apply(BlocksStored(A + B))
    resident.apply(BlocksStored(C, B))
    resident.apply(BlocksStored(D, A))
    assert resident.snapshot() == [BlocksStored(A + B + C), BlocksStored(D, A)]
    assert (len(resident), B in resident) == (4, True)
    resident.apply(BlocksRemoved(C + B))
    assert resident.snapshot() == [BlocksStored(A + D)]
    resident.apply(BlocksStored(B, A))
    assert resident.snapshot() == [BlocksStored(A + D), BlocksStored(B, A)]
    resident.apply(BlocksCleared("device"))
    assert resident.snapshot() == []


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_leading_blocks_of_a_chain_are_counted(num_resident: int, num_asked: int) -> None:
    chain = b"".join(bytes([number]) * 16 for number in range(9))
    resident = ResidentBlocks()
    resident.apply(BlocksStored(chain[: 16 * num_resident]))
    assert resident.num_leading(chain[: 16 * num_asked]) == min(num_resident, num_asked, 9)


def test_events_that_cannot_be_true_are_refused() -> None:
    resident = ResidentBlocks()
    resident.apply(BlocksStored(A))
    with pytest.raises(InternalError, match="stored twice"):
        resident.apply(BlocksStored(A))
    with pytest.raises(InternalError, match="not resident"):
        resident.apply(BlocksRemoved(B))


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_shared_blocks_are_the_common_prefix(first: list[int], second: list[int]) -> None:
    same = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    chains = [chain_block_ids(KEY, b"".join(n.to_bytes(4, "little") for n in side), 1) for side in (first, second)]
    assert num_shared_blocks(chains[0], chains[1]) == same
