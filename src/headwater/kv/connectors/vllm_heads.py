"""What a tensor-parallel rank of vLLM has of a slot of the hand-off. Never guesses where the heads are.

A slot holds a block as one rank alone would have it: layer by layer (and kernel block by kernel block, where kernels
take smaller blocks than vLLM manages) a row of all heads of the model. So it means the same at every tensor-parallel
size. A rank has the same part of each row; of ranks with the same head the first one writes it.

vLLM 0.32 shows each layer as [blocks, heads, tokens, content], wherever things lie in memory. That is believed only
where the model's configuration, the specification of the KV cache and the shape of every layer give the same numbers,
and no other axis is as long as that of the heads. Where they do not, a slot holds the blocks of all ranks one after the
other, and its layout is named by their number, so that workers of another size refuse it.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from headwater.errors import ConfigError
from headwater.kv.connectors.vllm_layout import Layout, layout_name, only_spec
from headwater.kv.shards import heads_of, is_first_holder

_log = logging.getLogger(__name__)

_KINDS = ("FullAttentionSpec", "SlidingWindowSpec")
"""By their own names: what is derived from them packs its content in ways of its own."""
_PLAIN = {"num_head_slots": None, "state_content_bytes": None, "page_size_padded": None, "tokens_per_state": 1}
_QUANT_MODES = ("NONE", "FP8_PER_TENSOR")


@dataclass(frozen=True)
class SlotPart:
    """`num_bytes` from `start` on in each of the `num_rows` equal rows of every slot."""

    layout: str
    """Equal names, exchangeable slots."""
    slot_bytes: int
    num_rows: int
    start: int
    num_bytes: int
    writes: bool = True

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """[slots, rows, bytes] of [slots, slot_bytes]."""
        return slots.view(len(slots), self.num_rows, -1)[:, :, self.start : self.start + self.num_bytes]


@dataclass(frozen=True)
class Heads:
    """KV heads of a model all of whose layers have the same."""

    total: int
    """Of the model."""
    here: int
    """Of one rank."""
    block_tokens: int
    token_bytes: int
    """Of one head: keys and values of a token."""
    dtype: torch.dtype
    layout: str
    """What one rank alone would call its blocks."""

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> "Heads":
        """Raises `ConfigError` that says what leaves it open."""
        spec, model = only_spec(kv_cache_config), vllm_config.model_config
        _refuse_packed(spec)
        _refuse_mixed(vllm_config)
        total = model.get_total_num_kv_heads()
        here = len(heads_of(0, vllm_config.parallel_config.tensor_parallel_size, total))
        token_bytes = (spec.head_size + getattr(spec, "head_size_v", spec.head_size)) * spec.dtype.itemsize
        if (spec.num_kv_heads, spec.page_size_bytes) != (here, here * spec.block_size * token_bytes):
            told = f"{spec.num_kv_heads} KV heads and {spec.page_size_bytes} bytes"
            raise ConfigError(
                f"a block of a layer has {told}, by the model it has {here} heads of {token_bytes} a token"
            )
        alone = layout_name(vllm_config, kv_cache_config, replace(spec, num_kv_heads=total))
        return cls(total, here, spec.block_size, token_bytes, spec.dtype, alone)

    def expected(self, num_blocks: int) -> torch.Tensor:
        """A layer as vLLM shows it where kernels take its blocks whole, without memory."""
        shape = num_blocks, self.here, self.block_tokens, self.token_bytes // self.dtype.itemsize
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def kernel_blocks(self, cache: torch.Tensor, num_blocks: int) -> int:
        """In a block of this layer. Raises `ConfigError` unless the second axis can only be that of the heads."""
        pieces = cache.shape[0] // num_blocks
        tokens = self.block_tokens // max(1, pieces)
        content = self.token_bytes // cache.element_size()
        if (
            tuple(cache.shape) != (num_blocks * pieces, self.here, tokens, content)
            or pieces * tokens != self.block_tokens
        ):
            raise ConfigError(f"a layer has the shape {tuple(cache.shape)}")
        if self.here in (tokens, content):
            raise ConfigError(f"of the shape {tuple(cache.shape)} two axes may be that of the {self.here} heads")
        return pieces

    def common_kernel_blocks(self, caches: Iterable[torch.Tensor], num_blocks: int) -> int:
        """In a block of any layer. Raises `ConfigError` also where they differ."""
        found = {self.kernel_blocks(cache, num_blocks) for cache in caches}
        if len(found) != 1:
            raise ConfigError(f"layers are split into {sorted(found)} kernel blocks")
        return found.pop()

    def layout_in(self, pieces: int) -> str:
        """That of blocks of so many kernel blocks."""
        return self.layout if pieces == 1 else f"{self.layout}.k{pieces}"

    def part(self, layout: Layout, rank: int, caches: Iterable[torch.Tensor]) -> SlotPart:
        """Raises `ConfigError` as `kernel_blocks` does."""
        pieces = self.common_kernel_blocks(caches, layout.num_blocks)
        head_bytes = self.block_tokens // pieces * self.token_bytes
        num_rows = layout.block_bytes // (self.here * head_bytes)
        held = heads_of(rank, layout.num_ranks, self.total)
        return SlotPart(
            layout=self.layout_in(pieces),
            slot_bytes=num_rows * self.total * head_bytes,
            num_rows=num_rows,
            start=held.start * head_bytes,
            num_bytes=len(held) * head_bytes,
            writes=is_first_holder(rank, layout.num_ranks, self.total),
        )


def slot_part(
    vllm_config: Any, kv_cache_config: Any, layout: Layout, rank: int, caches: Iterable[torch.Tensor]
) -> SlotPart:
    """That of this rank, by heads if it is certain where they are. `caches`: of all layers, as vLLM shows them."""
    try:
        return Heads.of(vllm_config, kv_cache_config).part(layout, rank, caches)
    except ConfigError as error:
        if not rank:
            level = logging.WARNING if layout.num_ranks > 1 else logging.INFO
            _log.log(level, "KV is handed over at --tensor-parallel-size %d only: %s", layout.num_ranks, error)
    name, num_bytes = f"{layout.name}.tp{layout.num_ranks}", layout.block_bytes
    return SlotPart(name, num_bytes * layout.num_ranks, 1, rank * num_bytes, num_bytes)


def _refuse_packed(spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in _KINDS:
        raise ConfigError(f"the KV cache is a {kind}")
    for name, plain in _PLAIN.items():
        found = getattr(spec, name, "unknown")
        if found != plain:
            raise ConfigError(f"the KV cache has {name} {found}")
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "unknown")
    if mode not in _QUANT_MODES:
        raise ConfigError(f"the KV cache is quantized by {mode}")


def _refuse_mixed(vllm_config: Any) -> None:
    """Where a rank has one head of every layer, the number of heads of a layer does not show."""
    model = vllm_config.model_config
    if model.use_mla:
        raise ConfigError("MLA has no KV heads")
    if vllm_config.speculative_config is not None:
        raise ConfigError("layers of a draft model may have other heads")
    if any("total_num_kv_heads" in layer for layer in model.model_arch_config.per_layer_overrides or ()):
        raise ConfigError("the layers of the model have different numbers of heads")
