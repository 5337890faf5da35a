"""The port for attention over paged KV, and the form for a CPU: gather the blocks, then torch's own attention.

Keys and values come as one layer's strided view of block-first storage, [blocks, block_size, kv_heads, head_dim].
"""

from typing import Protocol

import torch
from torch.nn import functional

from headwater.engines.native.base import FlatBatch
from headwater.engines.native.torch_backend.batch import DeviceBatch


class PagedAttention(Protocol):
    """Attention of one step. `plan` once, then `attend` per layer."""

    def plan(self, host: FlatBatch, batch: DeviceBatch) -> None: ...

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
        """`query` [T, heads, head_dim] -> the same shape. `window` 0: full attention."""
        ...


class GatherAttention:
    """Per sequence: copy its keys and values together, mask, and call torch. float32 on a CPU."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._host: FlatBatch | None = None
        self._tables = torch.empty(0)
        self._masks: dict[tuple[int, int], torch.Tensor | None] = {}

    def plan(self, host: FlatBatch, batch: DeviceBatch) -> None:
        self._host = host
        self._tables = batch.block_tables
        self._masks = {}

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
        assert self._host is not None
        out = torch.empty_like(query)
        starts, contexts = self._host.query_starts.tolist(), self._host.context_lens.tolist()
        for sequence, context in enumerate(contexts):
            rows = slice(starts[sequence], starts[sequence + 1])
            out[rows] = self._one(query[rows], keys, values, sequence, (context, window))
        return out

    def _one(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequence: int, span: tuple[int, int]
    ) -> torch.Tensor:
        context, window = span
        first = max(0, context - len(query) - window + 1) if window else 0
        first_block = first // self._block_size
        table = self._tables[sequence, first_block : -(-context // self._block_size)]
        skipped = first_block * self._block_size
        seen = [side[table].flatten(0, 1)[first - skipped : context - skipped] for side in (keys, values)]
        mask = self._mask(sequence, len(query), context, first, window)
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            seen[0].transpose(0, 1)[None],
            seen[1].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def _mask(self, sequence: int, num_rows: int, context: int, first: int, window: int) -> torch.Tensor | None:
        """[rows, keys]; None for a decode, which sees everything that was gathered. The same for all layers."""
        if num_rows == 1:
            return None
        key = (sequence, window)
        if key not in self._masks:
            positions = torch.arange(context - num_rows, context)[:, None]
            seen = torch.arange(first, context)[None, :]
            mask = seen <= positions
            self._masks[key] = mask & (seen > positions - window) if window else mask
        return self._masks[key]
