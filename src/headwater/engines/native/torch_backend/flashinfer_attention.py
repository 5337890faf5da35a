"""`PagedAttention` by FlashInfer. It takes paged keys and values with any block stride, as block-first storage needs.

NOT RUN: there was no GPU to run it on. Written to FlashInfer's documented interface; the conformance tests of the
backend run it where a GPU and the package are found.
"""

import importlib.util
from typing import Any, Final

import numpy as np
import torch

from headwater.engines.native.base import FlatBatch, NativeModelConfig
from headwater.engines.native.torch_backend.batch import DeviceBatch

_WORKSPACE_BYTES: Final = 256 << 20
_HEAD_DIMS: Final = (64, 128, 256)
_DTYPES: Final = (torch.float16, torch.bfloat16)


def fits(config: NativeModelConfig, dtype: torch.dtype) -> bool:
    """Whether FlashInfer is installed and has kernels for these heads and this type."""
    return dtype in _DTYPES and config.head_dim in _HEAD_DIMS and importlib.util.find_spec("flashinfer") is not None


class FlashInferAttention:
    """Plans once per step and kind of window; all batches go through the kernels for appended queries."""

    def __init__(
        self,
        config: NativeModelConfig,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool,
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._deterministic = deterministic
        self._windows = _windows(config)
        self._wrappers = {window: _wrapper(device) for window in self._windows}

    def plan(self, host: FlatBatch, batch: DeviceBatch) -> None:
        counts = -(-host.context_lens // self._block_size)
        used = np.arange(host.block_tables.shape[1])[None, :] < counts[:, None]
        block_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        last_lens = (host.context_lens - (counts - 1) * self._block_size).astype(np.int32)
        blocks = torch.from_numpy(host.block_tables[used]).to(self._device, non_blocking=True)
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                torch.from_numpy(host.query_starts),
                torch.from_numpy(block_starts),
                blocks,
                torch.from_numpy(last_lens),
                self._config.num_heads,
                self._config.num_kv_heads,
                self._config.head_dim,
                self._block_size,
                causal=True,
                window_left=window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                disable_split_kv=self._deterministic,
            )

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
        attended: torch.Tensor = self._wrappers[window].run(query.contiguous(), (keys, values))
        return attended


def _windows(config: NativeModelConfig) -> set[int]:
    """The windows the layers use; 0 is full attention."""
    if config.sliding_window is None:
        return {0}
    applies = config.sliding_layers or (True,) * config.num_layers
    return {config.sliding_window if windowed else 0 for windowed in applies}


def _wrapper(device: torch.device) -> Any:
    import flashinfer

    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
