"""What is evicted, admitted, shared out and priced."""

import random
from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headwater.errors import ConfigError
from headwater.kv.admission import SecondUse, make_admission
from headwater.kv.block import Family
from headwater.kv.families import MAX_FAMILIES, Families
from headwater.kv.node.prices import NodePrices
from headwater.kv.policies import PolicyName, make_policy
from headwater.kv.pricing import ComputeRate, Curiosity, TierRun, TierSpeed, plan_load
from headwater.kv.queues import SlotQueues
from headwater.kv.shares import MAX_GROUPS, OTHERS, Shares
from headwater.kv.space import PAGE_BYTES, Space, slot_bytes_for


def hit_rate(policy: PolicyName, requests: list[int], room: int, worth: float = 1.0) -> float:
    """Of a cache of so many slots under a policy."""
    chosen = make_policy(policy, room, 1, lambda slot: worth)
    slots: dict[int, int] = {}
    keys: dict[int, int] = {}
    hits = 0
    for key in requests:
        if key in slots:
            hits += 1
            chosen.touch(slots[key])
            continue
        if len(slots) < room:
            slot = len(slots)
        else:
            victim = chosen.victim(0, lambda slot: True)
            assert victim is not None
            slot = victim
            chosen.discard(slot, evicted=True)
            del slots[keys[slot]]
        slots[key], keys[slot] = slot, key
        chosen.add(slot, 0, key)
    return hits / len(requests)


def test_lru_evicts_as_an_ordered_dict_would() -> None:
    draw = random.Random(1)
    requests = [int(draw.paretovariate(1.0)) for _ in range(5000)]
    model: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in requests:
        hits += key in model
        model[key] = None
        model.move_to_end(key)
        if len(model) > 50:
            model.popitem(last=False)
    assert hit_rate("lru", requests, 50) == hits / len(requests)


def test_a_sweep_of_cold_blocks_does_not_flush_warm_ones_under_s3fifo() -> None:
    draw = random.Random(2)
    requests: list[int] = []
    for sweep in range(20):
        requests += [draw.randrange(80) for _ in range(400)]
        requests += range(1000 + sweep * 300, 1300 + sweep * 300)
    assert hit_rate("s3fifo", requests, 100) > hit_rate("lru", requests, 100) + 0.05


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "cost"])
def test_what_may_not_go_does_not_go(policy: PolicyName) -> None:
    chosen = make_policy(policy, 20, 2, lambda slot: 1.0)
    for slot in range(20):
        chosen.add(slot, slot % 2, slot)
    assert chosen.victim(0, lambda slot: False) is None
    for _ in range(3):
        victim = chosen.victim(0, lambda slot: slot >= 10)
        assert victim is not None
        assert victim >= 10
        assert victim % 2 == 0
        chosen.discard(victim, evicted=True)


def test_costly_blocks_outlive_cheap_ones() -> None:
    chosen = make_policy("cost", 100, 1, lambda slot: 20.0 if slot < 10 else 1.0)
    for slot in (*range(10, 55), *range(10), *range(55, 100)):
        chosen.add(slot, 0, slot)
    gone = []
    for _ in range(80):
        victim = chosen.victim(0, lambda slot: True)
        assert victim is not None
        chosen.discard(victim, evicted=True)
        gone.append(victim)
    assert not set(gone) & set(range(10))


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "cost"])
def test_blocks_that_are_moved_are_the_first_to_go_of_their_new_group(policy: PolicyName) -> None:
    chosen = make_policy(policy, 20, 2, lambda slot: 1.0)
    for slot in range(6):
        chosen.add(slot, slot % 2, slot)
    chosen.move(4, 1)
    assert chosen.group_of(4) == 1
    gone: list[list[int]] = [[], []]
    for group in (0, 1):
        while (victim := chosen.victim(group, lambda slot: True)) is not None:
            chosen.discard(victim, evicted=True)
            gone[group].append(victim)
    assert gone == [[0, 2], [4, 1, 3, 5]]


