"""Where a frontend's time model comes from: the name of the hardware, the snapshot of a running worker, its steps."""

from random import Random

import msgspec
import pytest

from headwater.perf.named import expected_steps
from headwater.perf.roofline import Roofline
from headwater.perf.shape import StepShape
from headwater.protocol.cluster import Instance, ModelCard
from headwater.protocol.events import EventSnapshot, LoadReport, StepTiming
from headwater.router.price import StepCosts
from headwater.router.view import ClusterView
from headwater.router.worker import time_class

CARD = ModelCard(
    name="m",
    served_names=["m"],
    fingerprint="f",
    architecture="llama",
    dtype="bfloat16",
    kv_layout="hw1.bf16.l80.h8.d128.b16",
    max_model_len=8192,
    block_size=16,
    vocab_size=100,
    num_parameters=70_600_000_000,
    kv_bytes_per_token=327_680,
)


def worker(worker_id: str, hardware: str, card: ModelCard = CARD) -> Instance:
    return Instance(
        worker_id=worker_id,
        role="both",
        state="ready",
        card=card,
        request_address="",
        event_address="",
        engine="native",
        version=(1, 0),
        max_num_batched_tokens=2048,
        hardware=hardware,
    )


def costs_of(view: ClusterView, worker_id: str) -> StepCosts:
    costs = view.workers[[one.worker_id for one in view.workers].index(worker_id)].costs
    assert costs is not None
    return costs


def truth_ms(timing: StepTiming) -> float:
    ms = 3.0 + 0.05 * timing.num_prefill_tokens + 2e-6 * timing.num_prefill_context_tokens
    return ms + 0.2 * timing.num_decode_sequences + 1e-4 * timing.num_decode_context_tokens


def steps(count: int) -> list[StepTiming]:
    random = Random(1)
    found = []
    for _ in range(count):
        prefill = random.choice([0, random.randint(1, 2048)])
        timing = StepTiming(prefill, prefill * 1000, random.randint(1, 32), random.randint(1, 20_000), 0.0)
        found.append(msgspec.structs.replace(timing, duration_ms=truth_ms(timing)))
    return found


def test_a_named_device_is_priced_by_its_roofline_before_any_step() -> None:
    view = ClusterView()
    view.put(worker("w", "cuda-nvidia-h200"))
    costs = costs_of(view, "w")
    roofline = Roofline.named("h200-sxm", "llama-3.1-70b")
    expected_ms = roofline.step_ms(StepShape(2048, 2048 * 1024))
    assert costs.prefill_ms(2048, 2048 * 1024) == pytest.approx(expected_ms, rel=0.15)
    assert costs.decode_ms(8, 8000) == pytest.approx(roofline.step_ms(StepShape(0, 0, 8, 8000)), rel=0.15)


def test_the_first_steps_correct_the_level_and_keep_the_proportions() -> None:
    view = ClusterView()
    view.put(worker("w", "cuda-nvidia-h200"))
    before = costs_of(view, "w")
    timing = StepTiming(0, 0, 8, 8000, 2 * before.decode_ms(8, 8000))
    view.report("w", LoadReport(1, 0, 0, 10, 9, timings=[timing] * 2))
    after = costs_of(view, "w")
    assert after.decode_ms(8, 8000) == pytest.approx(2 * before.decode_ms(8, 8000), rel=0.05)
    assert after.prefill_ms(2048, 2e6) == pytest.approx(2 * before.prefill_ms(2048, 2e6), rel=0.1)


@pytest.mark.parametrize("hardware", ["", "mocker-1", "cuda-nvidia-unheard-of", "cpu--torch-1t", "x9999999999999"])
def test_unknown_hardware_is_not_guessed_at(hardware: str) -> None:
    view = ClusterView()
    view.put(worker("w", hardware))
    assert view.workers[0].costs is None


@pytest.mark.parametrize(
    "changes", [{"num_parameters": 0}, {"kv_layout": "vllm.bfloat16.b16"}, {"kv_layout": "hw1.l0.h0.d0"}]
)
def test_a_card_that_says_too_little_is_not_guessed_at(changes: dict[str, object]) -> None:
    view = ClusterView()
    view.put(worker("w", "cuda-nvidia-h200", msgspec.structs.replace(CARD, **changes)))
    assert view.workers[0].costs is None


def prefill_ms(hardware: str, card: ModelCard) -> float:
    expected = expected_steps(
        hardware,
        num_parameters=card.num_parameters,
        kv_layout=card.kv_layout,
        dtype=card.dtype,
        kv_bytes_per_token=card.kv_bytes_per_token,
    )
    assert expected is not None
    return expected.step_ms(StepShape(2048, 2048 * 1024))


def test_threads_and_devices_share_the_work() -> None:
    assert prefill_ms("cpu-amd-epyc-avx2-4t", CARD) < 0.3 * prefill_ms("cpu-amd-epyc-avx2-1t", CARD)
    assert prefill_ms("cpu-amd-epyc-avx512vnni-1t", CARD) < prefill_ms("cpu-amd-epyc-avx2-1t", CARD)
    assert prefill_ms("NVIDIA-H100-80GB-HBM3x4", CARD) < 0.5 * prefill_ms("NVIDIA-H100-80GB-HBM3x1", CARD)


def test_a_frontend_that_joins_knows_the_times_from_one_snapshot() -> None:
    view = ClusterView()
    view.put(worker("w", ""))
    view.rebuild(EventSnapshot("w", 1, 0, [], LoadReport(1, 0, 0, 10, 9, timings=steps(256))))
    costs = costs_of(view, "w")
    for timing in steps(20):
        predicted = costs.decode_ms(timing.num_decode_sequences, timing.num_decode_context_tokens)
        if timing.num_prefill_tokens:
            predicted += costs.prefill_ms(timing.num_prefill_tokens, timing.num_prefill_context_tokens) - 3.0
        assert predicted == pytest.approx(timing.duration_ms, rel=0.15)


def test_snapshots_of_a_class_that_is_well_known_teach_nothing() -> None:
    """A thousand workers that are met again after a network failure must not cost a thousand lessons."""
    view = ClusterView()
    view.put(worker("w", ""))
    view.put(worker("other", ""))
    for _ in range(8):
        view.rebuild(EventSnapshot("w", 1, 0, [], LoadReport(1, 0, 0, 10, 9, timings=steps(256))))
    model = view.perf.steps(time_class(worker("w", "")))
    known = model.num_samples
    view.rebuild(EventSnapshot("other", 1, 0, [], LoadReport(1, 0, 0, 10, 9, timings=steps(256))))
    assert model.num_samples == known
