"""The life of blocks against a model: random writers, readers, deaths and evictions; invariants after every step."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.kv import regrouping
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.identity import chain_block_ids, split_block_ids
from headwater.kv.lifecycle import Ledger
from headwater.kv.policies import PolicyName, make_policy
from headwater.kv.reservations import Refusal
from headwater.kv.resident import ResidentBlocks
from headwater.kv.rules import Rules
from headwater.kv.shares import Shares
from headwater.kv.space import Space, slot_bytes_for
from headwater.kv.table import RECORD_BYTES, BlockTable, Record, index_bytes

CHUNK = 64 << 10
FAMILIES = [Family("m", "l", "", 4096), Family("m", "l", "gold", 4096), Family("n", "l", "", 10_000)]
CHAIN = split_block_ids(chain_block_ids(b"k" * 32, bytes(4 * 40), 1))


def make_ledger(
    policy: PolicyName = "lru",
    *,
    chunks: int = 3,
    records: int = 32,
    shares: dict[str, float] | None = None,
    rules: Rules | None = None,
    left: bytearray | None = None,
) -> Ledger:
    """`left`: the table of a former life."""
    table = table_over(left or bytearray(records * RECORD_BYTES))
    divided = Shares(shares)
    chosen = make_policy(policy, records, divided.num_groups, lambda slot: float(slot % 5 + 1))
    return Ledger("host", table, Space(chunks * CHUNK, CHUNK), chosen, divided, rules or Rules(max_reserved=1.0))


def table_over(records: bytearray) -> BlockTable:
    return BlockTable(memoryview(records), memoryview(bytearray(index_bytes(len(records) // RECORD_BYTES))))


def blocks_of(numbers: list[int]) -> list[Block]:
    return [Block(CHAIN[n], CHAIN[n - 1] if n else ROOT, n, 0) for n in numbers]


def store(ledger: Ledger, numbers: list[int], family: Family = FAMILIES[0], holder: int = 1, now: float = 0.0) -> int:
    ticket, answers = ledger.reserve(holder, family, blocks_of(numbers), now)
    return len(ledger.commit(holder, ticket, {slot: slot for slot in answers if isinstance(slot, int)}, 0))


def known(ledger: Ledger, numbers: list[int]) -> list[bool]:
    return [ledger.table.find(CHAIN[number]) >= 0 for number in numbers]


class LedgerMachine(RuleBasedStateMachine):
    """Holders 1 to 3 do what workers do; the model knows who may be writing or reading which place."""

    @initialize(policy=st.sampled_from(["lru", "s3fifo", "cost"]), shares=st.booleans())
    def start(self, policy: PolicyName, shares: bool) -> None:
        self.ledger = make_ledger(policy, shares={"gold": 0.3} if shares else None)
        self.resident = ResidentBlocks()
        self.now = 0.0
        self.tickets: dict[int, tuple[int, dict[int, tuple[bytes, int]], float]] = {}
        self.leases: dict[int, tuple[int, dict[int, bytes], float]] = {}
        self.checksums: dict[bytes, int] = {}
        self.serial = 0

    @rule(
        holder=st.integers(1, 3),
        numbers=st.lists(st.integers(0, 39), min_size=1, max_size=10, unique=True),
        family=st.sampled_from(FAMILIES),
    )
    def reserve(self, holder: int, numbers: list[int], family: Family) -> None:
        ticket, answers = self.ledger.reserve(holder, family, blocks_of(numbers), self.now)
        mine: dict[int, tuple[bytes, int]] = {}
        for number, answer in zip(numbers, answers, strict=True):
            if answer is Refusal.PRESENT:
                assert CHAIN[number] in self.checksums
            if isinstance(answer, int):
                assert answer not in self.places(), "a place that somebody may still write to or read from"
                self.serial += 1
                mine[answer] = (CHAIN[number], self.serial)
        if mine:
            self.tickets[ticket] = holder, mine, self.now + 60.0

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), part=st.integers(0, 3))
    def commit(self, data: st.DataObject, part: int) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        holder, mine, deadline = self.tickets.pop(ticket)
        assert self.ledger.commit(holder % 3 + 1, ticket, {}, 0) == [], "somebody else's reservation"
        chosen = {slot: serial for slot, (_, serial) in list(mine.items())[part:]}
        committed = self.ledger.commit(holder, ticket, chosen, 0)
        assert set(committed) <= chosen.keys()
        assert not committed or self.now < deadline, "a late writer was believed"
        for slot in committed:
            self.checksums[mine[slot][0]] = mine[slot][1]

    @rule(
        holder=st.integers(1, 3),
        numbers=st.lists(st.integers(0, 39), min_size=1, max_size=6, unique=True),
        family=st.sampled_from(FAMILIES),
    )
    def lease(self, holder: int, numbers: list[int], family: Family) -> None:
        ids = b"".join(CHAIN[n] for n in numbers)
        ticket, found = self.ledger.lease(holder, family, ids, self.now, 0)
        slots: dict[int, bytes] = {}
        for number, hit in zip(numbers, found, strict=True):
            if hit is not None:
                slot, record = hit
                assert record.block.id == CHAIN[number]
                assert record.block.checksum == self.checksums[CHAIN[number]]
                slots[slot] = CHAIN[number]
        if slots:
            self.leases[ticket] = holder, slots, self.now + 60.0

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), damaged=st.booleans())
    def release(self, data: st.DataObject, damaged: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.leases)))
        holder, slots, deadline = self.leases.pop(ticket)
        assert self.ledger.release(holder, ticket, list(slots) if damaged else []) == (self.now < deadline)

    @rule(holder=st.integers(1, 3))
    def die(self, holder: int) -> None:
        self.ledger.drop_holder(holder)
        self.tickets = {t: one for t, one in self.tickets.items() if one[0] != holder}
        self.leases = {t: one for t, one in self.leases.items() if one[0] != holder}

    @rule(seconds=st.sampled_from([1.0, 20.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    @rule(numbers=st.lists(st.integers(0, 39), max_size=4, unique=True), seconds=st.integers(1, 100))
    def pin(self, numbers: list[int], seconds: int) -> None:
        self.ledger.pin(b"".join(CHAIN[n] for n in numbers), self.now + seconds)

    @rule(number=st.integers(0, 39))
    def remove(self, number: int) -> None:
        self.ledger.remove(CHAIN[number])
        assert known(self.ledger, [number]) == [False]

    @rule(tenant=st.sampled_from(["", "gold"]))
    def clear(self, tenant: str) -> None:
        list(self.ledger.clear(tenant=tenant))
        for _, record in self.ledger.records():
            assert self.ledger.families[record.family].tenant != tenant

    @rule(tenant=st.sampled_from(["", "gold"]), fraction=st.sampled_from([0.1, 0.5, 1.0]))
    def limit(self, tenant: str, fraction: float) -> None:
        self.ledger.limit(tenant, fraction)

    @rule()
    def regroup(self) -> None:
        self.ledger.regroup()
        used: dict[str, int] = {}
        for family, _, _ in self.ledger.families.usage():
            used[family.tenant] = 0
        for _, record in self.ledger.records():
            used[self.ledger.families[record.family].tenant] += slot_bytes_for(record.payload_bytes)
        shares = {one.tenant: one.used_bytes for one in self.ledger.share_usage()}
        assert shares.get("gold", used.get("gold", 0)) == used.get("gold", 0)
        assert sum(shares.values()) == sum(used.values())

    @rule()
    def trim(self) -> None:
        self.ledger.trim()

    def places(self) -> set[int]:
        """Where somebody may be writing (late or not) or reading within a lease."""
        writing = {slot for _, mine, _ in self.tickets.values() for slot in mine}
        return writing | {slot for _, slots, deadline in self.leases.values() if deadline > self.now for slot in slots}

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.ledger.check()
        for event in self.ledger.drain_events():
            self.resident.apply(event)
        present = {record.block.id for _, record in self.ledger.records()}
        assert present == {block_id for block_id in CHAIN if block_id in self.resident}
        assert self.ledger.space.used_bytes <= self.ledger.space.num_bytes
        for _, slots, deadline in self.leases.values():
            if deadline > self.now:
                assert not {slot for slot in slots if self.stolen(slot, slots[slot])}

    def stolen(self, slot: int, block_id: bytes) -> bool:
        record = self.ledger.table.read(slot)
        return record is not None and record.block.id != block_id


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_a_block_is_visible_only_after_commit() -> None:
    ledger = make_ledger()
    ticket, slots = ledger.reserve(1, FAMILIES[0], blocks_of([0, 1]), 0.0)
    assert known(ledger, [0, 1]) == [False, False]
    assert ledger.reserve(2, FAMILIES[0], blocks_of([0]), 0.0)[1] == [Refusal.BUSY]
    assert len(ledger.commit(1, ticket, {slots[0]: 7}, 0)) == 1
    assert known(ledger, [0, 1]) == [True, False]


def test_a_late_writer_keeps_its_place_but_is_not_believed() -> None:
    ledger = make_ledger(chunks=1)
    ticket, slots = ledger.reserve(1, FAMILIES[0], blocks_of(list(range(16))), 0.0)
    assert all(isinstance(slot, int) for slot in slots)
    ledger.expire(61.0)
    assert ledger.num_stranded == 16
    assert store(ledger, [20], holder=2) == 0, "its place may still be written to"
    assert ledger.commit(1, ticket, {slot: 1 for slot in slots if isinstance(slot, int)}, 0) == []
    assert store(ledger, [20], holder=2) == 1
    ledger.check()


def test_a_reader_that_took_too_long_is_told() -> None:
    ledger = make_ledger(chunks=1)
    store(ledger, list(range(16)))
    ticket, found = ledger.lease(2, FAMILIES[0], CHAIN[0], 0.0, 0)
    assert found[0] is not None
    assert store(ledger, [30]) == 1
    assert known(ledger, [0]) == [True], "leased blocks stay"
    ledger.expire(61.0)
    assert not ledger.release(2, ticket)


def test_a_removed_block_stays_readable_for_its_readers_only() -> None:
    ledger = make_ledger()
    store(ledger, [0])
    used = ledger.space.used_bytes
    ticket, _ = ledger.lease(2, FAMILIES[0], CHAIN[0], 0.0, 0)
    assert ledger.remove(CHAIN[0]) == 1
    assert known(ledger, [0]) == [False]
    assert ledger.space.used_bytes == used
    assert ledger.release(2, ticket)
    assert ledger.space.used_bytes == 0


def test_blocks_of_another_size_give_up_a_whole_chunk() -> None:
    ledger = make_ledger(chunks=2)
    assert store(ledger, list(range(32))) == 32
    large = Family("n", "l", "", 30_000)
    assert store(ledger, [33, 34], large) == 2
    assert ledger.counters.num_evicted == 16
    ledger.check()


def test_pins_hold_against_pressure_until_they_run_out() -> None:
    ledger = make_ledger(chunks=1)
    store(ledger, list(range(16)))
    assert ledger.pin(CHAIN[0] + CHAIN[1] + CHAIN[39], 50.0) == b"\1\1\0"
    for number in range(16, 36):
        store(ledger, [number])
    assert known(ledger, [0, 1]) == [True, True]
    ledger.expire(50.0)
    store(ledger, list(range(16, 32)))
    assert known(ledger, [0, 1]) == [False, False]


def test_pins_cannot_take_the_whole_tier() -> None:
    ledger = make_ledger(chunks=1)
    store(ledger, list(range(16)))
    assert sum(ledger.pin(b"".join(CHAIN[:16]), 50.0)) == 8


def test_a_tenant_within_its_share_loses_nothing_to_one_that_is_not() -> None:
    ledger = make_ledger(chunks=1, shares={"gold": 0.5})
    gold = FAMILIES[1]
    assert store(ledger, list(range(8)), gold) == 8
    for number in range(8, 38):
        store(ledger, [number])
    assert known(ledger, list(range(8))) == [True] * 8
    assert store(ledger, [38], gold) == 1
    assert sum(known(ledger, list(range(8)))) == 7, "over its share it pays itself"


def test_what_a_tenant_leaves_unused_others_may_use_until_it_asks() -> None:
    ledger = make_ledger(chunks=1, shares={"gold": 0.5})
    assert store(ledger, list(range(16))) == 16
    assert store(ledger, list(range(16, 24)), FAMILIES[1]) == 8
    assert sum(known(ledger, list(range(16)))) == 8


def test_blocks_past_their_time_are_not_served() -> None:
    ledger = make_ledger(rules=Rules(ttl_s=10.0))
    store(ledger, [0])
    assert ledger.lease(1, FAMILIES[0], CHAIN[0], 0.0, 10)[1] != [None]
    assert ledger.lease(1, FAMILIES[0], CHAIN[0], 0.0, 11)[1] == [None]
    assert known(ledger, [0]) == [False]


def charged(ledger: Ledger) -> dict[str, int]:
    return {one.tenant: one.used_bytes // 4096 for one in ledger.share_usage()}


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "cost"])
def test_blocks_follow_their_tenants_to_other_accounts(policy: PolicyName) -> None:
    ledger = make_ledger(policy, chunks=1)
    store(ledger, [0, 1], FAMILIES[1])
    ledger.limit("gold", 0.5)
    store(ledger, [2, 3], FAMILIES[0])
    store(ledger, [4], FAMILIES[1])
    assert charged(ledger) == {"": 4, "gold": 1}
    ledger.regroup()
    ledger.check()
    assert charged(ledger) == {"": 2, "gold": 3}
    store(ledger, list(range(5, 17)), FAMILIES[0])
    assert known(ledger, [0, 1, 4]) == [True, False, True], "what moved goes first, the tail before the head"
    ledger.check()
    ledger.limit("gold", 1.0)
    ledger.limit("gold", 0.25)
    ledger.limit("gold", 1.0)
    store(ledger, [20], FAMILIES[1])
    ledger.check()
    ledger.regroup()
    ledger.check()
    assert charged(ledger).keys() == {""}


def test_blocks_of_a_large_table_move_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regrouping, "_STEP", 5)
    ledger = make_ledger()
    store(ledger, list(range(16)), FAMILIES[1])
    ledger.limit("gold", 0.5)
    moved = []
    for _ in range(8):
        ledger.regroup()
        ledger.check()
        moved.append(charged(ledger)["gold"])
    assert moved == [5, 10, 15, 16, 16, 16, 16, 16]
    ledger.regroup()
    ledger.limit("gold", 1.0)
    ledger.regroup()
    ledger.limit("gold", 0.5)
    for _ in range(8):
        ledger.regroup()
        ledger.check()
    assert charged(ledger) == {"": 0, "gold": 16}


def test_writers_together_hold_no_more_than_their_part() -> None:
    ledger = make_ledger(chunks=1, rules=Rules(max_reserved=0.25))
    first, answers = ledger.reserve(1, FAMILIES[0], blocks_of(list(range(6))), 0.0)
    assert [isinstance(answer, int) for answer in answers] == [True] * 4 + [False] * 2
    assert ledger.reserve(2, FAMILIES[0], blocks_of([9]), 0.0)[1] == [Refusal.FULL]
    ledger.commit(1, first, {slot: 1 for slot in answers if isinstance(slot, int)}, 0)
    assert store(ledger, [9], holder=2) == 1, "what was committed does not count any more"


def test_leases_of_a_holder_that_died_keep_nothing() -> None:
    ledger = make_ledger(chunks=1)
    store(ledger, list(range(16)))
    ledger.lease(2, FAMILIES[0], b"".join(CHAIN[:16]), 0.0, 0)
    assert store(ledger, [20]) == 0, "all are being read"
    ledger.drop_holder(2)
    assert store(ledger, [20]) == 1


def test_above_the_high_watermark_room_is_made_down_to_the_low_one() -> None:
    ledger = make_ledger(chunks=1, rules=Rules(max_reserved=1.0, high_watermark=0.75, low_watermark=0.5))
    store(ledger, list(range(12)))
    assert ledger.trim() == 0, "at the mark, not above it"
    store(ledger, [12])
    assert ledger.trim(max_blocks=2) == 2
    assert ledger.trim() == 0, "below the high mark again"
    store(ledger, list(range(10, 14)))
    assert ledger.trim() == 6
    assert ledger.space.used_bytes == 8 * 4096


def test_what_is_being_written_for_a_cleared_tenant_does_not_appear_afterwards() -> None:
    ledger = make_ledger()
    ours, ours_slots = ledger.reserve(1, FAMILIES[1], blocks_of([0, 1]), 0.0)
    theirs, theirs_slots = ledger.reserve(1, FAMILIES[0], blocks_of([2, 3]), 0.0)
    list(ledger.clear(tenant="gold"))
    assert ledger.commit(1, ours, {slot: 1 for slot in ours_slots if isinstance(slot, int)}, 0) == []
    assert len(ledger.commit(1, theirs, {slot: 1 for slot in theirs_slots if isinstance(slot, int)}, 0)) == 2
    assert known(ledger, [0, 1, 2, 3]) == [False, False, True, True]
    ledger.check()


def test_a_block_that_goes_takes_its_pin_along() -> None:
    ledger = make_ledger(chunks=1)
    store(ledger, list(range(16)))
    assert sum(ledger.pin(b"".join(CHAIN[:8]), 50.0)) == 8
    ledger.remove(CHAIN[0])
    assert ledger.pinned_bytes == 7 * 4096
    assert ledger.pin(CHAIN[8], 50.0) == b"\1", "room for another"
    ledger.check()


def test_a_chunk_with_a_pinned_block_is_not_given_up_for_another_size() -> None:
    ledger = make_ledger(chunks=1)
    large = Family("n", "l", "", 30_000)
    store(ledger, list(range(16)))
    ledger.pin(CHAIN[15], 50.0)
    assert store(ledger, [20], large) == 0
    assert known(ledger, list(range(16))) == [True] * 16
    ledger.expire(50.0)
    assert store(ledger, [20], large) == 1


def test_a_chunk_with_blocks_of_a_tenant_within_its_share_is_not_given_up_for_another_size() -> None:
    ledger = make_ledger(chunks=1, shares={"gold": 0.5})
    store(ledger, list(range(4)), FAMILIES[1])
    store(ledger, list(range(4, 16)))
    assert store(ledger, [20], Family("n", "l", "", 30_000)) == 0
    assert known(ledger, list(range(16))) == [True] * 16


def test_where_no_chunk_may_go_a_younger_block_of_the_same_size_does() -> None:
    ledger = make_ledger(chunks=6)
    large = Family("n", "l", "", 30_000)
    assert store(ledger, list(range(10)), large) == 10
    assert sum(ledger.pin(b"".join(CHAIN[0:10:2]), 50.0)) == 5, "one in each chunk"
    assert store(ledger, list(range(10, 26))) == 16
    assert store(ledger, [26]) == 1
    assert known(ledger, list(range(10))) == [True] * 10
    assert sum(known(ledger, list(range(10, 26)))) == 15


def test_what_a_former_life_left_is_taken_over_where_it_adds_up() -> None:
    left = bytearray(32 * RECORD_BYTES)
    before = table_over(left)
    for number, offset, size, family in (
        (0, 0, 4096, 0),
        (0, 4096, 4096, 0),  # the same block again
        (1, 8192, 8192, 0),  # not the size of its family
        (2, 0, 4096, 0),  # where another one lies
        (3, 12_288, 4096, 7),  # of nobody
        (4, 16_384, 4096, 0),
    ):
        before.insert(before.take(), Record(blocks_of([number])[0], offset, size, 0, family))
    ledger = make_ledger(left=left)
    assert ledger.recover(FAMILIES[:1], {}) == 4
    assert charged(ledger) == {"": 2}
    assert known(ledger, list(range(5))) == [True, False, False, False, True]
    assert ledger.space.used_bytes == 2 * 4096
    ledger.check()
    assert store(ledger, list(range(16))) == 14
    ledger.check()


def test_the_head_of_a_chain_outlives_its_tail() -> None:
    for policy in ("lru", "s3fifo", "cost"):
        ledger = make_ledger(policy, chunks=1)
        store(ledger, list(range(16)))
        for number in range(20, 24):
            store(ledger, [number])
        left = known(ledger, list(range(16)))
        if policy != "cost":
            assert left == [True] * 12 + [False] * 4, policy
