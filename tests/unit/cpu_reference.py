"""Random checkpoints and a plain float64 decoder to hold the CPU backend against."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from headwater.engines.native.base import FlatBatch, NativeModelConfig, RopeConfig
from headwater.engines.native.cpu.layout import model_plan
from headwater.engines.native.rope import rope_tables

SMALL = NativeModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


class RandomCheckpoint:
    """Seeded normal weights; norms lie around one."""

    def __init__(self, config: NativeModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.config = config
        self.fingerprint = sha256(repr((config, dtype, seed)).encode()).hexdigest()
        self.reads = 0
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        for plan in model_plan(config):
            for name, rows in plan.sources:
                shape = (rows,) if plan.inputs is None else (rows, plan.inputs)
                values = torch.randn(shape, generator=generator)
                self.tensors[name] = (1 + 0.1 * values if "norm" in name else 0.1 * values).to(dtype)

    def names(self) -> Iterable[str]:
        return self.tensors

    def tensor(self, name: str) -> torch.Tensor:
        self.reads += 1
        return self.tensors[name]


def small(**changes: Any) -> NativeModelConfig:
    return replace(SMALL, **changes)


def flat_batch(
    parts: Sequence[tuple[Sequence[int], int]], tables: Sequence[Sequence[int]], rows: Sequence[int] | None = None
) -> FlatBatch:
    """`parts`: (token ids, first position) of each sequence; logits of all rows unless `rows` says which."""
    lengths = [len(ids) for ids, _ in parts]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    width = max(len(table) for table in tables)
    return FlatBatch(
        token_ids=np.concatenate([np.asarray(ids, np.int32) for ids, _ in parts]),
        positions=np.concatenate([np.arange(first, first + len(ids), dtype=np.int32) for ids, first in parts]),
        query_starts=starts,
        context_lens=np.array([first + len(ids) for ids, first in parts], np.int32),
        block_tables=np.array([[*table, *[0] * (width - len(table))] for table in tables], np.int32),
        logit_rows=np.array(range(starts[-1]) if rows is None else rows, np.int32),
        num_decode=sum(length == 1 for length in lengths),
    )


def reference_logits(
    checkpoint: RandomCheckpoint, ids: Sequence[int], dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Logits of every position of one sequence, computed plainly."""
    config, length = checkpoint.config, len(ids)
    cos, sin = (torch.tensor(table[:length]).to(dtype) for table in rope_tables(config, config.max_position_embeddings))

    def weight(name: str) -> torch.Tensor:
        return checkpoint.tensors[name].to(dtype)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = weight(f"{name}.bias") if f"{name}.bias" in checkpoint.tensors else None
        return F.linear(x, weight(f"{name}.weight"), bias)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight(f"{name}.weight")

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    x = weight("model.embed_tokens.weight")[torch.tensor(ids)]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            linear(normed, f"{layer}.self_attn.{part}_proj").view(length, -1, config.head_dim).transpose(0, 1)
            for part in "qkv"
        )
        if config.qk_norm:
            q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
        mixed = attention(rotate(q), rotate(k), v, window_of(config, index))
        x = x + linear(mixed.transpose(0, 1).reshape(length, -1), f"{layer}.self_attn.o_proj")
        normed = norm(x, f"{layer}.post_attention_layernorm")
        inner = F.silu(linear(normed, f"{layer}.mlp.gate_proj")) * linear(normed, f"{layer}.mlp.up_proj")
        x = x + linear(inner, f"{layer}.mlp.down_proj")
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return F.linear(norm(x, "model.norm"), weight(head))


def window_of(config: NativeModelConfig, layer: int) -> int | None:
    applies = not config.sliding_layers or config.sliding_layers[layer]
    return config.sliding_window if applies else None


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention over [heads, length, head_dim], KV heads repeated."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    index = torch.arange(q.shape[1])
    seen = index[None, :] <= index[:, None]
    if window is not None:
        seen &= index[None, :] > index[:, None] - window
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v
