"""Events of a tier: joined into runs, in order, and the present state instead of too long a history."""

from headwater.kv.block import ROOT
from headwater.kv.journal import Journal
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored
from kv_fixtures import chain

A = chain("a", 4)
B = chain("b", 2)


def nobody() -> list[tuple[bytes, bytes]]:
    raise AssertionError("what is resident was asked for, and there were few events")


def test_blocks_of_one_chain_are_one_event_and_order_is_kept() -> None:
    journal = Journal("disk")
    for block_id, parent in ((A[0], ROOT), (A[1], A[0]), (B[0], ROOT), (A[2], A[1])):
        journal.stored(block_id, parent)
    journal.removed(B[0])
    journal.removed(A[2])
    journal.stored(B[0], ROOT)
    assert journal.drain(nobody) == [
        BlocksStored(A[0] + A[1], None, "disk"),
        BlocksStored(B[0], None, "disk"),
        BlocksStored(A[2], A[1], "disk"),
        BlocksRemoved(B[0] + A[2], "disk"),
        BlocksStored(B[0], None, "disk"),
    ]
    assert journal.drain(nobody) == []


def test_a_reader_that_stayed_away_is_told_what_there_is_now() -> None:
    journal = Journal("peer", max_events=3)
    for _ in range(3):
        journal.stored(B[0], ROOT)
        journal.removed(B[0])
    resident = [(A[0], ROOT), (A[1], A[0]), (B[1], B[0])]
    assert journal.drain(lambda: resident) == [
        BlocksCleared("peer"),
        BlocksStored(A[0] + A[1], None, "peer"),
        BlocksStored(B[1], B[0], "peer"),
    ]
    journal.stored(A[2], A[1])
    assert journal.drain(nobody) == [BlocksStored(A[2], A[1], "peer")], "and from then on what happens again"
