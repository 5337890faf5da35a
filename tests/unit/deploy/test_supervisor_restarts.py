from hypothesis import given
from hypothesis import strategies as st

from headwater.deploy.restarts import RestartLimits, RestartPolicy


def test_delays_double_to_a_ceiling_and_end() -> None:
    policy = RestartPolicy(RestartLimits(max_restarts=8, first_delay_s=0.5, longest_delay_s=10.0))
    delays = [policy.after_exit(0.0) for _ in range(9)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, None]


def test_a_stable_life_forgives_the_past() -> None:
    policy = RestartPolicy(RestartLimits(max_restarts=2, stable_s=60.0))
    assert [policy.after_exit(0.0), policy.after_exit(59.9)] == [0.5, 1.0]
    assert policy.after_exit(60.0) == 0.5


def test_no_restarts_at_all() -> None:
    assert RestartPolicy(RestartLimits(max_restarts=0)).after_exit(1e9) is None


@given(st.lists(st.floats(0, 1000), max_size=200), st.integers(0, 10))
def test_gives_up_exactly_after_too_many_unstable_lives_in_a_row(lives: list[float], max_restarts: int) -> None:
    limits = RestartLimits(max_restarts=max_restarts)
    policy = RestartPolicy(limits)
    in_a_row = 0
    for ready_s in lives:
        in_a_row = 1 if ready_s >= limits.stable_s else in_a_row + 1
        delay = policy.after_exit(ready_s)
        assert (delay is None) == (in_a_row > max_restarts)
        if delay is None:
            return
        assert 0 < delay <= limits.longest_delay_s
