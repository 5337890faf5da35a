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
    assert model.peers("gpu").factor("slow") == 1.0, "twenty samples are no evidence"
    for _ in range(4000):
        shape = random_shape(random)
        model.observe_step("gpu", "slow", timing(shape, 2 * truth_ms(shape)))
        model.observe_step("gpu", "normal-1", timing(shape, truth_ms(shape)))
    assert model.peers("gpu").factor("slow") > 1.1
    assert model.peers("gpu").factor("slow") > model.peers("gpu").factor("normal-1")
    assert model.peers("gpu").disagreement() < 0.05, "one of three is not the rule"
    model.forget_worker("gpu", "slow")
    assert model.peers("gpu").factor("slow") == 1.0


def test_links_learn_latency_and_bandwidth() -> None:
    model = PerfModel()
    assert model.transfer_ms("unknown", 10**9) == 0.0
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
    for size in (10**5, 10**6, 10**8):
        model.observe_transfer("shm", size, 0.1 + size / 1e10 * 1e3)
    copy = PerfModel()
    copy.merge(model.state())
    assert model.transfer_ms("shm", 10**9) > 0
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


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.3, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_one_liar_of_eight_is_outvoted_also_when_it_speaks_first(seed: int, factor: float) -> None:
    random = Random(seed)
    model = StepModel()
    for number in range(2000):
        shape = random_shape(random)
        model.observe(shape, truth_ms(shape) * (1.0 if number % 8 else factor))
    assert median_error(model, random) < 0.03


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.3])
def test_steps_measured_far_too_short_hardly_move_it(factor: float) -> None:
    random = Random(9)
    model = StepModel()
    for _ in range(2000):
        shape = random_shape(random)
        model.observe(shape, truth_ms(shape) * (factor if random.random() < 0.05 else 1.0))
    assert median_error(model, random) < 0.01


def test_a_worker_that_reports_a_tenth_of_its_times_neither_moves_the_class_nor_widens_the_band() -> None:
    random = Random(10)
    model = PerfModel()
    for _ in range(1000):
        for worker in range(8):
            shape = random_shape(random)
            model.observe_step("gpu", f"w{worker}", timing(shape, truth_ms(shape) * (0.1 if worker == 0 else 1.0)))
    assert median_error(model.steps("gpu"), random) < 0.02
    assert model.peers("gpu").disagreement() < 0.01
    assert [model.peers("gpu").factor(f"w{worker}") for worker in range(1, 8)] == [1.0] * 7


def test_workers_that_are_apart_in_halves_widen_the_band_by_as_much() -> None:
    random = Random(11)
    model = PerfModel()
    for _ in range(1000):
        for worker in range(8):
            shape = random_shape(random)
            model.observe_step("gpu", f"w{worker}", timing(shape, truth_ms(shape) * (1.1 if worker % 2 else 0.9)))
    assert model.peers("gpu").disagreement() == pytest.approx(0.1, rel=0.2)


def test_fading_for_long_changes_nothing_but_what_is_remembered() -> None:
    """Sums are rescaled when the weight of a sample has grown out of bounds."""
    random = Random(12)
    fit = NonNegativeFit((1.0, 1.0), half_life=5.0)
    for _ in range(400):
        size = random.uniform(0, 10)
        fit.observe((1.0, size), 3.0 + 2.0 * size)
    assert fit.coefficients == pytest.approx((3.0, 2.0), rel=1e-3)
    assert fit.num_samples == pytest.approx(1 / (1 - 0.5**0.2), rel=0.01)
    assert fit.state().weight == pytest.approx(fit.num_samples)


def test_a_liar_that_speaks_first_and_most_is_outvoted_by_workers() -> None:
    """Half of all samples are its own, and for a while all of them."""
    random = Random(13)
    model = PerfModel()
    for number in range(6000):
        worker = 0 if number < 200 or number % 2 else random.randrange(1, 8)
        shape = random_shape(random)
        model.observe_step("gpu", f"w{worker}", timing(shape, truth_ms(shape) * (1.0 if worker else 0.1)))
    assert median_error(model.steps("gpu"), random) < 0.03
    assert model.peers("gpu").is_odd("w0")
    assert [model.peers("gpu").factor(f"w{worker}") for worker in range(8)] == [1.0] * 8


def test_when_all_workers_change_the_model_starts_over() -> None:
    random = Random(14)
    model = PerfModel()
    for speed, samples in ((1.0, 2000), (5.0, 400)):
        for number in range(samples):
            shape = random_shape(random)
            model.observe_step("gpu", f"w{number % 4}", timing(shape, speed * truth_ms(shape)))
    shape = StepShape(0, 0, 16, 64_000)
    assert model.steps("gpu").step_ms(shape) == pytest.approx(5 * truth_ms(shape), rel=0.05)


def test_of_two_workers_neither_is_the_odd_one() -> None:
    random = Random(15)
    model = PerfModel()
    for number in range(1000):
        shape = random_shape(random)
        model.observe_step("gpu", f"w{number % 2}", timing(shape, truth_ms(shape) * (1 + number % 2)))
    assert not model.peers("gpu").is_odd("w0")
    assert not model.peers("gpu").is_odd("w1")


def test_an_engine_whose_prefill_is_far_slower_than_usual_is_known_after_a_few_steps() -> None:
    """Of a CPU: 2 ms a prompt token, 12 ms a decode step; nine of ten steps decode."""
    model = StepModel()
    for number in range(40):
        prefill = 60 + number if number % 10 == 0 else 0
        shape = StepShape(prefill, prefill * prefill / 2, 1, 100)
        model.observe(shape, 12.0 + 2.0 * prefill)
    assert model.step_ms(StepShape(0, 0, 1, 100)) == pytest.approx(12.0, rel=0.1)
    assert model.step_ms(StepShape(80, 3200, 1, 100)) == pytest.approx(172.0, rel=0.2)
    assert model.prefill_ms(3000, chunk_tokens=512) > 1000.0
