"""Which tensors a configuration needs, and in which shape: a file is refused before any of it is computed with."""

from collections.abc import Mapping

from headwater.engines.native.base import NativeModelConfig
from headwater.errors import ModelError

Shape = tuple[int, ...]


def expected_shapes(config: NativeModelConfig) -> dict[str, Shape]:
    """Shape by Hugging Face name, row-major [out, in], of every tensor the model is made of."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    layer = _layer_shapes(config)
    for number in range(config.num_layers):
        shapes.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    return shapes


def check_shapes(config: NativeModelConfig, given: Mapping[str, Shape]) -> None:
    """Raises `ModelError` for a missing tensor or one of another shape."""
    for name, shape in expected_shapes(config).items():
        if name not in given:
            raise ModelError(f"the weights lack the tensor {name} that {config.architecture} needs")
        if tuple(given[name]) != shape:
            raise ModelError(f"tensor {name} has shape {list(given[name])}, the configuration asks for {list(shape)}")


def _layer_shapes(config: NativeModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = {
        "self_attn.q_proj": config.attention_bias,
        "self_attn.k_proj": config.attention_bias,
        "self_attn.v_proj": config.attention_bias,
        "self_attn.o_proj": config.attention_output_bias,
        "mlp.gate_proj": config.mlp_bias,
        "mlp.up_proj": config.mlp_bias,
        "mlp.down_proj": config.mlp_bias,
    }
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name, there in biases.items() if there}
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes
