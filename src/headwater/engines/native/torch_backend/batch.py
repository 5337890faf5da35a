"""A flat batch on the device, with what every layer needs computed once."""

from dataclasses import dataclass

import numpy as np
import torch

from headwater.engines.native.base import FlatBatch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """`FlatBatch` as tensors. T tokens, S sequences, R logit rows."""

    token_ids: torch.Tensor
    """[T] int32"""
    positions: torch.Tensor
    """[T] int32"""
    blocks: torch.Tensor
    """[T] int64: block each token's KV goes to"""
    offsets: torch.Tensor
    """[T] int64: its place in that block"""
    context_lens: torch.Tensor
    """[S] int32"""
    query_starts: torch.Tensor
    """[S + 1] int32"""
    block_tables: torch.Tensor
    """[S, B] int32"""
    logit_rows: torch.Tensor
    """[R] int64"""


def device_batch(batch: FlatBatch, block_size: int, device: torch.device) -> DeviceBatch:
    """Copy a batch to the device. Copies to a GPU do not wait."""
    sequences = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
    blocks = batch.block_tables[sequences, batch.positions // block_size].astype(np.int64)

    def put(values: "np.typing.NDArray[np.int32] | np.typing.NDArray[np.int64]") -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)

    return DeviceBatch(
        token_ids=put(batch.token_ids),
        positions=put(batch.positions),
        blocks=put(blocks),
        offsets=put((batch.positions % block_size).astype(np.int64)),
        context_lens=put(batch.context_lens),
        query_starts=put(batch.query_starts),
        block_tables=put(batch.block_tables),
        logit_rows=put(batch.logit_rows.astype(np.int64)),
    )
