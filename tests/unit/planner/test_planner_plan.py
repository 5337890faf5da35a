"""Which plans of roles are worth trying."""

import pytest

from headwater.planner.plan import RolePlan, aggregated, candidates, loosened


def test_workers_of_a_class_are_exchangeable() -> None:
    plans = list(candidates(["a"] * 4))
    assert plans[0] == aggregated(4)
    assert [plan.roles.count("prefill") for plan in plans[1:]] == [1, 2, 3]
    assert len(set(plans)) == 4


def test_classes_are_combined() -> None:
    plans = list(candidates(["a", "a", "b"]))
    assert len(plans) == 1 + 3 * 2 - 2
    assert RolePlan(("prefill", "decode", "prefill")) in plans


def test_fixed_roles_stay() -> None:
    plans = list(candidates(["a", "a", "a"], ("prefill", None, None)))
    assert all(plan.roles[0] == "prefill" for plan in plans)
    assert RolePlan(("prefill", "both", "both")) in plans
    assert RolePlan(("prefill", "decode", "decode")) in plans
    assert all(plan.complete for plan in plans)


@pytest.mark.parametrize("classes", [["a"] * 300, [name for name in "abcd" for _ in range(20)], list("abcdefgh")])
def test_large_pools_have_a_bounded_number_of_plans(classes: list[str]) -> None:
    plans = list(candidates(classes))
    assert len(plans) <= 300
    assert len({plan.roles.count("prefill") for plan in plans}) > 5
    assert plans[0].aggregated


def test_a_plan_that_nobody_decodes_in_is_none() -> None:
    assert not RolePlan(("prefill", "prefill")).complete
    assert not RolePlan(("decode", "decode")).complete
    assert list(candidates(["a"])) == [aggregated(1)]


def test_only_splits_can_be_left() -> None:
    assert loosened(aggregated(3)) is None
    split = RolePlan(("prefill", "decode"))
    loose = loosened(split)
    assert loose is not None
    assert loose.loose
    assert loosened(loose) is None


def test_plans_are_told_in_words() -> None:
    assert aggregated(8).describe() == "8 aggregated"
    assert RolePlan(("prefill", "decode", "prefill")).describe(["TP1", "TP2", "TP1"]) == "2 TP1 prefill + 1 TP2 decode"
