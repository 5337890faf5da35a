"""GGUF files for tests, written with the gguf package as llama.cpp's converter would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

TOKENS = ["<unk>", "<s>", "</s>"]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, number, part = module.split(".", 3)
        return f"blk.{number}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows in Llama models: pairs of a head side by side."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_model(path: Path, reference: Any, family: str, **options: Any) -> None:
    """A transformers model as GGUF. `options`: quantise, metadata, extra tensors, vocabulary."""
    config = reference.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if f"{family}.attention.head_count_kv" not in options.get("metadata", {}):
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    add_vocabulary(writer, **options.get("vocabulary", {"tokens": byte_level_tokens()}))
    for key, value in options.get("metadata", {}).items():
        add_value(writer, key, value)
    tied = config.tie_word_embeddings
    for name, value in reference.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        array = value.detach().float().numpy()
        for projection, count in heads.items():
            if family == "llama" and f".{projection}." in name:
                array = interleave(array, count)
        add_tensor(writer, gguf_name(name), np.ascontiguousarray(array), options.get("quantise"))
    for name, array in options.get("tensors", {}).items():
        writer.add_tensor(name, array)
    finish(writer)


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str | None) -> None:
    """Quantise matrices whose rows are whole blocks; the rest stays float32."""
    if kind is None or array.ndim != 2 or array.shape[-1] % 32:
        writer.add_tensor(name, array)
        return
    quantised = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(array, quantised), raw_dtype=quantised)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(value)


def byte_level_tokens() -> list[str]:
    """Three special tokens, all bytes in the byte-level alphabet, and two merged tokens."""
    import tokenizers

    return [*TOKENS, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "th", "Ġth"]


def add_vocabulary(
    writer: gguf.GGUFWriter,
    tokens: list[str],
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    merges: list[str] | None = None,
    kinds: list[int] | None = None,
    scores: list[float] | None = None,
    ids: Mapping[str, int] | None = None,
) -> None:
    """Tokenizer metadata. The first three tokens are special unless `kinds` says otherwise."""
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds if kinds is not None else [3, 3, 3] + [1] * (len(tokens) - 3))
    if model == "gpt2":
        writer.add_token_merges(merges if merges is not None else ["t h", "Ġ th"])
    if scores is not None:
        writer.add_token_scores(scores)
    for name, token_id in (ids or {"bos": 1, "eos": 2}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(path: Path, metadata: Mapping[str, Any] | None = None, **vocabulary: Any) -> None:
    """A GGUF file with a tokenizer and one small tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    add_vocabulary(writer, **({"tokens": byte_level_tokens()} | vocabulary))
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    finish(writer)
