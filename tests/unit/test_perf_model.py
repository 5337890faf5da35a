"""The time model: it learns a known truth through noise and outliers, stays monotone, and never goes negative."""

import math
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headwater.perf.fit import NonNegativeFit
from headwater.perf.model import PerfModel, StepModel, StepShape
from headwater.protocol.events import StepTiming


def truth_ms(shape: StepShape) -> float:
    ms = 2.0
    if shape.prefill_tokens:
        ms += 10 + 0.02 * shape.prefill_tokens + 4e-7 * shape.prefill_pairs
    if shape.decode_sequences:
        ms += 4 + 0.03 * shape.decode_sequences + 2e-5 * shape.decode_context_tokens
    return ms


def random_shape(random: Random) -> StepShape:
    prefill = random.choice([0, 0, random.randint(1, 8192)])
    decode = random.randint(0 if prefill else 1, 64)
    return StepShape(prefill, prefill * random.uniform(1, 8000), decode, decode * random.uniform(100, 20_000))


def median_error(model: StepModel, random: Random) -> float:
    shapes = [random_shape(random) for _ in range(500)]
    return sorted(abs(model.step_ms(shape) / truth_ms(shape) - 1) for shape in shapes)[250]


def test_it_learns_through_noise_and_outliers() -> None:
    random = Random(1)
    model = StepModel()
    for _ in range(2000):
        shape = random_shape(random)
        stall = random.uniform(5, 50) if random.random() < 0.03 else 1.0
        model.observe(shape, truth_ms(shape) * math.exp(random.gauss(0, 0.05)) * stall)
    assert median_error(model, random) < 0.03
    assert model.quality().num_outliers >= 30


def test_it_follows_a_lasting_change() -> None:
    random = Random(2)
    model = StepModel()
    for speed in (1.0, 3.0):
        for _ in range(6000):
            shape = random_shape(random)
            model.observe(shape, speed * truth_ms(shape))
    shape = StepShape(0, 0, 16, 64_000)
    assert model.step_ms(shape) == pytest.approx(3 * truth_ms(shape), rel=0.4)


def test_a_prior_answers_before_the_first_sample_and_fades_after() -> None:
    random = Random(3)
    model = StepModel()
    believed = [(shape, 2 * truth_ms(shape)) for shape in (random_shape(random) for _ in range(50))]
    model.believe(believed, weight=20)
    shape = StepShape(2048, 2048 * 1024, 8, 8000)
    assert model.step_ms(shape) == pytest.approx(2 * truth_ms(shape), rel=0.1)
    for _ in range(3000):
        sample = random_shape(random)
        model.observe(sample, truth_ms(sample))
    assert model.step_ms(shape) == pytest.approx(truth_ms(shape), rel=0.1)


durations = st.floats(1e-3, 1e6)
counts = st.floats(0, 1e6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(counts, counts, counts, counts, durations), min_size=1, max_size=60))
def test_whatever_it_saw_it_is_monotone_and_never_negative(
    samples: list[tuple[float, float, float, float, float]],
) -> None:
    model = StepModel()
    for *sizes, duration_ms in samples:
        model.observe(StepShape(*sizes), duration_ms)
    base = StepShape(100, 1e4, 4, 1e4)
    assert model.step_ms(base) >= 0
    for larger in (
        StepShape(200, 1e4, 4, 1e4),
        StepShape(100, 1e6, 4, 1e4),
        StepShape(100, 1e4, 9, 1e4),
        StepShape(100, 1e4, 4, 1e6),
    ):
        assert model.step_ms(larger) >= model.step_ms(base)


@pytest.mark.parametrize("duration", [0.0, -1.0, math.inf, math.nan])
def test_impossible_durations_are_ignored(duration: float) -> None:
    model = StepModel()
    model.observe(StepShape(100, 5000), duration)
    assert model.quality().num_samples == 0


