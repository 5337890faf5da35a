"""The index against brute force, under random stores, evictions, predictions and restarts."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.index import TIERS, PrefixIndex, block_keys
from headwater.types import Tier, WorkerId

WORKERS = [WorkerId(f"w{number}") for number in range(4)]

# A small forest of prompts: every path from a root is a prompt, its keys are (branch choices so far).
paths = st.lists(st.integers(0, 1), min_size=1, max_size=12)
tiers: st.SearchStrategy[Tier] = st.sampled_from(["device", "host"])


def keys_of(path: list[int]) -> tuple[int, ...]:
    key = 1
    keys = []
    for branch in path:
        key = key * 2 + branch
        keys.append(key)
    return tuple(keys)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.resident: dict[tuple[WorkerId, Tier], set[int]] = {}
        self.predicted: list[tuple[WorkerId, tuple[int, ...]]] = []
        self.alive: set[WorkerId] = set()

    @rule(worker=st.sampled_from(WORKERS))
    def join(self, worker: WorkerId) -> None:
        self.index.add_worker(worker)
        self.alive.add(worker)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.index.remove_worker(worker)
        self.alive.discard(worker)
        self.predicted = [(owner, keys) for owner, keys in self.predicted if owner != worker]
        for tier in TIERS:
            self.resident.pop((worker, tier), None)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), path=paths, tier=tiers)
    def store(self, data: st.DataObject, path: list[int], tier: Tier) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.index.store(worker, keys_of(path), tier)
        self.resident.setdefault((worker, tier), set()).update(keys_of(path))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), tier=tiers)
    def evict_leaf(self, data: st.DataObject, tier: Tier) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        held = self.resident.get((worker, tier), set())
        leaves = sorted(key for key in held if key * 2 not in held and key * 2 + 1 not in held)
        if leaves:
            key = data.draw(st.sampled_from(leaves))
            self.index.remove(worker, [key, 10**9], tier)
            held.discard(key)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), tier=tiers)
    def clear(self, data: st.DataObject, tier: Tier) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.index.clear(worker, tier)
        self.resident.pop((worker, tier), None)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), path=paths)
    def predict(self, data: st.DataObject, path: list[int]) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.index.predict(worker, keys_of(path))
        self.predicted.append((worker, keys_of(path)))

    @precondition(lambda self: self.predicted)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        worker, keys = self.predicted.pop(data.draw(st.integers(0, len(self.predicted) - 1)))
        self.index.forget(worker, keys)

    @rule(path=paths, tier=tiers)
    def match(self, path: list[int], tier: Tier) -> None:
        expected: dict[WorkerId, int] = {}
        for worker in self.alive:
            held = set(self.resident.get((worker, tier), set()))
            if tier == "device":
                for owner, keys in self.predicted:
                    if owner == worker:
                        held.update(keys)
            length = 0
            for key in keys_of(path):
                if key not in held:
                    break
                length += 1
            if length:
                expected[worker] = length
        assert self.index.match(keys_of(path), tier) == expected

    @invariant()
    def consistent(self) -> None:
        self.index.check()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_it_is_bounded() -> None:
    index = PrefixIndex(max_blocks=100)
    index.add_worker(WORKERS[0])
    for start in range(0, 10_000, 50):
        index.store(WORKERS[0], range(start, start + 50))
    stats = index.stats()
    assert stats.num_blocks["device"] == 100
    assert stats.num_dropped == 9_900
    index.remove(WORKERS[0], range(50))
    index.store(WORKERS[0], range(20_000, 20_050))
    assert index.match(range(20_000, 20_050)) == {WORKERS[0]: 50}


def test_removing_a_worker_frees_its_slot_for_the_next() -> None:
    index = PrefixIndex()
    for life in range(100):
        worker = WorkerId(f"life-{life}")
        index.add_worker(worker)
        index.store(worker, range(10))
        assert index.match(range(10)) == {worker: 10}
        index.remove_worker(worker)
    assert index.match(range(10)) == {}
    assert index.stats().num_residencies["device"] == 0


def test_keys_are_taken_from_joined_ids() -> None:
    ids = chain_block_ids(namespace("model", "layout"), bytes(range(256)), 16)
    keys = block_keys(ids)
    assert len(keys) == 4
    assert keys[1] == int.from_bytes(ids[16:24], "little")


def test_an_unknown_worker_cannot_store() -> None:
    with pytest.raises(KeyError):
        PrefixIndex().store(WorkerId("stranger"), [1])
