"""The sampler as the executor uses it: parameters, penalties, seeds, log-probabilities, independence of the batch."""

import math
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engines.native.sampling.philox import philox4x32, uniforms
from headwater.engines.native.sampling.sampler import Sampled, Sampler
from headwater.engines.native.sampling.state import SamplingState, check_sampling
from headwater.errors import InvalidRequest
from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.scheduler.plan import Sequence

VOCAB = 1000
EOS = 2


def sequence(prompt: list[int], output: list[int], **sampling: Any) -> Sequence:
    request = EngineRequest(1, "r", "m", b"", SamplingParams(**sampling))
    return Sequence(1, request, array("I", prompt + output), len(prompt))


def state(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> SamplingState:
    return SamplingState(sequence(prompt or [5, 6], output or [], **sampling), VOCAB, (EOS,))


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)
    return torch.from_numpy(values)


def sample(values: torch.Tensor, *states: SamplingState) -> Sampled:
    return Sampler(VOCAB).sample(values.clone(), states)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    a, b, c, d = (np.array([word], dtype=np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in philox4x32((a, b, c, d), key)) == expected


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    run = uniforms(42, 0, 200)
    assert np.array_equal(uniforms(42, 150, 10), run[150:160])
    assert not np.array_equal(uniforms(43, 0, 200), run)
    assert np.all((run >= 0) & (run < 1))
    assert len(np.unique(run)) == 200
    assert np.array_equal(uniforms(-1, 0, 5), uniforms(2**64 - 1, 0, 5))
    assert np.array_equal(uniforms(1, 2**40, 3), uniforms(1, 2**40 - 1, 4)[1:])


def test_greedy_is_the_argmax() -> None:
    values = logits(5)
    result = sample(values, *(state(temperature=0.0) for _ in range(5)))
    assert result.token_ids == values.argmax(-1).tolist()
    assert result.logprobs is None
    assert result.failures == {}


def test_greedy_tie_takes_the_lower_token() -> None:
    values = torch.zeros(1, VOCAB)
    values[0, [30, 20, 40]] = 5.0
    assert sample(values, state(temperature=0.0)).token_ids == [20]
    assert sample(values, state(temperature=0.0, logprobs=1)).token_ids == [20]


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=100),
    output=st.lists(st.integers(0, 50), max_size=100),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=10),
    min_tokens=st.integers(0, 120),
    steps=st.integers(1, 3),
)
def test_adjustments_match_the_reference(
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
    min_tokens: int,
    steps: int,
) -> None:
    sampling: dict[str, Any] = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
        "logit_bias": bias,
        "min_tokens": min_tokens,
        "max_tokens": 200,
        "stop_token_ids": [9, 10],
    }
    seq = sequence(prompt, output[: len(output) // steps], **sampling)
    tracked = SamplingState(seq, VOCAB, (EOS,))
    for step in range(1, steps + 1):
        end = len(output) * step // steps
        seq.token_ids.extend(output[seq.num_output_tokens : end])
        row = logits(seed=step).numpy()[0]
        expected = row.astype(np.float64)
        seen = output[:end]
        if len(seen) < min_tokens:
            expected[[EOS, 9, 10]] = -math.inf
        for token, value in bias.items():
            expected[token] += value
        for token in set(prompt) | set(seen):
            expected[token] *= repetition if expected[token] <= 0 else 1 / repetition
        for token in set(seen):
            expected[token] -= frequency * seen.count(token) + presence
        tracked.adjust(row)
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-4)


def test_state_rebuilt_from_tokens_equals_the_tracked_one() -> None:
    """What a preemption or a move to another worker does."""
    sampling: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "seed": 9}
    seq = sequence([1, 2, 3], [], **sampling)
    tracked = SamplingState(seq, VOCAB, (EOS,))
    for step in range(150):
        values = logits(seed=step)
        moved = SamplingState(seq, VOCAB, (EOS,))
        first, second = sample(values, tracked), sample(values, moved)
        assert first.token_ids == second.token_ids
        seq.token_ids.append(first.token_ids[0])


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.9, "logprobs": 3},
    {"seed": 3, "top_k": 20, "temperature": 0.6},
    {"seed": 4, "min_p": 0.1, "repetition_penalty": 1.3},
    {"seed": 5, "temperature": 2.0, "top_p": 0.99},
    {"temperature": 0.0, "logprobs": 0, "presence_penalty": 1.5},
    {"seed": 6, "logit_bias": {7: 5.0}, "logprobs": 64},
]