def test_fits_of_two_observers_add_up() -> None:
    random = Random(4)
    samples = [random_shape(random) for _ in range(800)]
    whole, left, right = StepModel(), StepModel(), StepModel()
    for number, shape in enumerate(samples):
        whole.observe(shape, truth_ms(shape))
        (left if number % 2 else right).observe(shape, truth_ms(shape))
    left.merge(right.state())
    assert median_error(left, random) < 0.02
    with pytest.raises(ValueError, match="2 features"):
        left.merge(NonNegativeFit((1.0, 1.0)).state())


def timing(shape: StepShape, duration_ms: float) -> StepTiming:
    return StepTiming(
        int(shape.prefill_tokens),
        int(shape.prefill_pairs),
        int(shape.decode_sequences),
        int(shape.decode_context_tokens),
        duration_ms,
    )


def test_a_slow_worker_is_believed_late_and_a_noisy_one_never() -> None:
    random = Random(5)
    model = PerfModel()
    for _ in range(3000):
        shape = random_shape(random)
        model.observe_step("gpu", "normal-1", timing(shape, truth_ms(shape)))
        model.observe_step("gpu", "normal-2", timing(shape, truth_ms(shape) * math.exp(random.gauss(0, 0.2))))
    for _ in range(20):
        shape = random_shape(random)
        model.observe_step("gpu", "slow", timing(shape, 2 * truth_ms(shape)))
    assert model.worker_factor("slow") == 1.0, "twenty samples are no evidence"
    for _ in range(4000):
        shape = random_shape(random)
        model.observe_step("gpu", "slow", timing(shape, 2 * truth_ms(shape)))
        model.observe_step("gpu", "normal-1", timing(shape, truth_ms(shape)))
    assert model.worker_factor("slow") > 1.1
    assert model.worker_factor("slow") > model.worker_factor("normal-1")
    assert model.disagreement() > 0.05
    model.forget_worker("slow")
    assert model.worker_factor("slow") == 1.0


def test_links_learn_latency_and_bandwidth() -> None:
    model = PerfModel()
    assert model.transfer_ms("unknown", 10**9) == 0.0
    model.believe_link("tcp", latency_ms=1.0, bytes_per_s=1e9)
    assert model.transfer_ms("tcp", 10**9) == pytest.approx(1001, rel=0.05)
    random = Random(6)
    for _ in range(500):
        size = random.randint(10**4, 10**8)
        model.observe_transfer("tcp", size, 0.2 + size / 5e9 * 1e3)
    assert model.transfer_ms("tcp", 10**8) == pytest.approx(20.2, rel=0.1)


def test_prefill_is_the_sum_of_its_chunks() -> None:
    random = Random(7)
    model = StepModel()
    for _ in range(2000):
        shape = random_shape(random)
        model.observe(shape, truth_ms(shape))
    assert model.prefill_ms(0) == 0.0
    whole = model.prefill_ms(4096, 1000, chunk_tokens=1024)
    parts = sum(model.prefill_ms(1024, 1000 + 1024 * chunk) for chunk in range(4))
    assert whole == pytest.approx(parts, rel=1e-3)


def test_state_survives_the_wire() -> None:
    random = Random(8)
    model = PerfModel()
    for _ in range(500):
        shape = random_shape(random)
        model.observe_step("gpu", "w", timing(shape, truth_ms(shape)))
    model.believe_link("shm", 0.1, 1e10)
    copy = PerfModel()
    copy.merge(model.state())
    shape = StepShape(500, 125_000, 3, 3000)
    assert copy.steps("gpu").step_ms(shape) == pytest.approx(model.steps("gpu").step_ms(shape), rel=1e-3)
    assert copy.transfer_ms("shm", 10**9) == pytest.approx(model.transfer_ms("shm", 10**9), rel=1e-3)


def test_one_tripled_step_in_twenty_hardly_moves_it() -> None:
    random = Random(1)
    model = StepModel()
    for _ in range(2000):
        shape = random_shape(random)
        model.observe(shape, truth_ms(shape) * (3.0 if random.random() < 0.05 else 1.0))
    assert median_error(model, random) < 0.005