def test_what_was_used_again_is_moved_as_such_under_s3fifo() -> None:
    chosen = make_policy("s3fifo", 20, 2, lambda slot: 1.0)
    for slot in range(3):
        chosen.add(slot, 0, slot)
        chosen.touch(slot)
    for slot in range(10, 15):
        chosen.add(slot, 0, slot)
    chosen.add(3, 1, 3)
    victim = chosen.victim(0, lambda slot: True)
    assert victim == 10, "those before it have been used again"
    chosen.move(0, 1)
    assert chosen.victim(1, lambda slot: True) == 3, "which was not"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 19), st.booleans()), max_size=200))
def test_queues_are_what_lists_would_be(steps: list[tuple[int, int, bool]]) -> None:
    queues = SlotQueues(20, 3)
    model: list[list[int]] = [[], [], []]
    for queue, slot, as_oldest in steps:
        where = next((number for number in range(3) if slot in model[number]), None)
        if where is None and as_oldest:
            queues.push_oldest(queue, slot)
            model[queue].insert(0, slot)
        elif where is None:
            queues.push(queue, slot)
            model[queue].append(slot)
        else:
            queues.unlink(where, slot)
            model[where].remove(slot)
        for number in range(3):
            assert list(queues.from_oldest(number)) == model[number]
            assert queues.length(number) == len(model[number])
            assert queues.oldest(number) == (model[number][0] if model[number] else None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60_000), st.booleans()), max_size=120))
def test_space_never_overlaps_and_never_leaks(steps: list[tuple[int, bool]]) -> None:
    space = Space(8 * 65_536, 65_536)
    taken: dict[int, int] = {}
    for number, (size, free) in enumerate(steps):
        if free and taken:
            space.free(taken_offset := next(iter(taken)))
            del taken[taken_offset]
        elif (offset := space.allocate(size, number)) is not None:
            end = offset + slot_bytes_for(size)
            assert offset % PAGE_BYTES == 0
            assert end <= space.num_bytes
            assert all(end <= at or at + other <= offset for at, other in taken.items())
            taken[offset] = slot_bytes_for(size)
        assert space.used_bytes == sum(taken.values())
        space.check()
    for offset in taken:
        space.free(offset)
    assert space.used_bytes == 0
    assert space.allocate(65_536, 0) is not None, "whole chunks again"


def test_one_use_is_not_enough_and_memory_is_bounded() -> None:
    admission = SecondUse(window=100)
    assert [admission.admit(7), admission.admit(7), admission.admit(7)] == [False, True, True]
    for key in range(1000, 1300):
        admission.admit(key)
    assert not admission.admit(7), "long ago does not count"
    assert len(admission._younger) + len(admission._older) <= 200
    assert make_admission("all").admit(5)


def test_shares_say_who_pays() -> None:
    shares = Shares({"a": 0.25, "b": 0.25})
    others, a, b = shares.group_of("somebody"), shares.group_of("a"), shares.group_of("b")
    for group, used in ((others, 60), (a, 30), (b, 10)):
        shares.charge(group, used)
    assert list(shares.payers(b)) == [others, a, b] or list(shares.payers(b)) == [a, others, b]
    assert next(iter(shares.payers(a))) in (a, others)
    assert b not in shares.payers(a), "within its share"
    for bad in ({"a": 0.0}, {"a": 1.0}, {"a": 0.5, "b": 0.5}, {"a": -0.1}):
        with pytest.raises(ConfigError, match="shares"):
            Shares(bad)


def test_limits_divide_what_is_not_guaranteed() -> None:
    shares = Shares({"gold": 0.5})
    shares.limit("a", 0.1)
    shares.limit("gold", 0.1)
    shares.limit("", 0.1)
    a, gold, others = shares.group_of("a"), shares.group_of("gold"), shares.group_of("")
    assert len({a, gold, others}) == 3
    assert others == OTHERS == shares.group_of("somebody")
    shares.charge(others, 500)
    assert list(shares.payers(a)) == [others, a], "who has nothing gets room"
    shares.charge(a, 40)
    assert list(shares.payers(a)) == [others, a], "half of the tier is gold's, and it does not use it"
    shares.charge(a, 60)
    shares.charge(gold, 400)
    assert list(shares.payers(gold)) == [a, others, gold]
    assert list(shares.payers(a)) == [a, others]
    shares.charge(a, -60)
    assert list(shares.payers(others)) == [others], "a is within its limit of a tenth of a half, and gold of a half"


