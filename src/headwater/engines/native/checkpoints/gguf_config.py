"""GGUF metadata -> `NativeModelConfig`, and GGUF tensor names -> Hugging Face names.

GGUF calls Llama and Mistral both `llama` and stores their q and k rows interleaved for its own rotation. Llama 3's
rotary scaling comes as a tensor of divisors, `rope_freqs.weight`.
"""

import re
from dataclasses import dataclass
from typing import Final

from headwater.engines.native.base import NativeModelConfig, RopeConfig
from headwater.engines.native.checkpoints.config import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE
from headwater.errors import ModelError
from headwater.weights.gguf import GgufFile, GgufTensor

_ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_DIVISORS: Final = "rope_freqs.weight"
ROPE_LONG: Final = "rope_factors_long.weight"
ROPE_SHORT: Final = "rope_factors_short.weight"

_PUBLISHED: Final = {"F16": "float16", "BF16": "bfloat16"}
_TOP_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP: Final = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufRope:
    """Rotary settings that GGUF keeps as tensors."""

    divisors: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    short_factor: tuple[float, ...] | None = None


def hugging_face_name(name: str) -> str | None:
    """None for tensors that are not weights (rotary divisors) or not of a supported family."""
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        part = _LAYER_NAMES.get(layer[2])
        return f"model.layers.{layer[1]}.{part}.{layer[3]}" if part else None
    top = _TOP.fullmatch(name)
    part = _TOP_NAMES.get(top[1]) if top else None
    return f"{part}.{top[2]}" if top and part else None


def gguf_config(gguf: GgufFile, tensors: dict[str, GgufTensor], rope: GgufRope) -> NativeModelConfig:
    """`tensors`: of all shards, by GGUF name. Raises `ModelError`."""
    family = gguf.text("general.architecture")
    architecture = _ARCHITECTURES.get(family or "")
    if family is None or architecture is None:
        raise ModelError(f"GGUF architecture {family!r} is not supported (supported: {', '.join(_ARCHITECTURES)})")
    if gguf.integer(f"{family}.expert_count"):
        raise ModelError(f"mixture-of-experts models are not supported ({gguf.path.name})")
    fields = _Fields(gguf, family)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = gguf.integer(f"{family}.attention.key_length") or hidden_size // num_heads
    _check_rotation(gguf, family, head_dim)
    max_positions = fields.integer("context_length", most=MAX_POSITIONS)
    return NativeModelConfig(
        architecture=architecture,
        vocab_size=_shape(gguf, tensors, "token_embd.weight")[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=_short_decimal(fields.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(gguf, family, max_positions, rope),
        max_position_embeddings=max_positions,
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=gguf.integer(f"{family}.attention.sliding_window"),
        torch_dtype=_PUBLISHED.get(tensors["token_embd.weight"].type.name, "float32"),
    )


class _Fields:
    """Required metadata of one family."""

    def __init__(self, gguf: GgufFile, family: str) -> None:
        self._gguf = gguf
        self._family = family

    def integer(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        given = self._gguf.metadata.get(f"{self._family}.{name}", default)
        value = given if isinstance(given, int) and not isinstance(given, bool) else 0
        if not 1 <= value <= most:
            shown = "a list" if isinstance(given, list) else repr(given)
            raise ModelError(f"{self._gguf.path.name}: {self._family}.{name} is {shown}, not a number from 1 to {most}")
        return value

    def number(self, name: str) -> float:
        value = self._gguf.number(f"{self._family}.{name}")
        if value is None:
            raise ModelError(f"{self._gguf.path.name} lacks {self._family}.{name}")
        return value


def _shape(gguf: GgufFile, tensors: dict[str, GgufTensor], name: str) -> tuple[int, ...]:
    if name not in tensors:
        raise ModelError(f"{gguf.path.name} lacks the tensor {name}")
    return tensors[name].shape


def _check_rotation(gguf: GgufFile, family: str, head_dim: int) -> None:
    rotated = gguf.integer(f"{family}.rope.dimension_count") or head_dim
    values = gguf.integer(f"{family}.attention.value_length") or head_dim
    if rotated != head_dim or values != head_dim:
        raise ModelError(f"{gguf.path.name}: heads of {head_dim} with {rotated} rotated and {values} value dimensions")


def _rope(gguf: GgufFile, family: str, max_positions: int, tensors: GgufRope) -> RopeConfig:
    theta = gguf.number(f"{family}.rope.freq_base") or 10_000.0
    kind = gguf.text(f"{family}.rope.scaling.type") or "none"
    factor = gguf.number(f"{family}.rope.scaling.factor") or gguf.number(f"{family}.rope.scale_linear") or 1.0
    original = float(gguf.integer(f"{family}.rope.scaling.original_context_length") or max_positions)
    if tensors.divisors is not None:
        return RopeConfig(theta, "divisors", (("divisors", tensors.divisors),))
    if tensors.long_factor is not None and tensors.short_factor is not None:
        values: dict[str, float | tuple[float, ...]] = {
            "long_factor": tensors.long_factor,
            "short_factor": tensors.short_factor,
            "original_max_position_embeddings": original,
            "attention_factor": gguf.number(f"{family}.rope.scaling.attn_factor") or 1.0,
        }
        return RopeConfig(theta, "longrope", tuple(sorted(values.items())))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", (("factor", factor),))
    if kind == "yarn":
        return RopeConfig(theta, "yarn", (("factor", factor), ("original_max_position_embeddings", original)))
    raise ModelError(f"{gguf.path.name}: rope scaling {kind!r} is not supported (supported: none, linear, yarn)")


def _short_decimal(value: float) -> float:
    """A float32 number as the decimal its author wrote: 9.99999974e-06 -> 1e-05."""
    return float(f"{value:.6g}")
