"""Which request workers die of: convicted when that is certain, else tried alone, and cleared when it was not it."""

from types import SimpleNamespace
from typing import cast

from headwater.frontend.stream import Stream
from headwater.frontend.suspects import Suspects


class Fake(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__  # type: ignore[assignment]


def streams(count: int) -> list[Stream]:
    return [cast(Stream, Fake(deaths=())) for _ in range(count)]


def test_one_death_convicts_nobody() -> None:
    suspects, all_of_them = Suspects(), streams(5)
    assert suspects.died("w1", all_of_them, hung=False) is None
    assert all(map(suspects.may_go, all_of_them))


def test_whoever_alone_was_at_two_deaths_without_a_token_between_is_guilty() -> None:
    suspects = Suspects()
    poison, *others = streams(5)
    suspects.died("w1", [poison, *others[:2]], hung=False)
    for stream in others[:2]:
        suspects.clear(stream)
    assert suspects.died("w2", [poison, *others], hung=False) is poison


def test_several_are_tried_one_at_a_time() -> None:
    suspects = Suspects()
    innocent, poison, late = streams(3)
    suspects.died("w1", [innocent, poison, late], hung=False)
    assert suspects.died("w2", [innocent, poison, late], hung=False) is None
    assert [suspects.may_go(s) for s in (innocent, poison, late)] == [True, False, False]
    suspects.clear(innocent)
    assert [suspects.may_go(s) for s in (innocent, poison, late)] == [True, True, False]
    assert suspects.died("w3", [innocent, poison], hung=False) is poison
    suspects.clear(poison)
    assert suspects.may_go(late)
    assert innocent.deaths == ("w3",), "it had got tokens in between"


def test_whoever_is_on_trial_is_not_to_blame_for_deaths_elsewhere() -> None:
    suspects = Suspects()
    on_trial, waiting, elsewhere = streams(3)
    for worker_id in ("w1", "w2"):
        suspects.died(worker_id, [on_trial, waiting], hung=False)
    assert suspects.died("w3", [elsewhere], hung=False) is None
    assert suspects.died("w4", [elsewhere], hung=False) is elsewhere
    assert suspects.may_go(on_trial)


def test_hangs_convict_late_and_not_when_the_worker_came_back() -> None:
    suspects = Suspects()
    (stream,) = streams(1)
    for worker_id in ("w1", "w2"):
        assert suspects.died(worker_id, [stream], hung=True) is None
    suspects.absolve("w1", [stream])
    assert suspects.died("w3", [stream], hung=True) is None
    assert suspects.died("w4", [stream], hung=True) is stream


def test_a_worker_that_came_back_frees_those_in_line() -> None:
    suspects = Suspects()
    first, second = streams(2)
    for worker_id in ("w1", "w2"):
        suspects.died(worker_id, [first, second], hung=True)
    assert not suspects.may_go(second)
    suspects.absolve("w2", [first, second])
    assert suspects.may_go(second)