def test_whoever_has_nothing_yet_gets_room_from_those_who_have_all() -> None:
    shares = Shares()
    shares.limit("a", 0.1)
    shares.charge(OTHERS, 500)
    assert list(shares.payers(shares.group_of("a"))) == [OTHERS, shares.group_of("a")]


def test_limits_change_and_come_to_an_end() -> None:
    shares = Shares()
    assert list(shares.payers(OTHERS)) == [OTHERS]
    assert shares.limit("a", 0.5)
    a = shares.group_of("a")
    shares.charge(a, 10)
    assert not shares.limit("a", 0.1)
    assert shares.group_of("a") == a
    assert shares.limits() == {"a": 0.1}
    assert shares.limit("a", 1.0)
    assert shares.group_of("a") == OTHERS, "what comes from now on"
    assert shares.limits() == {}
    assert shares.limit("a", 0.2)
    assert shares.group_of("a") == a, "its own group again, however often that changes"
    assert shares.limit("a", 1.0)
    assert not shares.limit("a", 1.0)
    assert list(shares.payers(OTHERS)) == [a, OTHERS], "what is there is still limited"
    for number in range(2 * MAX_GROUPS):
        shares.limit(f"tenant {number}", 0.1)
    groups = [shares.group_of(f"tenant {number}") for number in range(2 * MAX_GROUPS)]
    assert a not in groups, "what is there is a's"
    assert groups[-1] != OTHERS
    own = [group for group in groups if group != OTHERS]
    assert len(own) == len(set(own)) == MAX_GROUPS - 2
    assert max(own) < Shares.num_groups
    shares.charge(a, -10)
    assert shares.limit("another", 0.1)
    assert shares.group_of("another") == a
    for number in range(3 * MAX_GROUPS):
        shares.limit(f"in passing {number}", 0.1)
        shares.limit(f"in passing {number}", 1.0)
    assert len(shares._groups) + len(shares._lifted) <= 2 * MAX_GROUPS
    assert shares.limit("a", 0.1)
    assert shares.group_of("a") != OTHERS, "that of one without blocks"


def test_a_tenant_whose_limit_ended_does_not_hold_on_to_its_group() -> None:
    shares = Shares()
    for number in range(MAX_GROUPS):
        shares.limit(f"tenant {number}", 0.1)
        shares.limit(f"tenant {number}", 1.0)
    shares.limit("late", 0.1)
    assert shares.group_of("late") != OTHERS
    assert shares.limits() == {"late": 0.1}
    assert {one.tenant for one in shares.usage()} == {"", "late"}


@given(st.dictionaries(st.integers(0, 7), st.tuples(st.floats(0.01, 1.0), st.integers(1, 10**9)), min_size=1))
def test_somebody_always_pays_and_nobody_within_a_limit_pays_for_another(
    tenants: dict[int, tuple[float, int]],
) -> None:
    shares = Shares({"gold": 0.25})
    used: dict[int, int] = {}
    for number, (limit, num_bytes) in tenants.items():
        shares.limit(str(number), limit)
        group = shares.group_of(str(number))
        shares.charge(group, num_bytes)
        used[group] = used.get(group, 0) + num_bytes
    limits = [limit for limit, _ in tenants.values() if limit < 1]
    for group in (*used, OTHERS, shares.group_of("gold")):
        payers = list(shares.payers(group))
        assert group in payers
        assert len(set(payers)) == len(payers)
    for number, (limit, num_bytes) in tenants.items():
        group = shares.group_of(str(number))
        part = 0.75 * limit / (1 + sum(limits))
        if group != OTHERS and num_bytes <= 0.999 * part * sum(used.values()):
            assert all(group not in shares.payers(other) for other in (*used, OTHERS) if other != group)


