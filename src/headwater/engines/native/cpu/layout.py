"""Which tensors of a checkpoint make up each fused matrix and vector of the kernels."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.engines.native.base import Checkpoint, NativeModelConfig, QuantisedCheckpoint, QuantisedTensor
from headwater.engines.native.cpu.panels import PANEL_ROWS, PanelKind, padded, panel_bytes
from headwater.errors import ModelError


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the prepared file, fused along its rows from tensors of the checkpoint."""

    name: str
    sources: tuple[tuple[str, int], ...]
    """(checkpoint name, rows)."""
    inputs: int | None
    """Columns of a matrix; None for a vector, which is kept in float32."""
    alternating: bool = False
    """Panels of the sources alternate (gate, up) instead of following one another."""

    @property
    def rows(self) -> int:
        return sum(padded(rows) if self.alternating else rows for _, rows in self.sources)

    @property
    def parameters(self) -> int:
        return sum(rows for _, rows in self.sources) * (self.inputs or 1)

    def nbytes(self, kind: PanelKind) -> int:
        return padded(self.rows) * 4 if self.inputs is None else panel_bytes(kind, self.rows, self.inputs)

    def read_quantised(self, checkpoint: Checkpoint) -> QuantisedTensor | None:
        """The fused matrix in codes, if all its sources are quantised."""
        if self.inputs is None or not isinstance(checkpoint, QuantisedCheckpoint):
            return None
        parts = []
        for name, rows in self.sources:
            part = checkpoint.quantised(name)
            if part is None:
                return None
            self._check_shape(name, part.codes.shape, rows)
            parts.append(part)
        group = min(part.group for part in parts)
        bits = 4 if group == 32 and all(part.bits == 4 for part in parts) else 8
        return QuantisedTensor(
            codes=self._fuse([torch.from_numpy(part.codes) for part in parts]).numpy(),
            scale=self._fuse([_per_group(part.scale, part.group // group) for part in parts]).numpy(),
            offset=self._fuse([_per_group(part.offset, part.group // group) for part in parts]).numpy(),
            group=group,
            bits=bits,
        )

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        """The fused tensor. Raises `ModelError` when the checkpoint does not fit its configuration."""
        return self._fuse([self._source(checkpoint, name, rows) for name, rows in self.sources])

    def _fuse(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if not self.alternating:
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        panels = [_pad_rows(part).view(-1, PANEL_ROWS, *part.shape[1:]) for part in parts]
        return torch.stack(panels, dim=1).flatten(0, 2)

    def _source(self, checkpoint: Checkpoint, name: str, rows: int) -> torch.Tensor:
        tensor = checkpoint.tensor(name)
        self._check_shape(name, tuple(tensor.shape), rows)
        return tensor

    def _check_shape(self, name: str, shape: tuple[int, ...], rows: int) -> None:
        expected = (rows,) if self.inputs is None else (rows, self.inputs)
        if shape != expected:
            raise ModelError(f"tensor {name} has shape {shape}; the configuration says {expected}")


def _per_group(parameters: NDArray[np.float32], repeats: int) -> torch.Tensor:
    return torch.from_numpy(np.repeat(parameters, repeats, axis=1))


def _pad_rows(tensor: torch.Tensor) -> torch.Tensor:
    missing = padded(tensor.shape[0]) - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def model_plan(config: NativeModelConfig) -> list[TensorPlan]:
    """Every tensor of the prepared file, in file order."""
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = (("model.embed_tokens.weight", vocab),)
    plans = [TensorPlan("embedding", embedding, hidden)]
    for layer in range(config.num_layers):
        plans.extend(_layer_plan(config, layer))
    plans.append(TensorPlan("final_norm", (("model.norm.weight", hidden),), None))
    if not config.tie_word_embeddings:
        plans.append(TensorPlan("head", (("lm_head.weight", vocab),), hidden))
    return plans


def _layer_plan(config: NativeModelConfig, layer: int) -> Iterator[TensorPlan]:
    source, target = f"model.layers.{layer}.", f"layers.{layer}."
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(name: str, parts: tuple[tuple[str, int], ...], inputs: int, bias: bool) -> Iterator[TensorPlan]:
        alternating = name == "gate_up"
        weights = tuple((f"{source}{part}.weight", rows) for part, rows in parts)
        yield TensorPlan(f"{target}{name}", weights, inputs, alternating)
        if bias:
            biases = tuple((f"{source}{part}.bias", rows) for part, rows in parts)
            yield TensorPlan(f"{target}{name}.bias", biases, None, alternating)

    def norm(name: str, part: str, size: int) -> TensorPlan:
        return TensorPlan(f"{target}{name}", ((f"{source}{part}.weight", size),), None)

    yield norm("attention_norm", "input_layernorm", hidden)
    projections = (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    yield from linear("qkv", projections, hidden, config.attention_bias)
    if config.qk_norm:
        yield norm("q_norm", "self_attn.q_norm", config.head_dim)
        yield norm("k_norm", "self_attn.k_norm", config.head_dim)
    yield from linear("output", (("self_attn.o_proj", hidden),), query, config.attention_output_bias)
    yield norm("mlp_norm", "post_attention_layernorm", hidden)
    yield from linear("gate_up", (("mlp.gate_proj", inner), ("mlp.up_proj", inner)), hidden, config.mlp_bias)
    yield from linear("down", (("mlp.down_proj", hidden),), inner, config.mlp_bias)
