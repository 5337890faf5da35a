"""Matrix products: torch's own, and fbgemm's with 16-bit weights and float32 sums for a CPU without our kernels."""

from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, in] -> [T, out]"""

LARGEST_FP16: Final = 65504.0


class DenseLinear:
    """Weights in the arithmetic type."""

    __slots__ = ("_bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self._bias)


class HalfLinear:
    """fbgemm: float16 weights, float32 activations and sums. Half the bytes of float32 per decode step."""

    __slots__ = ("_packed",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


def has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def fits_fp16(weight: torch.Tensor) -> bool:
    """Whether float16 can hold the weights: what is too small for it is lost harmlessly, what is too large is not."""
    return bool(weight.abs().max() <= LARGEST_FP16)
