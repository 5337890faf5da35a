"""Small models of every family with random weights, references from transformers, and a driver for backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from headwater.engines.native.base import Backend, Checkpoint, FlatBatch, NativeModelConfig
from headwater.weights import ResolvedModel, resolve

torch.set_num_threads(1)

MAX_POSITIONS = 96
BLOCK_SIZE = 16

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10_000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "rope_theta": 10_000.0,
        "beta_fast": 16.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
        "rope_theta": 500_000.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 40,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
        "rope_theta": 10_000.0,
    },
}

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-sliding": ("Mistral", {"sliding_window": 21}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
    "qwen3-sliding": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A model folder with random weights, and the transformers model that wrote it."""

    folder: Path
    reference: Any
    resolved: ResolvedModel


def build_tiny_model(folder: Path, family: str, rope: str, *, shard_bytes: int | None = None) -> TinyModel:
    """Write config.json, safetensors and a tokenizer.json; `shard_bytes` splits the weights."""
    name, changes = FAMILIES[family]
    sizes = _SIZES | changes | {"rope_parameters": dict(ROPES[rope])}
    if name == "Qwen2":  # its head size follows from the others
        sizes.pop("head_dim")
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(7)
    reference = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    _spread_weights(reference)
    reference.save_pretrained(folder, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return TinyModel(folder, reference, resolve(str(folder), cache=folder / "cache"))


def _spread_weights(model: torch.nn.Module) -> None:
    """The initial weights are so small, and the biases zero, that many mistakes would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(6.0)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level tokenizer without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def reference_of(checkpoint: Checkpoint) -> Any:
    """The transformers model in float32 with exactly the values of a checkpoint."""
    config = checkpoint.config
    name = config.architecture.removesuffix("ForCausalLM")
    with torch.device("meta"):
        model = getattr(transformers, config.architecture)(getattr(transformers, f"{name}Config")(**_fields(config)))
    model = model.to_empty(device="cpu").float()
    weights = {name: checkpoint.tensor(name).float() for name in checkpoint.names()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    rotary = type(model.model.rotary_emb)(model.config)  # its buffers are not in the state
    model.model.rotary_emb = rotary
    return model.eval()


def _fields(config: NativeModelConfig) -> dict[str, Any]:
    rope = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta} | {
        key: list(value) if isinstance(value, tuple) else value for key, value in config.rope.parameters
    }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": rope,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


@torch.inference_mode()
def reference_logits(reference: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position of one sequence, float32 [T, vocab]."""
    logits: torch.Tensor = reference(torch.tensor([list(ids)])).logits[0]
    return logits.float()


@dataclass
class Stream:
    """One sequence inside a `Driver`."""

    blocks: list[int]
    length: int = 0


class Driver:
    """Feeds a backend as an engine would, with blocks handed out in a scattered order."""

    def __init__(self, backend: Backend, num_blocks: int = 64, block_size: int = BLOCK_SIZE) -> None:
        backend.allocate_kv(num_blocks, block_size)
        self.backend = backend
        self._free = np.random.default_rng(3).permutation(num_blocks).tolist()

    def step(self, parts: Sequence[tuple[Stream, Sequence[int]]]) -> list[torch.Tensor]:
        """Append tokens to streams and return the logits of all of them, per stream. Decodes must come first."""
        starts = np.cumsum([0, *(len(ids) for _, ids in parts)]).astype(np.int32)
        positions = [np.arange(stream.length, stream.length + len(ids)) for stream, ids in parts]
        for stream, ids in parts:
            self._grow(stream, stream.length + len(ids))
        width = max(len(stream.blocks) for stream, _ in parts)
        tables = np.zeros((len(parts), width), np.int32)
        for number, (stream, _) in enumerate(parts):
            tables[number, : len(stream.blocks)] = stream.blocks
        batch = FlatBatch(
            token_ids=np.concatenate([np.asarray(ids) for _, ids in parts]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_starts=starts,
            context_lens=np.array([stream.length for stream, _ in parts], np.int32),
            block_tables=tables,
            logit_rows=np.arange(starts[-1], dtype=np.int32),
            num_decode=sum(len(ids) == 1 for _, ids in parts),
        )
        logits = self.backend.forward(batch).clone()
        return [logits[starts[i] : starts[i + 1]] for i in range(len(parts))]

    def run(self, ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Logits of every position of one new sequence, fed at once or in chunks."""
        stream, size = Stream([]), chunk or len(ids)
        return torch.cat([self.step([(stream, ids[i : i + size])])[0] for i in range(0, len(ids), size)])

    def _grow(self, stream: Stream, length: int) -> None:
        stream.length = length
        while len(stream.blocks) * self.backend.block_size < length:
            stream.blocks.append(self._free.pop())


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab_size, count).tolist()


TINY_MODELS = [(family, "default") for family in FAMILIES] + [("llama", rope) for rope in ROPES if rope != "default"]
