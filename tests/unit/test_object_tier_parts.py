"""The parts of the object tier that do no I/O: breaker, shapes of runs, headers, gathering, ledger."""

import os
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.clock import VirtualClock
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.shares import OTHERS
from headwater.kv.stores.breaker import Breaker
from headwater.kv.stores.conformance import BESIDE, FAMILY, Run
from headwater.kv.stores.object.gathering import Gathering, Loose
from headwater.kv.stores.object.ledger import Ledger, Owned
from headwater.kv.stores.object.runs import (
    MIN_OBJECT_BYTES,
    DamagedRun,
    RunShape,
    decode_header,
    encode_header,
    family_digest,
    run_shape,
    runs_within,
)

MIB = 1 << 20


def make_breaker(clock: VirtualClock, chance: float = 0.0) -> Breaker:
    return Breaker(clock, lambda: chance, threshold=3, pause_s=1.0, most_pause_s=8.0)


def test_a_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = make_breaker(VirtualClock())
    for _ in range(10):
        assert not breaker.fail("x")
        assert not breaker.fail("x")
        breaker.succeed()
    assert breaker.closed
    assert [breaker.fail("x") for _ in range(3)] == [False, False, True]
    assert not breaker.allow()
    assert breaker.retry_after_s() == 0.5


def test_an_open_breaker_lets_one_trial_through_and_doubles_its_pauses() -> None:
    clock = VirtualClock()
    breaker = make_breaker(clock, chance=0.999999)
    for _ in range(3):
        breaker.fail("x")
    for pause_s in (1, 2, 4, 8, 8, 8):
        assert pause_s * 0.99 < breaker.retry_after_s() <= pause_s
        clock.advance(pause_s)
        assert breaker.allow()
        assert not breaker.allow(), "one trial at a time"
        breaker.fail("x")
    clock.advance(8)
    assert breaker.allow()
    breaker.abandon()
    assert breaker.allow(), "a trial that was called off leaves the place to another"
    breaker.succeed()
    assert breaker.closed
    assert breaker.num_openings == 1


def test_what_is_hopeless_opens_at_once_and_for_longer() -> None:
    breaker = make_breaker(VirtualClock())
    assert breaker.fail("expired", hopeless=True)
    assert breaker.retry_after_s() >= 1.0


@given(st.integers(1, 64 * MIB))
def test_objects_have_a_mebibyte_and_no_more_blocks_than_that_takes(payload_bytes: int) -> None:
    shape = run_shape(replace_payload(payload_bytes))
    assert shape.num_blocks * payload_bytes >= MIN_OBJECT_BYTES or shape.num_blocks == 64
    assert shape.num_blocks == 1 or shape.num_blocks * payload_bytes <= 8 * MIB
    assert shape.num_blocks <= max(16, -(-MIN_OBJECT_BYTES // payload_bytes))


def replace_payload(payload_bytes: int) -> Family:
    return Family(FAMILY.model, FAMILY.layout, FAMILY.tenant, payload_bytes)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 40))
def test_names_of_runs_follow_from_positions(num_blocks: int, first: int, count: int) -> None:
    shape = RunShape(num_blocks, 8, bytes(16))
    ids = [os.urandom(16) for _ in range(first + count)]
    found = runs_within(shape, b"".join(ids[first:]), first)
    ends = [end for end in range(num_blocks - 1, first + count, num_blocks) if end >= first]
    assert found == [(ids[end], end - num_blocks + 1) for end in ends]


def header_of(count: int = 4) -> tuple[RunShape, list[Block], bytes]:
    shape = RunShape(count, 8192, b"f" * 16)
    blocks = Run("a", count).blocks
    return shape, blocks, encode_header(shape, blocks)


def test_parts_beside_the_first_have_a_folder_of_their_own() -> None:
    first = msgspec.structs.replace(FAMILY, parts=2)
    assert family_digest(first) == family_digest(FAMILY), "which is where it was before there were parts"
    assert family_digest(BESIDE) != family_digest(first)
    assert run_shape(BESIDE).folder != run_shape(first).folder


def test_a_header_comes_back_as_it_was() -> None:
    shape, blocks, header = header_of()
    assert decode_header(shape, blocks[-1].id, header) == blocks


@given(st.data())
def test_a_changed_header_is_damaged(data: st.DataObject) -> None:
    shape, blocks, header = header_of()
    changed = bytearray(header)
    changed[data.draw(st.integers(0, len(header) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedRun):
        decode_header(shape, blocks[-1].id, bytes(changed))


def test_the_header_of_another_run_or_kind_is_damaged() -> None:
    shape, blocks, header = header_of()
    for other, run in ((shape, b"x" * 16), (replace(shape, payload_bytes=4096), blocks[-1].id)):
        with pytest.raises(DamagedRun):
            decode_header(other, run, header)
    with pytest.raises(DamagedRun):
        decode_header(shape, blocks[-1].id, header[:-1])


@given(st.permutations(range(12)), st.integers(1, 5))
def test_runs_become_whole_in_any_order_of_arrival(order: list[int], num_blocks: int) -> None:
    shape = RunShape(num_blocks, 8192, bytes(16))
    run = Run("a", 12)
    gathering = Gathering()
    whole: list[list[bytes]] = []
    for number in order:
        gathering.add(Loose(shape, run.blocks[number], run.payloads[number]))
        for made in gathering.made_whole(shape, [run.blocks[number]], gathering.get):
            assert made.borrowed is None
            whole.append([loose.block.id for loose in made.loose])
            for loose in made.loose:
                gathering.pop(loose.block.id)
    starts = range(0, 12 - num_blocks + 1, num_blocks)
    assert sorted(whole) == sorted([list(run.split[start : start + num_blocks]) for start in starts])
    left = 12 - len(starts) * num_blocks
    assert len(gathering) == left
    assert gathering.num_bytes == left * 8192


names = st.binary(min_size=16, max_size=16)


@given(st.dictionaries(names, st.sampled_from(["a/16/", "b/4/"])), st.sets(names))
def test_a_saved_ledger_comes_back_and_merges(owned: dict[bytes, str], others: set[bytes]) -> None:
    ledger = Ledger()
    sizes = {"a/16/": 100, "b/4/": 7}
    for name, folder in owned.items():
        ledger.add(name, Owned(folder, sizes[folder], 5))
    again = Ledger()
    for name in others - owned.keys():
        again.add(name, Owned("a/16/", 100, 9))
    gone = set(list(owned)[:2])
    for name in gone:
        again.add(name, Owned(owned[name], sizes[owned[name]], 5))
        again.remove(name)
    again.merge(ledger.encode())
    expected = (owned.keys() | others) - gone
    assert {name for name, _ in again.oldest(OTHERS)} == expected
    assert again.used_bytes == sum(one.num_bytes for _, one in again.oldest(OTHERS))


@given(st.binary(max_size=200))
def test_a_damaged_ledger_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        Ledger().merge(b"\x81" + data)


def test_the_root_is_no_block() -> None:
    assert Run("a", 1).blocks[0].parent == ROOT
