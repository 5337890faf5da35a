"""A curve of step times holds what it was fitted to, and the learned model exactly."""

import pytest

from headwater.perf.curve import StepCurve
from headwater.perf.model import StepModel, StepShape
from headwater.perf.roofline import Roofline

SHAPES = [
    StepShape(0, 0, 3, 3 * 700),
    StepShape(0, 0, 90, 90 * 3000),
    StepShape(700, 700 * 350),
    StepShape(5000, 5000 * 2500),
    StepShape(3000, 3000 * 9000),
    StepShape(1500, 1500 * 750, 24, 24 * 2000),
]


@pytest.mark.parametrize(("name", "tensor_parallel"), [("llama-3.1-70b-fp8", 2), ("gpt-oss-120b", 8)])
def test_the_fit_is_close_to_what_it_was_fitted_to(name: str, tensor_parallel: int) -> None:
    roofline = Roofline.named("h200-sxm", name, tensor_parallel)
    curve = StepCurve.fit(roofline)
    errors = [abs(curve.step_ms(shape) / roofline.step_ms(shape) - 1) for shape in SHAPES]
    assert max(errors) < 0.15
    assert sum(errors) / len(errors) < 0.06


def test_what_all_tokens_share_never_falls() -> None:
    curve = StepCurve.fit(Roofline.named("h200-sxm", "llama-3.1-70b-fp8", 1))
    heights = [curve.shared_ms(tokens) for tokens in range(0, 12_000, 50)]
    assert heights == sorted(heights)
    assert heights[0] > 0


def test_the_learned_model_is_a_curve_without_a_bend() -> None:
    learned = StepModel()
    learned.believe(
        [(shape, 5.0 + shape.prefill_tokens * 0.02 + shape.decode_sequences * 0.1) for shape in SHAPES], 100
    )
    curve = StepCurve.of(learned.coefficients)
    for shape in SHAPES:
        assert curve.step_ms(shape) == pytest.approx(learned.step_ms(shape))


def test_scaling_tells_steps_that_prefill_from_steps_that_decode() -> None:
    curve = StepCurve.fit(Roofline.named("h200-sxm", "llama-3.1-70b-fp8", 2))
    other = curve.scaled(prefill=2.0, decode=0.5)
    decode, prefill = StepShape(0, 0, 64, 64_000), StepShape(8000, 8000 * 4000)
    assert other.step_ms(decode) == pytest.approx(curve.step_ms(decode) * 0.5)
    assert other.step_ms(prefill) == pytest.approx(curve.step_ms(prefill) * 2.0, rel=0.01)


def test_an_empty_step_takes_no_time() -> None:
    assert StepCurve(((0.0, 3.0), (1.0, 3.0))).step_ms(StepShape()) == 0.0
