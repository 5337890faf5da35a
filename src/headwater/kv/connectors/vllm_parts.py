"""What a tensor-parallel rank of vLLM keeps of a block in the store: a part per KV head, each a block of its own there.

So engines of any tensor-parallel size find what the others have stored, and each reads and checks just what it needs.
The first part has the block's own id: it is what is looked up, whatever the number of parts. Of ranks with the same
head the first one stores it.

A part is one head of all layers. Where kernels take smaller blocks than vLLM manages, its layout is named by that; only
ranks know, so peers and buckets, which are asked on behalf of the scheduler, are asked in vain then. Where it is not
certain where the heads are (`vllm_heads`), a rank keeps all of its block as one part, which only engines of the same
tensor-parallel size find.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from headwater.errors import ConfigError
from headwater.kv.block import ROOT, Family
from headwater.kv.connectors.vllm_heads import Heads
from headwater.kv.connectors.vllm_layout import Layout, label
from headwater.kv.identity import namespace
from headwater.kv.node.store import Piece
from headwater.kv.shards import heads_of, is_first_holder, part_ids

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """Those of one rank."""

    model: str
    layout: str
    """Equal names, exchangeable parts."""
    part_bytes: int
    count: int
    """Of all ranks."""
    held: range
    """Their numbers, in the order in which they lie in the rank's blocks."""
    writes: bool = True

    def family(self, salt: str) -> Family:
        """Of the first parts."""
        return Family(self.model, self.layout, label(salt), self.part_bytes, self.count)

    def key(self, adapter: str, salt: str, era: str) -> bytes:
        """Of ids. `era` tells the time before a reset of the cache from that after."""
        return namespace(self.model, self.layout, adapter=adapter, salt=f"{era}{salt}")

    def split(self, first: Piece, blocks: torch.Tensor) -> list[tuple[Piece, list[memoryview]]]:
        """Chain and bytes of each part that is held. `first`: the chain of the first parts; `blocks`: a row of host
        memory for each.

        The first comes first: so it is evicted first too, and what is looked up does not outlive what is beside it."""
        rows = blocks.numpy().reshape(len(blocks), len(self.held), -1)
        return [
            (self._chain(first, part), [row.data for row in rows[:, number]]) for number, part in enumerate(self.held)
        ]

    def _chain(self, first: Piece, part: int) -> Piece:
        if not part:
            return first
        parent = ROOT if first.parent == ROOT else part_ids(first.parent, self.layout, part)
        family = msgspec.structs.replace(first.family, beside=True)
        return Piece(family, part_ids(first.ids, self.layout, part), first.first, parent)


def parts_of(
    vllm_config: Any, kv_cache_config: Any, layout: Layout, rank: int, caches: Collection[torch.Tensor] = ()
) -> Parts:
    """`caches`: of all layers, as vLLM shows them. Without, what is to be expected of them: for the scheduler."""
    try:
        heads = Heads.of(vllm_config, kv_cache_config)
        expected = [heads.expected(layout.num_blocks)]
        pieces = heads.common_kernel_blocks(expected, layout.num_blocks)
        if caches:
            pieces = heads.common_kernel_blocks(caches, layout.num_blocks)
    except ConfigError as error:
        if not rank and caches:
            level = logging.WARNING if layout.num_ranks > 1 else logging.INFO
            _log.log(level, "the KV store serves --tensor-parallel-size %d only: %s", layout.num_ranks, error)
        return Parts(
            model=layout.model,
            layout=f"{layout.name}.tp{layout.num_ranks}",
            part_bytes=layout.block_bytes,
            count=layout.num_ranks,
            held=range(rank, rank + 1),
        )
    held = heads_of(rank, layout.num_ranks, heads.total)
    return Parts(
        model=layout.model,
        layout=f"{heads.layout_in(pieces)}.head",
        part_bytes=layout.block_bytes // len(held),
        count=heads.total,
        held=held,
        writes=is_first_holder(rank, layout.num_ranks, heads.total),
    )
