"""The price of a placement: one formula, two ways to work it out."""

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.router.price import (
    END_TO_END,
    FIRST_TOKEN,
    UNKNOWN,
    Occupancy,
    Placement,
    StepCosts,
    prefill_pairs,
    price,
    profile,
    totals,
)


@dataclass
class Busy:
    booked_prefill_tokens: int
    booked_prefill_pairs: float
    num_prefilling: int
    num_decoding: int
    booked_context_tokens: int
    booked_kv_tokens: int
    speed_factor: float


OTHER = StepCosts(3.0, 0.1, 1e-5, 2.0, 0.2, 1e-4, 512)
tokens = st.integers(0, 200_000)
busy = st.builds(
    Busy,
    tokens,
    st.floats(0, 1e10),
    st.integers(0, 64),
    st.integers(0, 256),
    tokens,
    tokens,
    st.sampled_from([1.0, 0.8, 1.6]),
)


@given(
    workers=st.lists(st.tuples(busy, st.sampled_from([UNKNOWN, OTHER]), st.floats(0, 1)), min_size=1, max_size=12),
    prompt=st.integers(1, 150_000),
    sequences=st.integers(1, 8),
    rest=st.floats(0, 5000),
    churn=st.floats(0, 1),
    crowd=st.integers(0, 50),
    share=st.floats(0, 1),
)
@example([(Busy(0, 0.0, 0, 0, 0, 1600, 1.0), UNKNOWN, 0.0)], 1, 1, 0.0, 0.0, 0, 1.0)
def test_totals_are_the_sums_of_the_parts(
    workers: list[tuple[Busy, StepCosts, float]],
    prompt: int,
    sequences: int,
    rest: float,
    churn: float,
    crowd: float,
    share: float,
) -> None:
    weights = profile(share)
    placement = Placement(prompt, sequences, rest, churn, crowd)
    cached = [int(part * (prompt - 1)) for _, _, part in workers]
    occupied = [Occupancy.of(costs, worker) for worker, costs, _ in workers]
    expected = [
        sum(price(costs, weights, worker, placement, held))
        for (worker, costs, _), held in zip(workers, cached, strict=True)
    ]
    assert totals(weights, occupied, placement, cached) == pytest.approx(expected, rel=1e-9)


@given(worker=busy, prompt=st.integers(2, 100_000), part=st.floats(0, 1))
def test_what_is_cached_never_makes_a_placement_dearer(worker: Busy, prompt: int, part: float) -> None:
    cold, warm = totals(
        END_TO_END,
        [Occupancy.of(UNKNOWN, worker)] * 2,
        Placement(prompt, 1, 100.0, 0.5, 3.0),
        [0, int(part * (prompt - 1))],
    )
    assert warm <= cold * (1 + 1e-12)


def test_pairs_add_up_over_chunks() -> None:
    whole = prefill_pairs(100, 20)
    assert whole == sum(range(21, 121))
    assert whole == prefill_pairs(60, 20) + prefill_pairs(40, 80)


def test_profiles_lie_between_the_two_ends() -> None:
    assert profile(0.0) == FIRST_TOKEN
    assert profile(1.0) == END_TO_END
    assert FIRST_TOKEN.own_decode < profile(0.5).own_decode < END_TO_END.own_decode
    with pytest.raises(ConfigError, match="from 0 to 1"):
        profile(1.5)


def test_where_no_prompt_was_computed_nobody_waits_for_those_of_successors() -> None:
    placement = Placement(1000, 1, 100.0, 0.0, 0)
    decodes_only, computes = Busy(0, 0.0, 0, 20, 20_000, 0, 1.0), Busy(0, 0.0, 0, 20, 20_000, 20_000, 1.0)
    assert price(UNKNOWN, END_TO_END, decodes_only, placement, 1000).successors == 0.0
    assert price(UNKNOWN, END_TO_END, computes, placement, 1000).successors > 0.0
