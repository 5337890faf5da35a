"""The forward pass of a dense decoder over a flat batch, in plain torch operators. Holds no state."""

import torch
from torch.nn import functional

from headwater.engines.native.base import NativeModelConfig
from headwater.engines.native.torch_backend.attention import PagedAttention
from headwater.engines.native.torch_backend.batch import DeviceBatch
from headwater.engines.native.torch_backend.kv import KvStorage
from headwater.engines.native.torch_backend.weights import LayerWeights, ModelWeights


class Decoder:
    """Weights, rotary tables and the order of operations."""

    def __init__(self, config: NativeModelConfig, weights: ModelWeights, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._config = config
        self._weights = weights
        self._cos = cos
        self._sin = sin

    def logits(self, batch: DeviceBatch, kv: KvStorage, attention: PagedAttention) -> torch.Tensor:
        """Write the batch's KV and return float32 logits of the wanted rows, [R, vocab_size]."""
        x = functional.embedding(batch.token_ids, self._weights.embedding)
        positions = batch.positions.long()
        turn = (self._cos[positions][:, None], self._sin[positions][:, None])
        for number, layer in enumerate(self._weights.layers):
            x = x + self._attention(
                layer, self._norm(x, layer.attention_norm), turn, (batch, kv.layer(number)), attention
            )
            x = x + self._mlp(layer, self._norm(x, layer.mlp_norm))
        wanted = self._norm(x[batch.logit_rows], self._weights.norm)
        return self._weights.head(wanted).float()

    def _attention(
        self,
        layer: LayerWeights,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[DeviceBatch, tuple[torch.Tensor, torch.Tensor]],
        attention: PagedAttention,
    ) -> torch.Tensor:
        config = self._config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        fused = layer.qkv(x).view(len(x), heads + 2 * kv_heads, config.head_dim)
        query, key, value = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        query, key = rotate(query, *turn), rotate(key, *turn)
        batch, (keys, values) = cache
        keys.index_put_((batch.blocks, batch.offsets), key)
        values.index_put_((batch.blocks, batch.offsets), value)
        attended = attention.attend(query, keys, values, layer.window)
        return layer.output(attended.reshape(len(x), -1))

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(functional.silu(gate) * up)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, head_dim] in float32, in the rotate-half convention."""
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)
