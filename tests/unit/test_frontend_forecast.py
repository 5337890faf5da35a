"""How long a new request will wait, and who is refused for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import Overloaded
from headwater.frontend.forecast import Forecast


def busy(rate_per_s: float, waiting: int, tenant: str = "a", weights: dict[str, float] | None = None) -> Forecast:
    """A forecast that has seen `rate_per_s` first tokens for 10 s of work, at second 10."""
    forecast = Forecast(weights)
    forecast.came("m", tenant, waiting + int(10 * rate_per_s), 0.0)
    for number in range(int(10 * rate_per_s)):
        forecast.began("m", tenant, (number + 1) / rate_per_s)
    return forecast


def test_nothing_is_refused_while_nothing_is_known() -> None:
    forecast = Forecast()
    forecast.came("m", "a", 1000, 0.0)
    forecast.admit("m", "a", 0.001, 100.0)


def test_until_something_is_seen_what_the_time_model_expects_counts() -> None:
    forecast = Forecast()
    forecast.admit("m", "a", 0.001, 0.0, expected_per_s=10.0)  # waits for nobody; the queue knows how long it takes
    forecast.came("m", "a", 30, 0.0)
    assert not forecast.knows("m", 0.0)
    assert forecast.wait_s("m", "a", 0.0, expected_per_s=10.0) == pytest.approx(3.1)
    with pytest.raises(Overloaded):
        forecast.admit("m", "a", 2.0, 0.0, expected_per_s=10.0)
    seen = busy(2.0, 3)
    assert seen.knows("m", 10.0)
    assert seen.wait_s("m", "a", 10.0, expected_per_s=1000.0) == pytest.approx(2.0, rel=0.2), "what was seen is better"


@pytest.mark.parametrize("rate", [2.0, 20.0])
@pytest.mark.parametrize("waiting", [3, 40])
def test_the_wait_is_what_waits_over_the_rate(rate: float, waiting: int) -> None:
    assert busy(rate, waiting).wait_s("m", "a", 10.0) == pytest.approx((waiting + 1) / rate, rel=0.2)


def test_idle_time_does_not_count() -> None:
    forecast = busy(10.0, 0)
    assert forecast.wait_s("m", "a", 1000.0) == pytest.approx(0.1, rel=0.2)
    forecast.came("m", "a", 50, 1000.0)
    assert forecast.wait_s("m", "a", 1000.0) == pytest.approx(5.1, rel=0.2)


def test_clients_that_leave_before_their_first_token_do_not_get_others_refused() -> None:
    forecast = busy(10.0, 0)
    for second in range(10, 20):
        forecast.came("m", "b", 1, float(second))
        forecast.left("m", "b", second + 0.9)
    assert forecast.wait_s("m", "a", 20.0) == pytest.approx(0.1, rel=0.2)


def test_time_in_which_nothing_begins_counts_while_somebody_waits() -> None:
    forecast = busy(10.0, 3)
    forecast.left("m", "a", 13.0)
    assert forecast.wait_s("m", "a", 13.0) > 1.2 * 3 / 10


def test_who_would_wait_too_long_is_told_when_to_come_back() -> None:
    forecast = busy(10.0, 60)
    forecast.admit("m", "a", 10.0, 10.0)
    with pytest.raises(Overloaded, match=r"about 6\.\d s, more than 70% of the 2\.0 s allowed") as caught:
        forecast.admit("m", "a", 2.0, 10.0)
    assert 3.5 < caught.value.retry_after_s < 6.0
    assert busy(10.0, 60).wait_s("other", "a", 10.0) == 0.0, "another model's line is another matter"


def test_before_the_model_is_known_only_what_would_be_too_long_for_any_is_refused() -> None:
    forecast = busy(10.0, 60)
    with pytest.raises(Overloaded):
        forecast.admit_any("a", 2.0, 10.0)
    forecast.came("idle", "a", 1, 10.0)
    forecast.admit_any("a", 2.0, 10.0)
    Forecast().admit_any("a", 0.0, 10.0)


def test_a_tenant_does_not_wait_for_another_ones_flood() -> None:
    forecast = busy(10.0, 1000, weights={"small": 2.0})
    assert forecast.wait_s("m", "a", 10.0) > 90
    assert forecast.wait_s("m", "small", 10.0) == pytest.approx(1.5 / 10, rel=0.2)


@given(st.lists(st.tuples(st.sampled_from(["came", "began", "left"]), st.sampled_from("abc"), st.floats(0, 5))))
def test_what_waits_is_never_negative_and_nothing_is_kept_of_tenants_that_left(steps: list) -> None:
    forecast, open_by, now = Forecast(), dict.fromkeys("abc", 0), 0.0
    for what, tenant, pause in steps:
        now += pause
        if what == "came":
            forecast.came("m", tenant, 2, now)
            open_by[tenant] += 2
        elif open_by[tenant]:
            getattr(forecast, what)("m", tenant, now)
            open_by[tenant] -= 1
        assert forecast.wait_s("m", tenant, now) >= 0
    found = forecast._models.get("m")
    if found is not None:
        assert found.waiting == {tenant: count for tenant, count in open_by.items() if count}
        assert found.total == sum(open_by.values())
