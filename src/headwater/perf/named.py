"""What is expected of the step times of a worker, from what it says of itself.

Its class of hardware names a device (`cuda-nvidia-h200`, `cpu-amd-epyc-7763-avx2-4t`), its model card the size of the
model. The answer is a roofline, which knows how the time of a step divides into constants and work much better than it
knows its level. None for what is not in the tables.
"""

import re
from dataclasses import replace

from headwater.perf.prior import StepPredictor
from headwater.perf.roofline import DEVICES, Device, ModelShape, Roofline

_GPUS = {name.split("-")[0]: device for name, device in DEVICES.items() if not name.startswith("cpu-")}
_CPU = re.compile(r"cpu-.*?-?(avx2|avx512)\w*-(\d+)t")
_PARALLEL = re.compile(r"x(\d+)$")
_LAYOUT = re.compile(r"\.l(\d+)\.h(\d+)\.d(\d+)\b")
_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}
_HEADS_PER_KV_HEAD = 4
"""Usual with grouped-query attention; only the attention over long contexts depends on it."""
_MOST_PARALLEL = 1024


def expected_steps(
    hardware: str, *, num_parameters: int, kv_layout: str, dtype: str, kv_bytes_per_token: int
) -> StepPredictor | None:
    """The fields are those of an instance and its model card; any of them may be empty or nonsense."""
    device, parallel = _device(hardware.lower())
    layout = _LAYOUT.search(kv_layout)
    if device is None or layout is None or num_parameters <= 0:
        return None
    num_layers, num_kv_heads, head_dim = (int(number) for number in layout.groups())
    values = 2 * num_layers * num_kv_heads * head_dim
    if not 0 < values < 1 << 32:
        return None
    model = ModelShape(
        num_parameters,
        num_parameters,
        num_layers,
        _HEADS_PER_KV_HEAD * num_kv_heads,
        num_kv_heads,
        head_dim,
        weight_bytes=_DTYPE_BYTES.get(dtype, 2.0),
        kv_bytes=kv_bytes_per_token / values if kv_bytes_per_token > 0 else 2.0,
    )
    return Roofline(device, model, parallel)


def _device(hardware: str) -> tuple[Device | None, int]:
    """The device, and over how many of them the model is spread."""
    cpu = _CPU.match(hardware)
    if cpu is not None:
        isa, threads = cpu.groups()
        core, cores = DEVICES[f"cpu-{isa}-core"], min(_MOST_PARALLEL, max(1, int(threads)))
        together = replace(
            core,
            tflops_16bit=cores * core.tflops_16bit,
            tflops_8bit=cores * core.tflops_8bit,
            memory_gb_per_s=cores * core.memory_gb_per_s,
        )
        return together, 1
    words = re.split(r"[^a-z0-9]+", hardware)
    gpu = next((device for name, device in _GPUS.items() if any(word.startswith(name) for word in words)), None)
    parallel = _PARALLEL.search(hardware)
    return gpu, min(_MOST_PARALLEL, max(1, int(parallel[1]))) if parallel else 1
