"""`PagedAttention` by our Triton kernels. Tile sizes are fixed, never tuned at run time: results must not depend on it.

Decode batches are cut into stretches of the context so that few sequences still fill a GPU; everything else takes
whole rows. The kernels have run in Triton's interpreter only, not on a GPU.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from headwater.engines.native.base import FlatBatch, NativeModelConfig
from headwater.engines.native.torch_backend import triton_kernels
from headwater.engines.native.torch_backend.batch import DeviceBatch

_TILE_ROWS: Final = 64
_LEAST_ROWS: Final = 16
"""Smallest tile of a matrix product on the device."""
_KEYS: Final = 64
_SPLIT: Final = 512


@dataclass(frozen=True, slots=True)
class _Tiles:
    sequences: torch.Tensor
    rows: torch.Tensor


class TritonAttention:
    """Works on CUDA, and on a CPU under TRITON_INTERPRET=1."""

    def __init__(self, config: NativeModelConfig, block_size: int) -> None:
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._dim = config.head_dim
        self._dim_pad = max(16, _power_of_two(config.head_dim))
        self._group = self._heads // self._kv_heads
        self._group_pad = _power_of_two(self._group)
        self._block_size = block_size
        self._rows_per_tile = max(1, _TILE_ROWS // self._group_pad)
        self._batch: DeviceBatch | None = None
        self._tiles: _Tiles | None = None
        self._num_splits = 1

    def plan(self, host: FlatBatch, batch: DeviceBatch) -> None:
        if host.num_decode == len(host.context_lens):
            self.plan_decode(batch, int(host.context_lens.max(initial=1)))
        else:
            self._batch = batch
            self._tiles = _tiles(host, self._rows_per_tile, batch.query_starts.device)

    def plan_decode(self, batch: DeviceBatch, longest_context: int) -> None:
        """One row per sequence. Needs nothing of the host, so that a captured graph may run with other lengths."""
        self._batch = batch
        self._tiles = None
        self._num_splits = -(-longest_context // _SPLIT)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
        query = query.contiguous()
        if self._tiles is None:
            return self._decode(query, keys, values, window)
        return self._whole(query, keys, values, window, self._tiles)

    def _whole(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int, tiles: _Tiles
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        out = torch.empty_like(query)
        triton_kernels.attend_whole[(len(tiles.rows), self._kv_heads)](
            out, query, keys, values, tiles.sequences, tiles.rows, batch.query_starts, batch.context_lens,
            batch.block_tables, self._dim**-0.5, window, out.stride(0), query.stride(0), batch.block_tables.stride(0),
            keys.stride(0), keys.stride(1), keys.stride(2),
            ROWS=max(_LEAST_ROWS, self._rows_per_tile * self._group_pad), KEYS=_KEYS, **self._shape(),
        )  # fmt: skip
        return out

    def _decode(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        sequences, splits = len(query), self._num_splits
        out = torch.empty_like(query)
        partial = query.new_empty((sequences, self._heads, splits, self._dim_pad), dtype=torch.float32)
        stats = query.new_empty((sequences, self._heads, splits, 2), dtype=torch.float32)
        triton_kernels.attend_split[(sequences, self._kv_heads, splits)](
            partial, stats, query, keys, values, batch.context_lens, batch.block_tables, self._dim**-0.5, window,
            query.stride(0), batch.block_tables.stride(0), keys.stride(0), keys.stride(1), keys.stride(2), splits,
            ROWS=max(_LEAST_ROWS, self._group_pad), KEYS=_KEYS, SPLIT=_SPLIT, **self._shape(),
        )  # fmt: skip
        triton_kernels.join_splits[(sequences, self._heads)](
            out, partial, stats, batch.context_lens, window, out.stride(0), splits, self._heads,
            KEYS=_KEYS, SPLIT=_SPLIT, DIM=self._dim, DIM_PAD=self._dim_pad,
        )  # fmt: skip
        return out

    def _shape(self) -> dict[str, int]:
        return {
            "GROUP": self._group,
            "GROUP_PAD": self._group_pad,
            "DIM": self._dim,
            "DIM_PAD": self._dim_pad,
            "BLOCK": self._block_size,
        }


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _tiles(host: FlatBatch, rows_per_tile: int, device: torch.device) -> _Tiles:
    """Cut each sequence's rows into tiles."""
    counts = -(-np.diff(host.query_starts) // rows_per_tile)
    sequences = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    rows = ((np.arange(len(sequences)) - firsts) * rows_per_tile).astype(np.int32)
    return _Tiles(torch.from_numpy(sequences).to(device), torch.from_numpy(rows).to(device))
