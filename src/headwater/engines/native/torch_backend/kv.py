"""Block-first KV storage: one block is one contiguous run over all layers, keys and values.

[blocks, layers, 2, block_size, kv_heads, head_dim]
"""

import torch

from headwater.engines.native.base import NativeModelConfig

_TAGS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class KvStorage:
    """`num_blocks` to hand out, and one spare where padding rows of a captured step write."""

    def __init__(
        self, config: NativeModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks + 1, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        self._blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.spare_block = num_blocks

    @property
    def block_bytes(self) -> int:
        return self._blocks[0].numel() * self._blocks.element_size()

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer: strided views [blocks, block_size, kv_heads, head_dim]."""
        return self._blocks[:, number, 0], self._blocks[:, number, 1]

    def all_bytes(self) -> torch.Tensor:
        """Of the blocks to hand out, in one run."""
        return self._blocks[: self.spare_block].view(-1).view(torch.uint8)

    def block(self, number: int) -> memoryview | torch.Tensor:
        """The bytes of one block, writable."""
        block = self._blocks[number].view(-1).view(torch.uint8)
        return block.numpy().data if block.device.type == "cpu" else block


def kv_layout(config: NativeModelConfig, block_size: int, dtype: torch.dtype) -> str:
    """Tag of this layout: equal tags, exchangeable blocks."""
    heads = f"l{config.num_layers}.h{config.num_kv_heads}.d{config.head_dim}"
    return f"hwt1.{_TAGS[dtype]}.{heads}.b{block_size}"
