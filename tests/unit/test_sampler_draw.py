"""Cuts and draws against a float64 reference that sorts everything."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.engines.native.sampling.draw import Cuts, RowSampler

SWEEP = 1000
"""Quantiles are swept evenly, so a token of probability p is drawn SWEEP * p times, give or take its two borders."""


def reference(logits: NDArray[np.float32], temperature: float, cuts: Cuts) -> dict[int, float]:
    """Token -> probability, by full sort in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted((token for token in range(len(scaled)) if scaled[token] > -math.inf), key=lambda t: (-scaled[t], t))
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    if cuts.min_p > 0:
        order = [token for token in order if weights[token] >= cuts.min_p]
    if cuts.top_k:
        order = order[: cuts.top_k]
    total = math.fsum(weights[token] for token in order)
    reached, kept = 0.0, []
    for token in order:
        kept.append(token)
        reached += weights[token]
        if cuts.top_p < 1 and reached >= cuts.top_p * total:
            break
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def drawn(logits: NDArray[np.float32], temperature: float, cuts: Cuts, sweep: int = SWEEP) -> dict[int, int]:
    row = RowSampler(len(logits))
    counts: dict[int, int] = {}
    row.load(logits, logits.max())
    for step in range(sweep):
        token = row.draw(cuts, temperature, (step + 0.5) / sweep)
        counts[token] = counts.get(token, 0) + 1
    return counts


def matches(counts: dict[int, int], expected: dict[int, float], sweep: int = SWEEP) -> bool:
    return all(
        abs(counts.get(token, 0) - sweep * expected.get(token, 0.0)) <= 1.01
        for token in counts.keys() | expected.keys()
    )


def spaced_logits(seed: int, size: int, spread: float) -> NDArray[np.float32]:
    """Distinct values with gaps far above rounding, so that reference and product agree on which side of a cut."""
    generator = np.random.default_rng(seed)
    values = np.linspace(-spread, spread, size) + generator.uniform(-0.1, 0.1, size) * spread / size
    return generator.permutation(values).astype(np.float32)


cut_strategy = st.builds(
    Cuts,
    top_k=st.one_of(st.just(0), st.integers(1, 400)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0001, 1.0)),
)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(2, 700),
    spread=st.floats(0.01, 30.0),
    temperature=st.floats(0.1, 3.0),
    cuts=cut_strategy,
)
def test_every_cut_matches_the_reference(seed: int, size: int, spread: float, temperature: float, cuts: Cuts) -> None:
    logits = spaced_logits(seed, size, spread)
    counts = drawn(logits, temperature, cuts, 120)
    # A token whose mass ends at the cut within float32 rounding may fall on either side of it.
    rounded = [
        Cuts(cuts.top_k, min(cuts.top_p * top_p, 1.0), cuts.min_p * min_p)
        for top_p in (1 - 1e-5, 1.0, 1 + 1e-5)
        for min_p in (1 - 1e-5, 1.0, 1 + 1e-5)
    ]
    assert any(matches(counts, reference(logits, temperature, each), 120) for each in rounded)


@pytest.mark.parametrize(
    "cuts",
    [
        Cuts(),
        Cuts(top_k=5),
        Cuts(top_k=500),
        Cuts(top_p=0.3),
        Cuts(top_p=0.95),
        Cuts(min_p=0.05),
        Cuts(min_p=0.9),
        Cuts(top_k=300, top_p=0.9),
        Cuts(top_p=0.9, min_p=0.001),
        Cuts(top_k=100, top_p=0.5, min_p=0.01),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_large_vocabulary(cuts: Cuts, temperature: float) -> None:
    logits = np.random.default_rng(7).normal(0, 2.5, 49_152).astype(np.float32)
    expected = reference(logits, temperature, cuts)
    counts = drawn(logits, temperature, cuts, 300)
    assert counts.keys() <= expected.keys()
    assert matches(counts, expected, 300)


def test_exact_borders_of_top_p() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    assert set(drawn(logits, 1.0, Cuts(top_p=0.5))) == {0}
    assert set(drawn(logits, 1.0, Cuts(top_p=0.51))) == {0, 1}
    assert set(drawn(logits, 1.0, Cuts(top_p=0.76))) == {0, 1, 2}


def test_ties_go_to_the_lower_token() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    assert set(drawn(logits, 1.0, Cuts(top_k=3))) == {0, 1, 2}
    assert set(drawn(logits, 1.0, Cuts(top_k=100))) == set(range(100))
    assert set(drawn(logits, 1.0, Cuts(top_p=0.2))) == set(range(200))


@pytest.mark.parametrize("cuts", [Cuts(), Cuts(top_k=10), Cuts(top_p=0.99), Cuts(min_p=0.001), Cuts(top_k=200)])
def test_masked_tokens_are_never_drawn(cuts: Cuts) -> None:
    logits = np.full(5000, -np.inf, dtype=np.float32)
    logits[[17, 4999]] = 1.0, 2.0
    row = RowSampler(5000)
    row.load(logits, logits.max())
    for uniform in (0.0, 0.1, 0.5, 0.9, 1 - 2**-53):
        assert row.draw(cuts, 1.0, uniform) in (17, 4999)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 4095, 4097])
def test_odd_vocabulary_sizes(size: int) -> None:
    logits = spaced_logits(3, size, 2.0)
    for cuts in (Cuts(), Cuts(top_k=7), Cuts(top_p=0.9)):
        counts = drawn(logits, 1.0, cuts, 200)
        assert matches(counts, reference(logits, 1.0, cuts), 200)


def test_largest_is_sorted_and_complete() -> None:
    logits = np.random.default_rng(1).normal(0, 3, 49_152).astype(np.float32)
    row = RowSampler(len(logits))
    row.load(logits, logits.max())
    largest = row.largest()
    assert largest.token_ids.tolist() == np.argsort(-logits, kind="stable")[:64].tolist()
    assert np.all(np.diff(largest.values) <= 0)


def test_extreme_quantiles_stay_inside() -> None:
    logits = spaced_logits(5, 3000, 40.0)
    row = RowSampler(len(logits))
    row.load(logits, logits.max())
    for uniform in (0.0, 2**-53, 1 - 2**-53):
        for cuts in (Cuts(), Cuts(top_p=0.999999), Cuts(min_p=1e-9), Cuts(top_k=2999)):
            assert 0 <= row.draw(cuts, 1.0, uniform) < 3000
