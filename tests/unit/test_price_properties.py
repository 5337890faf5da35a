"""What the price of a placement must be like, whatever its weights: monotone, additive, and blind to a common scale."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.router.price import Occupancy, Placement, Profile, StepCosts, prefill_pairs, price, profile, totals

COSTS = StepCosts(16.0, 0.015, 4e-7, 6.0, 0.05, 5e-5, 8192)


@dataclass(frozen=True)
class Load:
    booked_prefill_tokens: int = 0
    booked_prefill_pairs: float = 0.0
    num_prefilling: int = 0
    num_decoding: int = 0
    booked_context_tokens: int = 0
    booked_kv_tokens: int = 0
    speed_factor: float = 1.0


loads = st.builds(
    Load,
    st.integers(0, 100_000),
    st.floats(0, 1e9),
    st.integers(0, 32),
    st.integers(0, 128),
    st.integers(0, 500_000),
    st.integers(0, 500_000),
)
costs = st.builds(
    StepCosts,
    st.floats(0, 50),
    st.floats(1e-4, 1),
    st.floats(0, 1e-5),
    st.floats(0, 50),
    st.floats(0, 2),
    st.floats(0, 1e-3),
    st.sampled_from([512, 2048, 8192]),
)
placements = st.builds(
    Placement, st.integers(1, 100_000), st.integers(1, 4), st.floats(0, 2000), st.floats(0, 1), st.floats(0, 50)
)
profiles = st.builds(profile, st.floats(0, 1))


@given(costs=costs, weights=profiles, load=loads, placement=placements, cached_part=st.floats(0, 1))
def test_no_part_is_negative(
    costs: StepCosts, weights: Profile, load: Load, placement: Placement, cached_part: float
) -> None:
    cached = int(cached_part * (placement.prompt_tokens - 1))
    parts = price(costs, weights, load, placement, cached)
    assert min(parts) >= -1e-9 * max(1.0, *parts)


@given(
    costs=costs,
    weights=profiles,
    load=loads,
    placement=placements,
    more=st.sampled_from(["num_decoding", "booked_context_tokens", "booked_kv_tokens", "num_prefilling"]),
    by=st.integers(1, 1000),
)
def test_more_load_never_makes_a_worker_cheaper(
    costs: StepCosts, weights: Profile, load: Load, placement: Placement, more: str, by: int
) -> None:
    busier = replace(load, **{more: getattr(load, more) + by})
    light, heavy = (sum(price(costs, weights, one, placement, 0)) for one in (load, busier))
    assert heavy >= light * (1 - 1e-12)


@given(costs=costs, load=loads, placement=placements, by=st.integers(1, 50_000))
def test_a_longer_prefill_queue_never_brings_the_first_token_forward(
    costs: StepCosts, load: Load, placement: Placement, by: int
) -> None:
    """The whole price may fall, and rightly: a chunk that is begun anyway has room for another prompt."""
    busier = replace(
        load,
        booked_prefill_tokens=load.booked_prefill_tokens + by,
        booked_prefill_pairs=load.booked_prefill_pairs + prefill_pairs(by, 0),
    )
    sooner, later = (price(costs, profile(1.0), one, placement, 0).first_token for one in (load, busier))
    assert later >= sooner * (1 - 1e-12)


@given(
    costs=costs, weights=profiles, load=loads, placement=placements, parts=st.tuples(st.floats(0, 1), st.floats(0, 1))
)
def test_a_longer_cached_prefix_never_raises_the_price(
    costs: StepCosts, weights: Profile, load: Load, placement: Placement, parts: tuple[float, float]
) -> None:
    less, more = sorted(int(part * (placement.prompt_tokens - 1)) for part in parts)
    occupied = [Occupancy.of(costs, load)] * 2
    warm, warmer = totals(weights, occupied, placement, [less, more])
    assert warmer <= warm * (1 + 1e-12) + 1e-9


@given(
    costs=costs,
    weights=profiles,
    workers=st.lists(loads, min_size=2, max_size=8),
    placement=placements,
    scale=st.floats(0.1, 10),
)
@settings(max_examples=200)
def test_a_common_scale_of_all_times_scales_all_prices_and_changes_no_choice(
    costs: StepCosts, weights: Profile, workers: list[Load], placement: Placement, scale: float
) -> None:
    times = ("prefill_step_ms", "prefill_token_ms", "prefill_pair_ms", "decode_step_ms", "decode_sequence_ms")
    slower = replace(
        costs,
        **{name: getattr(costs, name) * scale for name in (*times, "decode_context_token_ms")},
    )
    cached = [0] * len(workers)
    own = totals(weights, [Occupancy.of(costs, load) for load in workers], placement, cached)
    scaled = totals(weights, [Occupancy.of(slower, load) for load in workers], placement, cached)
    assert scaled == pytest.approx([total * scale for total in own], rel=1e-9)
    best = min(own)
    assert own[scaled.index(min(scaled))] == pytest.approx(best, rel=1e-9)


@given(load=loads, placement=placements)
def test_the_first_token_of_an_idle_worker_is_its_prefill(load: Load, placement: Placement) -> None:
    tokens = placement.prompt_tokens
    expected = COSTS.prefill_ms(tokens, prefill_pairs(tokens, 0))
    assert price(COSTS, profile(0.5), Load(), placement, 0).first_token == pytest.approx(expected)
    assert price(COSTS, profile(0.5), load, placement, 0).first_token >= expected * (1 - 1e-12)


@given(load=loads, placement=placements)
def test_a_slow_worker_waits_longer_for_its_own_queue_only(load: Load, placement: Placement) -> None:
    slow = replace(load, speed_factor=1.5)
    own, slower = (price(COSTS, profile(1.0), one, placement, 0) for one in (load, slow))
    backlog_ms = COSTS.prefill_ms(load.booked_prefill_tokens, load.booked_prefill_pairs)
    assert slower.first_token - own.first_token == pytest.approx(0.5 * backlog_ms, abs=1e-6 * max(1.0, own.first_token))
    assert slower[1:] == own[1:]


@given(tokens=st.integers(1, 50_000), chunk=st.sampled_from([512, 2048, 8192]))
def test_prefill_time_counts_begun_chunks(tokens: int, chunk: int) -> None:
    chunked = replace(COSTS, chunk_tokens=chunk)
    plain = COSTS.prefill_token_ms * tokens
    steps = -(-tokens // chunk)
    assert chunked.prefill_ms(tokens, 0.0) == pytest.approx(plain + steps * COSTS.prefill_step_ms)
    assert chunked.prefill_ms(0, 0.0) == 0.0
