"""Contracts inside the native engine: checkpoint -> backend -> logits.

    checkpoint (safetensors | gguf)  names and tensors under their Hugging Face names
    backend    (cpu | torch)         owns weights and KV storage, computes one flat batch
    runner                           turns a `StepPlan` into a `FlatBatch`, samples from the logits

KV storage is block-first: one block is one contiguous run over all layers, so that transfer, offload and checksums
handle one run per block.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.engines.base import KvMemory


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind`: default, linear, dynamic, yarn, llama3, longrope; `parameters`: as in config.json.

    Kind `divisors` (from GGUF) carries one explicit divisor per frequency.
    """

    theta: float = 10_000.0
    kind: str = "default"
    parameters: tuple[tuple[str, float | tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class NativeModelConfig:
    """A dense decoder of the Llama, Qwen2, Qwen3 or Mistral family, whatever file it came from."""

    architecture: str
    """Hugging Face class name, e.g. `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    """Bias on q, k and v (Qwen2)."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation (Qwen3)."""
    sliding_window: int | None = None
    """A query sees the last `sliding_window` positions, its own included, in layers where it applies."""
    sliding_layers: tuple[bool, ...] = ()
    """Per layer, whether the window applies; empty: in all layers when `sliding_window` is set."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "float32"
    """Type the checkpoint was published in."""


class Checkpoint(Protocol):
    """Tensors by Hugging Face name (`model.layers.0.self_attn.q_proj.weight`), read lazily from mapped files."""

    config: NativeModelConfig
    fingerprint: str
    """Hex digest that changes when any weight file does."""

    def names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its stored or dequantised type (f32, f16 or bf16), row-major [out, in]. Raises `ModelError`."""
        ...


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A matrix in codes: value[n, k] = scale[n, k // group] * codes[n, k] + offset[n, k // group].

    Evaluated in float32 and rounded once, that is the value `Checkpoint.tensor` gives, to the last bit.
    """

    codes: NDArray[np.uint8]
    """[N, K], each below 2 ** `bits`."""
    scale: NDArray[np.float32]
    """[N, K / group]"""
    offset: NDArray[np.float32]
    group: int
    bits: int


@runtime_checkable
class QuantisedCheckpoint(Protocol):
    """What a `Checkpoint` also is when its file holds quantised matrices."""

    def quantised(self, name: str) -> QuantisedTensor | None:
        """The matrix as stored; None when it is not quantised, or not in a way that `QuantisedTensor` can say."""
        ...


@dataclass(slots=True)
class FlatBatch:
    """One step's tokens of all sequences, flat. T tokens, S sequences, R rows that need logits.

    Rows of one sequence are consecutive; decodes come first. Token t of sequence s sits at position
    `positions[t]` and its KV goes to block `block_tables[s, positions[t] // block_size]`.
    """

    token_ids: NDArray[np.int32]
    """[T]"""
    positions: NDArray[np.int32]
    """[T]"""
    query_starts: NDArray[np.int32]
    """[S + 1]: rows of sequence s are [query_starts[s], query_starts[s + 1])."""
    context_lens: NDArray[np.int32]
    """[S]: tokens in the cache after this step, i.e. the last position + 1."""
    block_tables: NDArray[np.int32]
    """[S, B]: block numbers, padded with 0."""
    logit_rows: NDArray[np.int32]
    """[R]: rows whose logits are wanted."""
    num_decode: int
    """How many of the S sequences, at the front, have exactly one row."""


class Backend(Protocol):
    """Weights and KV storage on one device, and the forward pass."""

    config: NativeModelConfig
    block_size: int
    num_blocks: int
    kv_layout: str
    """Layout tag, see `ModelCard.kv_layout`."""
    block_bytes: int
    """Bytes of one block over all layers."""
    dtype: torch.dtype
    """Type of activations and KV."""
    batch_invariant: bool
    """Whether a row's logits are the same bits alone, in any batch, chunking or block placement."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Create the KV storage. Called once, before the first `forward`."""
        ...

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """Compute the batch, write its KV and return float32 logits [R, vocab_size], valid until the next call."""
        ...

    def block_view(self, block: int) -> memoryview | torch.Tensor:
        """The bytes of one block: a writable memoryview on CPU, a uint8 tensor on a GPU."""
        ...

    def kv_memory(self) -> KvMemory:
        """All of it, for agents outside the engine."""
        ...

    def close(self) -> None: ...