def test_a_family_keeps_its_number_while_it_has_blocks() -> None:
    many = [Family("m", "l", f"tenant {number}", 4096) for number in range(MAX_FAMILIES)]
    families = Families()
    for number, family in enumerate(many):
        assert families.number(family) == number
        families.charge(number, 1, 4096)
    newcomer = Family("m", "l", "newcomer", 4096)
    assert families.number(newcomer) == -1, "all are in use"
    families.charge(7, -1, -4096)
    assert families.number(newcomer) == 7
    assert families.find(many[7]) == -1
    assert families[7] == newcomer
    assert families.matching("newcomer", None) == {7}


def test_the_price_of_a_load_counts_what_is_queued_and_the_way_through_memory() -> None:
    prices = NodePrices()
    copied = prices.load_ms("host", 8 << 20)
    alone = prices.load_ms("disk", 8 << 20)
    assert alone > copied
    prices.queue("disk", 64 << 20)
    assert prices.load_ms("disk", 8 << 20) > 5 * alone
    assert prices.load_ms("host", 8 << 20) == copied
    prices.queue("disk", -(64 << 20))
    assert prices.load_ms("disk", 8 << 20) == alone
    for _ in range(200):
        prices.observe("host", 8 << 20, 1000.0)
    assert prices.load_ms("disk", 8 << 20) > 900.0, "what comes from below passes through memory"


def prefill_ms(new: int, cached: int) -> float:
    return 0.1 * new + 1e-5 * new * (cached + new / 2)


def test_a_slow_tier_is_left_alone_and_a_fast_one_used() -> None:
    fast, slow = TierRun("host", 64, 2.0), TierRun("disk", 64, 5000.0)
    plan = plan_load([fast, slow], prefill_ms, num_tokens=4096, cached_tokens=0, block_tokens=16)
    assert plan.num_blocks == 64
    assert plan.saved_ms == pytest.approx(prefill_ms(4096, 0) - 2.0 - prefill_ms(3072, 1024))
    plan = plan_load([slow], prefill_ms, num_tokens=4096, cached_tokens=0, block_tokens=16)
    assert plan == (0, 0.0, 0.0)
    patient = plan_load(
        [slow, TierRun("disk", 128, 1.0)], prefill_ms, num_tokens=4096, cached_tokens=0, block_tokens=16
    )
    assert patient.num_blocks == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0, 1000)), max_size=6), st.integers(1, 8192), st.integers(0, 4096)
)
def test_loading_is_never_predicted_slower_than_computing(runs: list[tuple[int, float]], new: int, cached: int) -> None:
    offered = [TierRun("disk", count, ms) for count, ms in runs]
    plan = plan_load(offered, prefill_ms, num_tokens=cached + new, cached_tokens=cached, block_tokens=16)
    assert plan.saved_ms >= 0
    have = min(cached + new, cached + 16 * plan.num_blocks)
    total = plan.load_ms + prefill_ms(cached + new - have, have)
    assert total <= prefill_ms(new, cached) + 1e-6
    assert plan.num_blocks in {sum(run.num_blocks for run in offered[:end]) for end in range(len(offered) + 1)}


def test_deep_blocks_are_worth_more() -> None:
    rate = ComputeRate(0.1, 1e-5, 16)
    assert rate.block_ms(1000) > 2 * rate.block_ms(0)


def test_a_refused_tier_is_tried_now_and_then() -> None:
    curious = Curiosity(interval=4)
    assert [curious.refused("disk") for _ in range(9)] == [False, False, False, True] * 2 + [False]
    assert not curious.refused("object")


def test_speed_is_learned_in_a_handful_of_loads_in_either_direction() -> None:
    speed = TierSpeed(latency_ms=0.5, bytes_per_s=1e9)
    assert speed.load_ms(8 << 20) == pytest.approx(0.5 + (8 << 20) / 1e6)
    for _ in range(8):
        speed.observe(8 << 20, 2000.0)
    assert speed.load_ms(8 << 20) > 1000.0
    assert speed.load_ms(64 << 20) > 8000.0, "sizes never seen follow the rest"
    for _ in range(40):
        speed.observe(8 << 20, 9.0)
    assert speed.load_ms(8 << 20) < 12.0
    for nonsense in (0.0, -1.0, float("inf"), float("nan")):
        speed.observe(8 << 20, nonsense)
    assert speed.load_ms(8 << 20) < 12.0
    assert speed.load_ms(0) == 0.0
