"""The prior: right orders of magnitude, monotone, and close enough for the fit to start from."""

import pytest

from headwater.errors import ConfigError
from headwater.perf.model import StepModel, StepShape
from headwater.perf.roofline import DEVICES, MODELS, Roofline, prior_samples


def test_a_70b_model_on_eight_h200_is_in_the_published_range() -> None:
    roofline = Roofline.named("h200-sxm", "llama-3.1-70b-fp8", 8)
    assert 4 < roofline.step_ms(StepShape(0, 0, 16, 16 * 3000)) < 20
    assert 40 < roofline.step_ms(StepShape(3000, 3000 * 1500)) < 250
    assert 1e6 < roofline.kv_capacity_tokens() < 20e6


def test_weights_that_do_not_fit_leave_no_room() -> None:
    assert Roofline.named("l4", "llama-3.1-70b").kv_capacity_tokens() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_more_work_takes_longer_and_more_devices_are_faster_on_large_prefills(device: str, model: str) -> None:
    one = Roofline.named(device, model)
    assert one.step_ms(StepShape()) == 0
    assert one.step_ms(StepShape(8192, 8192 * 4096)) > one.step_ms(StepShape(512, 512 * 256)) > 0
    assert one.step_ms(StepShape(0, 0, 64, 64 * 8192)) > one.step_ms(StepShape(0, 0, 1, 100))


def test_a_model_that_believes_it_predicts_it() -> None:
    roofline = Roofline.named("h100-sxm", "llama-3.1-8b")
    model = StepModel()
    model.believe(prior_samples(roofline), weight=10)
    for shape in (StepShape(4096, 4096 * 2048), StepShape(0, 0, 16, 16 * 2048), StepShape(1024, 2**20, 8, 8 * 2048)):
        assert model.step_ms(shape) == pytest.approx(roofline.step_ms(shape), rel=0.4)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        Roofline.named("h100", "llama-3.1-8b")
    assert caught.value.hint is not None
    assert "h100-sxm" in caught.value.hint
