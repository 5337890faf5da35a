"""Captured decode steps: one CUDA graph per batch size, replayed instead of thousands of launches.

A graph reads fixed input tensors; a smaller batch is padded with rows of context 0, whose KV goes to a spare block.
Attention inside a graph is our Triton kernel, whose grid covers the longest context.

NOT RUN: there was no GPU. Off a GPU nothing here is constructed.
"""

from typing import Any

import numpy as np
import torch

from headwater.engines.native.base import FlatBatch
from headwater.engines.native.torch_backend.batch import DeviceBatch
from headwater.engines.native.torch_backend.kv import KvStorage
from headwater.engines.native.torch_backend.model import Decoder
from headwater.engines.native.torch_backend.options import TorchOptions
from headwater.engines.native.torch_backend.triton_attention import TritonAttention


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 32 beyond, and `largest` itself."""
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, largest + 1, 32)]
    return sorted({size for size in steps if size < largest} | {largest})


class DecodeGraphs:
    """Captures on construction, largest batch first so that the others share its memory."""

    def __init__(
        self, decoder: Decoder, kv: KvStorage, attention: TritonAttention, shape: tuple[int, int], options: TorchOptions
    ) -> None:
        """`shape`: block size and blocks in the longest table."""
        self._block_size, self._table_blocks = shape
        self._decoder = decoder
        self._kv = kv
        self._attention = attention
        self._sizes = batch_sizes(options.max_num_seqs)
        self._inputs = _inputs(self._sizes[-1], self._table_blocks, kv.spare_block, torch.device(options.device))
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        pool: Any = None
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size, pool)
            pool = self._graphs[size][0].pool()

    def serves(self, batch: FlatBatch) -> bool:
        """Whether the batch is all decode, every row wants logits, and it is not too large."""
        sequences = len(batch.context_lens)
        is_decode = batch.num_decode == sequences == len(batch.token_ids) == len(batch.logit_rows)
        return is_decode and 0 < sequences <= self._sizes[-1] and batch.block_tables.shape[1] <= self._table_blocks

    def replay(self, batch: FlatBatch) -> torch.Tensor:
        used = len(batch.context_lens)
        size = next(size for size in self._sizes if size >= used)
        self._fill(batch, size)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:used]

    def _capture(self, size: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        batch = self.inputs(size)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the first run compiles kernels, which a capture may not
            self.run(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self.run(batch)
        return graph, logits

    def inputs(self, size: int) -> DeviceBatch:
        """The tensors that a graph of this batch size reads."""
        return _first(self._inputs, size)

    def run(self, batch: DeviceBatch) -> torch.Tensor:
        """What is captured."""
        self._attention.plan_decode(batch, self._table_blocks * self._block_size)
        return self._decoder.logits(batch, self._kv, self._attention)

    def _fill(self, batch: FlatBatch, size: int) -> None:
        inputs, used = self._inputs, len(batch.context_lens)
        blocks = batch.block_tables[np.arange(used), batch.positions // self._block_size].astype(np.int64)
        inputs.token_ids[:used].copy_(torch.from_numpy(batch.token_ids), non_blocking=True)
        inputs.positions[:used].copy_(torch.from_numpy(batch.positions), non_blocking=True)
        inputs.blocks[:used].copy_(torch.from_numpy(blocks), non_blocking=True)
        offsets = (batch.positions % self._block_size).astype(np.int64)
        inputs.offsets[:used].copy_(torch.from_numpy(offsets), non_blocking=True)
        inputs.context_lens[:used].copy_(torch.from_numpy(batch.context_lens), non_blocking=True)
        width = batch.block_tables.shape[1]
        inputs.block_tables[:used, :width].copy_(torch.from_numpy(batch.block_tables), non_blocking=True)
        for padding, value in ((inputs.blocks, self._kv.spare_block), (inputs.positions, 0), (inputs.context_lens, 0)):
            padding[used:size].fill_(value)


def _inputs(size: int, table_blocks: int, spare_block: int, device: torch.device) -> DeviceBatch:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DeviceBatch(
        token_ids=zeros(size),
        positions=zeros(size),
        blocks=torch.full((size,), spare_block, dtype=torch.int64, device=device),
        offsets=zeros(size, dtype=torch.int64),
        context_lens=zeros(size),
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        block_tables=zeros(size, table_blocks),
        logit_rows=torch.arange(size, device=device),
    )


def _first(inputs: DeviceBatch, size: int) -> DeviceBatch:
    """The same memory, for a smaller batch."""
    return DeviceBatch(
        token_ids=inputs.token_ids[:size],
        positions=inputs.positions[:size],
        blocks=inputs.blocks[:size],
        offsets=inputs.offsets[:size],
        context_lens=inputs.context_lens[:size],
        query_starts=inputs.query_starts[: size + 1],
        block_tables=inputs.block_tables[:size],
        logit_rows=inputs.logit_rows[:size],
    )
