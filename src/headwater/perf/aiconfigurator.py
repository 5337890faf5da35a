"""Step times from measured GPU operators: the tables of the `aiconfigurator-core` package (extra `silicon`).

The package holds times of single operators (matrix products, attention, collectives) as measured on named GPUs under
vLLM, SGLang and TensorRT-LLM, and adds them up to a model's step. A step of ours is told to it as one prefilling
sequence, with the context its tokens attend to on average, beside equal decoding ones. Answers are rounded to a grid
of shapes and kept, since a look-up takes 0.2 ms and a simulation asks a hundred thousand times.

Refuses models, GPUs and number formats the package has no measurements of.
"""

from functools import lru_cache
from typing import Protocol

from headwater.errors import ConfigError
from headwater.perf.shape import StepShape

SYSTEMS = {
    "a100-sxm": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "b200-sxm": "b200_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
}
"""Our names of GPUs to the package's."""
MODELS: dict[str, tuple[str, str | None, str | None]] = {
    "llama-3.1-8b": ("meta-llama/Meta-Llama-3.1-8B", None, None),
    "llama-3.1-70b": ("meta-llama/Meta-Llama-3.1-70B", None, None),
    "llama-3.1-70b-fp8": ("meta-llama/Meta-Llama-3.1-70B", "fp8", "fp8"),
    "llama-3.1-405b-fp8": ("meta-llama/Meta-Llama-3.1-405B", "fp8", "fp8"),
    "qwen3-32b": ("Qwen/Qwen3-32B", None, None),
    "qwen3-32b-fp8": ("Qwen/Qwen3-32B", "fp8", "fp8"),
    "gpt-oss-120b": ("openai/gpt-oss-120b", None, None),
}
"""Our names of models to the package's, with the formats of weights and KV (None: the model's own)."""
ENGINES = ("vllm", "sglang", "trtllm")

_REMEMBERED = 1 << 16
_GRID_STEPS = 16
"""Between a power of two and the next: rounding changes a shape by 3 % at most."""


class StepEstimator(Protocol):
    """What is used of the package's `EngineHandle`. All times in ms; lengths include the cached prefix."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float: ...

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float: ...

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int = 0
    ) -> tuple[float, float, float, float]:
        """Whole, all but attention, attention of the prefill, attention of the decodes."""
        ...


class SiliconSteps:
    """Predicts steps like `headwater.perf.roofline.Roofline`."""

    def __init__(self, estimator: StepEstimator) -> None:
        self._estimator = estimator
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._estimate)

    @classmethod
    def named(cls, device: str, model: str, tensor_parallel: int = 1, engine: str = "vllm") -> "SiliconSteps":
        """Raises `ConfigError` for what the package does not know, or when it is not installed."""
        try:
            from aiconfigurator_core.sdk.engine import EngineHandle
        except ImportError as error:
            raise ConfigError(
                "measured step times need the package aiconfigurator-core", hint="pip install 'headwater[silicon]'"
            ) from error
        if device not in SYSTEMS or model not in MODELS or engine not in ENGINES:
            raise ConfigError(
                f"no measurements of {model} on {device} under {engine}",
                hint=f"devices: {', '.join(SYSTEMS)}; models: {', '.join(MODELS)}; engines: {', '.join(ENGINES)}",
            )
        name, weights, kv = MODELS[model]
        try:
            handle: StepEstimator = EngineHandle.compile(
                name,
                SYSTEMS[device],
                engine,
                tp_size=tensor_parallel,
                moe_tp_size=tensor_parallel,
                gemm_quant_mode=weights,
                kvcache_quant_mode=kv,
            )
            handle.decode_step_latency(1, 128, 1)
            handle.predict_prefill_latency(1, 128)
        # The package raises whatever its tables raise: for all of it the answer is that it has no figures.
        except (ValueError, KeyError, RuntimeError, OSError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"the package has no figures for {model} on {tensor_parallel} x {device}: {error}"
            ) from error
        return cls(handle)

    def step_ms(self, shape: StepShape) -> float:
        """Predicted duration of one step; 0 for an empty one."""
        prefill = _on_grid(shape.prefill_tokens)
        prefix = _on_grid(shape.prefill_pairs / prefill - (prefill + 1) / 2) if prefill else 0
        decodes = _on_grid(shape.decode_sequences)
        context = _on_grid(shape.decode_context_tokens / shape.decode_sequences) if decodes else 0
        return self._remembered(prefill, prefix, decodes, max(1, context))

    def _estimate(self, prefill: int, prefix: int, decodes: int, context: int) -> float:
        estimator = self._estimator
        if not prefill:
            return estimator.decode_step_latency(decodes, context, 1) if decodes else 0.0
        if not decodes:
            return estimator.predict_prefill_latency(1, prefix + prefill, prefix)
        _, shared_ms, prefill_ms, _ = estimator.mixed_step_breakdown(prefill, decodes, prefix + prefill, 1, prefix)
        *_, decode_ms = estimator.mixed_step_breakdown(prefill, decodes, context, 1)
        return shared_ms + prefill_ms + decode_ms


def _on_grid(value: float) -> int:
    whole = max(0, round(value))
    step = max(1, 1 << max(0, whole.bit_length() - 1)) // _GRID_STEPS or 1
    return round(whole / step) * step
