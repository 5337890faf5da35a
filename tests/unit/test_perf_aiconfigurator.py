"""Step times from measured operators: how our steps are told to the package. The tables themselves are optional."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.perf.aiconfigurator import MODELS, SYSTEMS, SiliconSteps
from headwater.perf.model import StepModel, StepShape
from headwater.perf.roofline import DEVICES, prior_samples
from headwater.perf.roofline import MODELS as SHAPES


class Linear:
    """An estimator of the package's form: 1 ms per 100 tokens, per million pairs, and per 1,000 tokens of context."""

    def __init__(self) -> None:
        self.calls = 0

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        self.calls += 1
        new = isl - prefix
        return bs * (new / 100 + new * (prefix + new / 2) / 1e6)

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float:
        self.calls += 1
        return gen_tokens / 100 + gen_tokens * isl / 1000

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int = 0
    ) -> tuple[float, float, float, float]:
        self.calls += 1
        shared = (ctx_tokens + gen_tokens) / 100
        prefill = ctx_tokens * (prefix + (isl - prefix) / 2) / 1e6
        decode = gen_tokens * isl / 1000
        return shared + prefill + decode, shared, prefill, decode


@given(
    tokens=st.integers(0, 8192),
    prefix=st.integers(0, 100_000),
    decodes=st.integers(0, 256),
    context=st.integers(1, 9000),
)
def test_a_step_is_the_sum_of_its_parts_within_the_grid(tokens: int, prefix: int, decodes: int, context: int) -> None:
    shape = StepShape(tokens, tokens * (prefix + (tokens + 1) / 2), decodes, decodes * context)
    expected = (tokens + decodes) / 100 + tokens * (prefix + tokens / 2) / 1e6 + decodes * context / 1000
    assert SiliconSteps(Linear()).step_ms(shape) == pytest.approx(expected, rel=0.07, abs=1e-6)


def test_like_shapes_are_asked_once() -> None:
    estimator = Linear()
    steps = SiliconSteps(estimator)
    for context in range(4000, 4016):
        steps.step_ms(StepShape(0, 0, 32, 32 * context))
    assert estimator.calls <= 2


def test_it_serves_as_a_prior() -> None:
    model = StepModel()
    model.believe(prior_samples(SiliconSteps(Linear())), 50)
    assert model.decode_step_ms(32, 32 * 2048) == pytest.approx(0.32 + 65.5, rel=0.15)


def test_names_are_those_of_the_roofline() -> None:
    assert set(SYSTEMS) <= set(DEVICES)
    assert set(MODELS) <= set(SHAPES)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(ConfigError, match="aiconfigurator-core") as caught:
        SiliconSteps.named("h200-sxm", "llama-3.1-70b-fp8")
    assert "headwater[silicon]" in str(caught.value.hint)


def test_what_is_not_measured_is_refused() -> None:
    pytest.importorskip("aiconfigurator_core")
    with pytest.raises(ConfigError, match="no measurements of smollm2-135m on h200-sxm under vllm"):
        SiliconSteps.named("h200-sxm", "smollm2-135m")


def test_measured_times_grow_with_work() -> None:
    pytest.importorskip("aiconfigurator_core")
    steps = SiliconSteps.named("h200-sxm", "llama-3.1-70b-fp8", 2)
    few, many = (steps.step_ms(StepShape(0, 0, n, n * 2000)) for n in (4, 64))
    assert 5 < few < many < 60
    assert steps.step_ms(StepShape(2048, 2048 * 1024.5)) < steps.step_ms(StepShape(2048, 2048 * 1024.5, 32, 64_000))
