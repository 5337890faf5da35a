"""The portable backend: plain torch, on a CPU without a compiler and on CUDA."""

from headwater.engines.native.torch_backend.backend import TorchBackend
from headwater.engines.native.torch_backend.options import TorchOptions

__all__ = ["TorchBackend", "TorchOptions"]
