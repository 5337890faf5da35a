"""Choices of the torch backend, checked against the device before anything is loaded."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from headwater.errors import ConfigError

LinearKind = Literal["auto", "float32", "fp16"]


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How to compute. `dtype` None: float32 on a CPU, the checkpoint's 16-bit type (else bfloat16) on CUDA."""

    device: str = "cpu"
    dtype: torch.dtype | None = None
    linear: LinearKind = "auto"
    """CPU only. `fp16`: weights in 16 bits, sums in float32; `auto`: fp16 for checkpoints that are not float32."""
    deterministic: bool = False
    """CUDA only: no TF32, no reduced-precision sums, fixed workspaces, attention unsplit. Equal runs, equal bits."""
    cuda_graphs: bool = True
    max_num_seqs: int = 64
    """Decode steps are captured for batches up to this size."""


def compute_dtype(options: TorchOptions, published: str) -> torch.dtype:
    """The type of activations and KV. Raises `ConfigError` for one the device is not served with."""
    if torch.device(options.device).type == "cpu":
        if options.dtype not in (None, torch.float32):
            raise ConfigError(f"dtype {options.dtype} on a CPU is not supported: 16-bit arithmetic is slower there")
        return torch.float32
    if options.dtype is not None:
        return options.dtype
    return torch.float16 if published == "float16" else torch.bfloat16


def make_deterministic() -> None:
    """Switch CUDA to repeatable sums. Process-wide; must run before the first CUDA call.

    The operators of the forward pass have no other source of chance: no atomic sums, no repeated index is written.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
