"""Weights as the forward pass wants them: q, k, v in one product, gate and up in one, on the device, in its type."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.engines.base import Progress, ProgressSink
from headwater.engines.native.base import Checkpoint, QuantisedCheckpoint
from headwater.engines.native.torch_backend.linear import DenseLinear, HalfLinear, Linear, fits_fp16, has_fbgemm
from headwater.engines.native.torch_backend.options import LinearKind


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int
    """0: full attention."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole model."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear


def load_weights(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, linear: LinearKind, progress: ProgressSink
) -> ModelWeights:
    """Read, convert and fuse, one layer at a time so that no more than one layer is held twice."""
    loader = _Loader(checkpoint, device, dtype, _uses_fp16(checkpoint, device, linear))
    total = checkpoint.config.num_layers
    layers = []
    for number in range(total):
        layers.append(loader.layer(number))
        progress(Progress("load", number + 1, total, "layers"))
    return ModelWeights(loader.embedding(), tuple(layers), loader.vector("model.norm.weight"), loader.head())


def _uses_fp16(checkpoint: Checkpoint, device: torch.device, linear: LinearKind) -> bool:
    """fp16 products are the default for weights that were published in 16 bits or fewer."""
    if device.type != "cpu" or linear == "float32" or not has_fbgemm():
        return False
    probe = "model.layers.0.mlp.down_proj.weight"
    quantised = isinstance(checkpoint, QuantisedCheckpoint) and checkpoint.quantised(probe) is not None
    stored, published = checkpoint.tensor(probe).dtype, checkpoint.config.torch_dtype
    return linear == "fp16" or quantised or stored != torch.float32 or published != "float32"


class _Loader:
    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, fp16: bool) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._device = device
        self._dtype = dtype
        self._fp16 = fp16

    def vector(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name).to(self._device, self._dtype)

    def embedding(self) -> torch.Tensor:
        """The input embedding, with the values the head computes with when the two are tied."""
        rows = self._checkpoint.tensor("model.embed_tokens.weight")
        if self._fp16 and self._config.tie_word_embeddings and fits_fp16(rows):
            rows = rows.half()
        return rows.to(self._device, self._dtype)

    def head(self) -> Linear:
        tied = self._config.tie_word_embeddings
        return self._linear(["model.embed_tokens" if tied else "lm_head"], bias=False)

    def layer(self, number: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{number}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        windowed = config.sliding_window is not None and (not config.sliding_layers or config.sliding_layers[number])
        return LayerWeights(
            attention_norm=self.vector(prefix + "input_layernorm.weight"),
            qkv=self._linear([attention + part for part in ("q_proj", "k_proj", "v_proj")], config.attention_bias),
            q_norm=self.vector(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=self.vector(attention + "k_norm.weight") if config.qk_norm else None,
            output=self._linear([attention + "o_proj"], config.attention_output_bias),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            gate_up=self._linear([mlp + "gate_proj", mlp + "up_proj"], config.mlp_bias),
            down=self._linear([mlp + "down_proj"], config.mlp_bias),
            window=config.sliding_window if windowed and config.sliding_window is not None else 0,
        )

    def _linear(self, modules: Sequence[str], bias: bool) -> Linear:
        """One product for several modules that share their input."""
        weight = torch.cat([self._checkpoint.tensor(f"{module}.weight") for module in modules])
        offsets = torch.cat([self._checkpoint.tensor(f"{m}.bias").float() for m in modules]) if bias else None
        if self._fp16 and fits_fp16(weight):
            return HalfLinear(weight, offsets)
        placed = offsets.to(self._device, self._dtype) if offsets is not None else None
        return DenseLinear(weight.to(self._device, self._dtype), placed)
