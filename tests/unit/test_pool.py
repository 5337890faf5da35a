"""The block pool against a brute-force model, and what it promises one by one."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.errors import InternalError
from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.pool import BlockPool
from headwater.kv.resident import ResidentBlocks
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored

BLOCK = 2
KEY = namespace("model", "layout")


def chain(tokens: list[int]) -> bytes:
    """Ids of the full blocks of `tokens`."""
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    return chain_block_ids(KEY, raw, BLOCK)


def parts(joined: bytes) -> list[bytes]:
    return [joined[i : i + 16] for i in range(0, len(joined), 16)]


def held(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Match, allocate and commit a sequence's full blocks: its table."""
    ids = chain(tokens)
    match = pool.match(ids, len(ids) // 16)
    pool.acquire(match.blocks)
    table = match.blocks + pool.allocate(len(ids) // 16 - len(match.blocks))
    pool.commit(table, len(match.blocks), len(table), ids)
    return table


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(5)) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(InternalError, match="1 blocks asked of a pool with 0 free"):
        pool.allocate(1)


def test_a_freed_prefix_is_found_again_until_its_blocks_are_needed() -> None:
    pool = BlockPool(4)
    table = held(pool, [1, 1, 2, 2, 3, 3])
    pool.free(table)
    assert pool.num_free == 4
    assert pool.match(chain([1, 1, 2, 2, 9, 9]), 3) == (table[:2], 2)
    assert pool.match(chain([1, 1, 2, 2, 3, 3]), 2).blocks == table[:2]
    taken = pool.allocate(4)
    assert set(table) <= set(taken)
    assert pool.match(chain([1, 1]), 1).blocks == []


def test_eviction_takes_blank_blocks_then_the_tail_of_the_least_recently_used() -> None:
    pool = BlockPool(5)
    old = held(pool, [1, 1, 2, 2])
    young = held(pool, [5, 5, 6, 6])
    pool.free(old)
    pool.free(young)
    pool.drain_events()
    blank, tail, root, _ = [pool.allocate(1)[0] for _ in range(4)]
    assert blank not in old + young
    assert [tail, root] == [old[1], old[0]]
    removed = parts(chain([1, 1, 2, 2]))[::-1] + parts(chain([5, 5, 6, 6]))[1:]
    assert pool.drain_events() == [BlocksRemoved(b"".join(removed))]


def test_use_makes_a_prefix_young_again() -> None:
    pool = BlockPool(2)
    first, second = held(pool, [1, 1]), held(pool, [2, 2])
    pool.free(first)
    pool.free(second)
    match = pool.match(chain([1, 1]), 1)
    pool.acquire(match.blocks)
    pool.free(match.blocks)
    assert pool.allocate(1) == second


def test_shared_blocks_stay_until_the_last_holder_goes() -> None:
    pool = BlockPool(3)
    first = held(pool, [1, 1, 2, 2])
    second = held(pool, [1, 1, 3, 3])
    assert first[0] == second[0]
    assert pool.num_free == 0
    pool.free(first)
    assert pool.num_free == 1
    pool.check([second])


def test_a_copy_is_given_up_for_the_block_that_is_there() -> None:
    pool = BlockPool(6)
    ids = chain([1, 1, 2, 2, 3, 3])
    first, second = pool.allocate(3), pool.allocate(3)
    pool.commit(first, 0, 2, ids)
    pool.drain_events()
    pool.commit(second, 0, 3, ids)
    assert second[:2] == first[:2]
    assert pool.num_free == 2
    assert pool.drain_events() == [BlocksStored(parts(ids)[2], parts(ids)[1])]
    pool.check([first, second])


def test_a_copy_may_replace_one_that_nobody_holds() -> None:
    pool = BlockPool(2)
    first = held(pool, [1, 1])
    pool.free(first)
    copy = pool.allocate(1)
    assert copy != first
    pool.commit(copy, 0, 1, chain([1, 1]))
    assert copy == first
    pool.check([copy])


def test_freeing_more_often_than_holding_is_our_bug() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(InternalError, match="freed more often"):
        pool.free(table)


def test_clear_forgets_what_nobody_holds() -> None:
    pool = BlockPool(4)
    kept = held(pool, [1, 1])
    pool.free(held(pool, [1, 1, 2, 2, 3, 3]))
    pool.drain_events()
    pool.clear()
    assert pool.drain_events() == [BlocksRemoved(b"".join(parts(chain([1, 1, 2, 2, 3, 3]))[:0:-1]))]
    pool.free(kept)
    pool.clear()
    assert pool.drain_events() == [BlocksCleared("device")]
    assert pool.num_free == 4
    pool.check([])


def test_check_sees_references_that_nobody_has() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(InternalError, match="references are not what is held"):
        pool.check([])


def test_snapshot_joins_runs_and_has_parents_first() -> None:
    pool = BlockPool(8)
    held(pool, [1, 1, 2, 2, 3, 3])
    held(pool, [1, 1, 4, 4])
    first = chain([1, 1, 2, 2, 3, 3])
    assert pool.snapshot() == [BlocksStored(first), BlocksStored(chain([1, 1, 4, 4])[16:], first[:16])]


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a two-letter alphabet come, grow, fill blocks and go; contents are tracked block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.content: dict[int, bytes] = {}
        """What the model knows to be in a block: the id of the tokens written there."""
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.committed: dict[int, int] = {}
        self.resident = ResidentBlocks()
        self.next_key = 0

    def follow_events(self) -> None:
        for event in self.pool.drain_events():
            self.resident.apply(event)

    @rule(letters=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def begin(self, letters: list[int]) -> None:
        tokens = [letter for letter in letters for _ in range(BLOCK)]
        ids = chain(tokens)
        match = self.pool.match(ids, len(letters) - 1)
        present = {bytes(part) for part in parts(b"".join(e.block_ids for e in self.pool.snapshot()))}
        wanted = parts(ids)[: len(letters) - 1]
        longest = next((n for n, block_id in enumerate(wanted) if block_id not in present), len(wanted))
        assert len(match.blocks) == longest
        assert [self.content[block] for block in match.blocks] == wanted[:longest]
        needed = len(letters) - longest
        if self.pool.num_free - match.num_evictable < needed:
            return
        self.pool.acquire(match.blocks)
        fresh = self.pool.allocate(needed)
        for block in fresh:
            self.content.pop(block, None)
        self.next_key += 1
        self.tables[self.next_key] = match.blocks + fresh
        self.tokens[self.next_key] = tokens
        self.committed[self.next_key] = longest

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Compute some more blocks of a sequence and commit them."""
        key = data.draw(st.sampled_from(sorted(self.tables)))
        table, first = self.tables[key], self.committed[key]
        last = data.draw(st.integers(first, len(table)))
        ids = chain(self.tokens[key])
        for index in range(first, last):
            self.content[table[index]] = parts(ids)[index]
        self.pool.commit(table, first, last, ids)
        self.committed[key] = last
        assert [self.content[block] for block in table[:last]] == parts(ids)[:last]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.tables)))
        if not self.pool.num_free:
            return
        (block,) = self.pool.allocate(1)
        self.content.pop(block, None)
        self.tables[key].append(block)
        self.tokens[key] += [data.draw(st.integers(0, 1))] * BLOCK

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.free(self.tables.pop(key))
        del self.tokens[key], self.committed[key]

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def holds(self) -> None:
        self.pool.check(self.tables.values())
        blocks = Counter(block for table in self.tables.values() for block in table)
        assert self.pool.num_free == self.pool.num_blocks - len(blocks)
        self.follow_events()
        assert self.resident.snapshot() == self.pool.snapshot()
        assert len(self.resident) == self.pool.num_committed
        replayed = ResidentBlocks()
        for event in self.pool.snapshot():
            assert event.parent is None or event.parent in replayed
            replayed.apply(event)
        assert replayed.snapshot() == self.resident.snapshot()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
