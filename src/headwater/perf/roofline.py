"""What a step should take on named hardware, from arithmetic alone: the prior of the time model.

A step computes 2 FLOPs per weight and token plus attention, and reads all weights once plus the KV it attends to. Its
time is the larger of the two at the efficiencies real engines reach, plus launch overhead and, with tensor
parallelism, two all-reduces per layer. Peak figures are the vendors' dense ones. Efficiencies (0.55 of peak
arithmetic for prefill, 0.75 of peak bandwidth) are the usual ones of tuned engines; they are a start, measured steps
replace them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from headwater.errors import ConfigError
from headwater.perf.prior import StepPredictor as StepPredictor
from headwater.perf.shape import StepShape

_COMPUTE_EFFICIENCY = 0.55
_MEMORY_EFFICIENCY = 0.75
_LINK_EFFICIENCY = 0.7
_STEP_OVERHEAD_MS = 1.5
_ALL_REDUCE_LATENCY_MS = 0.008


@dataclass(frozen=True, slots=True)
class Device:
    """Peak figures of one accelerator (or CPU core)."""

    tflops_16bit: float
    tflops_8bit: float
    memory_gb_per_s: float
    memory_gib: float
    link_gb_per_s: float
    """Per direction, to its neighbours in the node."""


DEVICES: dict[str, Device] = {
    "a100-sxm": Device(312, 624, 2039, 80, 300),
    "h100-sxm": Device(989, 1979, 3350, 80, 450),
    "h200-sxm": Device(989, 1979, 4800, 141, 450),
    "b200-sxm": Device(2250, 4500, 8000, 180, 900),
    "gb200": Device(2500, 5000, 8000, 186, 900),
    "l40s": Device(362, 733, 864, 48, 32),
    "l4": Device(121, 242, 300, 24, 32),
    "a10g": Device(70, 140, 600, 24, 32),
    "mi300x": Device(1307, 2615, 5300, 192, 448),
    "cpu-avx2-core": Device(0.1, 0.1, 12, 16, 8),
    "cpu-avx512-core": Device(0.2, 0.2, 16, 16, 8),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What arithmetic needs to know of a dense or mixture-of-experts decoder."""

    num_parameters: float
    """Stored."""
    num_active_parameters: float
    """Used per token."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes


MODELS: dict[str, ModelShape] = {
    "smollm2-135m": ModelShape(134.5e6, 134.5e6, 30, 9, 3, 64, 2.0, 4.0),
    "llama-3.1-8b": ModelShape(8.0e9, 8.0e9, 32, 32, 8, 128),
    "llama-3.1-70b": ModelShape(70.6e9, 70.6e9, 80, 64, 8, 128),
    "llama-3.1-70b-fp8": ModelShape(70.6e9, 70.6e9, 80, 64, 8, 128, 1.0, 1.0),
    "llama-3.1-405b-fp8": ModelShape(405e9, 405e9, 126, 128, 8, 128, 1.0, 1.0),
    "qwen3-32b": ModelShape(32.8e9, 32.8e9, 64, 64, 8, 128),
    "qwen3-32b-fp8": ModelShape(32.8e9, 32.8e9, 64, 64, 8, 128, 1.0, 1.0),
    "gpt-oss-120b": ModelShape(117e9, 5.1e9, 36, 64, 8, 64, 0.53, 2.0),
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model on `tensor_parallel` devices."""

    device: Device
    model: ModelShape
    tensor_parallel: int = 1

    @classmethod
    def named(cls, device: str, model: str, tensor_parallel: int = 1) -> "Roofline":
        """Raises `ConfigError` for a name that is not in the tables."""
        if device not in DEVICES:
            raise ConfigError(f"no figures for the device {device!r}", hint=_known(device, DEVICES))
        if model not in MODELS:
            raise ConfigError(f"no figures for the model {model!r}", hint=_known(model, MODELS))
        return cls(DEVICES[device], MODELS[model], tensor_parallel)

    def step_ms(self, shape: StepShape) -> float:
        """Predicted duration of one step; 0 for an empty one."""
        tokens = shape.prefill_tokens + shape.decode_sequences
        if tokens <= 0:
            return 0.0
        return max(self._compute_ms(shape, tokens), self._memory_ms(shape, tokens)) + self._overhead_ms(tokens)

    def kv_capacity_tokens(self, memory_fraction: float = 0.9) -> int:
        """Tokens of KV that fit beside the weights; 0 if the weights do not."""
        total = self.device.memory_gib * 2**30 * memory_fraction * self.tensor_parallel
        free = total - self.model.num_parameters * self.model.weight_bytes
        return max(0, int(free / self.model.kv_bytes_per_token))

    def _compute_ms(self, shape: StepShape, tokens: float) -> float:
        model = self.model
        pairs = shape.prefill_pairs + shape.decode_context_tokens
        flops = 2 * model.num_active_parameters * tokens
        flops += 4 * pairs * model.num_layers * model.num_heads * model.head_dim
        peak = self.device.tflops_8bit if model.weight_bytes <= 1 else self.device.tflops_16bit
        return flops / (peak * 1e12 * _COMPUTE_EFFICIENCY * self.tensor_parallel) * 1e3

    def _memory_ms(self, shape: StepShape, tokens: float) -> float:
        model = self.model
        # A batch of a mixture of experts touches more experts the larger it is, and in the end all of them.
        touched = min(model.num_parameters, model.num_active_parameters * tokens)
        read = touched * model.weight_bytes + shape.decode_context_tokens * model.kv_bytes_per_token
        return read / (self.device.memory_gb_per_s * 1e9 * _MEMORY_EFFICIENCY * self.tensor_parallel) * 1e3

    def _overhead_ms(self, tokens: float) -> float:
        if self.tensor_parallel == 1:
            return _STEP_OVERHEAD_MS
        moved = 2 * tokens * self.model.num_heads * self.model.head_dim * 2
        per_reduce_ms = moved / (self.device.link_gb_per_s * 1e9 * _LINK_EFFICIENCY) * 1e3 + _ALL_REDUCE_LATENCY_MS
        return _STEP_OVERHEAD_MS + 2 * self.model.num_layers * per_reduce_ms


def prior_samples(steps: StepPredictor, *, max_batched_tokens: int = 8192) -> list[tuple[StepShape, float]]:
    """Steps over the range an engine runs in, with their predicted durations, for `StepModel.believe`."""
    shapes = [StepShape(decode_sequences=n, decode_context_tokens=n * c) for n in (1, 8, 32, 128) for c in (256, 8192)]
    for tokens in (64, 512, 2048, max_batched_tokens):
        for context in (tokens / 2, 8 * tokens):
            shapes.append(StepShape(tokens, tokens * context))
            shapes.append(StepShape(tokens, tokens * context, 16, 16 * 2048))
    return [(shape, steps.step_ms(shape)) for shape in shapes]


def _known(name: str, table: Iterable[str]) -> str:
    names = sorted(table)
    close = get_close_matches(name, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(names)}"