def test_a_row_gives_the_same_bits_alone_and_in_any_batch() -> None:
    values = logits(len(MIXED), seed=3)
    states = [state(output=[5, 9, 9], **sampling) for sampling in MIXED]
    alone = [sample(values[i : i + 1], states[i]) for i in range(len(MIXED))]
    generator = np.random.default_rng(0)
    for _ in range(20):
        order = generator.permutation(len(MIXED))[: generator.integers(1, len(MIXED) + 1)]
        together = sample(values[torch.from_numpy(order)], *(states[i] for i in order))
        for place, number in enumerate(order):
            assert together.token_ids[place] == alone[number].token_ids[0]
            own = alone[number].logprobs
            if own is not None:
                assert together.logprobs is not None
                assert together.logprobs[place] == own[0]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.02},
        {"top_p": 0.999, "temperature": 1.3},
    ],
)
def test_draws_follow_the_distribution(sampling: dict[str, Any]) -> None:
    """Chi-square over many seeds, against the exact distribution in float64; bins of at least ten expected draws."""
    draws = 4000
    values = logits(seed=11)
    scaled = values[0].numpy().astype(np.float64) / sampling.get("temperature", 1.0)
    probabilities = np.exp(scaled - scaled.max())
    order = np.argsort(-probabilities)
    if sampling.get("min_p"):
        probabilities[probabilities < sampling["min_p"]] = 0
    if sampling.get("top_k"):
        probabilities[order[sampling["top_k"] :]] = 0
    probabilities /= probabilities.sum()
    if sampling.get("top_p"):
        probabilities[order[np.searchsorted(np.cumsum(probabilities[order]), sampling["top_p"]) + 1 :]] = 0
    probabilities /= probabilities.sum()
    sampler = Sampler(VOCAB)
    tokens = [sampler.sample(values.clone(), [state(seed=seed, **sampling)]).token_ids[0] for seed in range(draws)]
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[probabilities == 0].sum() == 0
    common = probabilities * draws >= 10
    expected = np.append(probabilities[common], probabilities[~common].sum()) * draws
    observed = np.append(counts[common], counts[~common].sum())
    kept = expected > 0
    statistic = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)


def test_positions_draw_independently() -> None:
    """One seed, many positions: still the right frequencies."""
    values = torch.zeros(1, VOCAB)
    values[0, :4] = 50.0
    seq = sequence([1], [], seed=3)
    own = SamplingState(seq, VOCAB, (EOS,))
    counts = [0] * 4
    for _ in range(4000):
        token = sample(values, own).token_ids[0]
        counts[token] += 1
        seq.token_ids.append(token)
    assert sum(counts) == 4000
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 16.3  # 0.1 % of chi-square with 3 degrees


def test_logprobs_are_of_the_adjusted_logits_before_temperature_and_cuts() -> None:
    values = logits(seed=5)
    bias = {int(values.argmax()): -100.0}
    own = state(temperature=0.3, top_k=2, seed=8, logit_bias=bias, logprobs=5)
    result = sample(values, own)
    adjusted = values[0].numpy().astype(np.float64)
    for token, value in bias.items():
        adjusted[token] += value
    expected = adjusted - adjusted.max() - math.log(np.exp(adjusted - adjusted.max()).sum())
    assert result.logprobs is not None
    entry = result.logprobs[0]
    assert entry is not None
    token = result.token_ids[0]
    assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
    order = np.argsort(-expected)
    assert entry.rank == int(np.flatnonzero(order == token)[0]) + 1
    assert entry.top_ids == order[:5].tolist()
    assert entry.top_logprobs == pytest.approx(expected[order[:5]].tolist(), abs=1e-5)


def test_masked_tokens_are_not_among_the_top_logprobs() -> None:
    values = torch.full((1, VOCAB), -math.inf)
    values[0, [3, 4]] = torch.tensor([0.0, 1.0])
    result = sample(values, state(temperature=0.0, logprobs=5))
    assert result.logprobs is not None
    entry = result.logprobs[0]
    assert entry is not None
    assert entry.top_ids == [4, 3]
    assert all(math.isfinite(value) for value in entry.top_logprobs)


def test_min_tokens_holds_back_end_tokens_only_until_reached() -> None:
    values = torch.zeros(1, VOCAB)
    values[0, EOS], values[0, 7], values[0, 8] = 9.0, 8.0, 7.0
    sampling: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [7]}
    assert sample(values, state(output=[1], **sampling)).token_ids == [8]
    assert sample(values, state(output=[1, 1], **sampling)).token_ids == [EOS]
    assert sample(values, state(output=[1], ignore_eos=True, **sampling)).token_ids == [EOS]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"seed": 1}, {"top_p": 0.9}, {"temperature": 0.0, "logprobs": 1}]
)
def test_bad_logits_fail_their_row_only(bad: float, sampling: dict[str, Any]) -> None:
    values = logits(3)
    values[1, 500] = bad
    result = sample(values, *(state(**sampling) for _ in range(3)))
    assert list(result.failures) == [1]
    assert "logit" in result.failures[1]


def test_everything_masked_fails_the_row() -> None:
    values = torch.full((1, VOCAB), -math.inf)
    assert sample(values, state(temperature=0.0)).failures.keys() == {0}
    assert sample(values, state(seed=1)).failures.keys() == {0}


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"logprobs": 65}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_values_out_of_range_are_refused_by_name(sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_sampling(SamplingParams(**sampling), VOCAB)
    assert refused.value.param == param
    assert param in str(refused.value)


def test_penalties_over_many_distinct_tokens() -> None:
    """The table of counts grows without losing the count that made it grow."""
    output = list(range(300))
    row = np.zeros(VOCAB, dtype=np.float32)
    state(output=output, frequency_penalty=1.0, max_tokens=1000).adjust(row)
    assert row[:300].tolist() == [-1.0] * 300
    assert not row[300:].any()


@pytest.mark.parametrize("seed", [0, -5, 2**63, 2**80 + 3])
def test_any_integer_is_a_seed(seed: int) -> None:
    first = sample(logits(), state(seed=seed))
    assert first.token_ids == sample(logits(), state(seed=seed)).token_ids
