"""What a store knows about a block beside its bytes."""

from typing import Annotated, NamedTuple

import msgspec

MAX_PAYLOAD_BYTES = 1 << 30
MAX_PARTS = 1 << 12

Label = Annotated[str, msgspec.Meta(max_length=256)]


class Family(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that are alike: one size, one owner. Ids already bind all of it (`headwater.kv.identity`); it is kept
    beside them to clear, count and limit by."""

    model: Label
    """Fingerprint of the model."""
    layout: Label
    """KV dtype, layout and shard: what makes the bytes exchangeable."""
    tenant: Label
    """Empty when blocks are shared by all."""
    payload_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAYLOAD_BYTES)]
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)] = 1
    """Blocks of this size in which what a model keeps of the same tokens is stored."""
    beside: bool = False
    """Whether these are parts beside the first, which stands for all of them: nobody is told what there is of these."""

    def matches(self, tenant: str | None, model: str | None) -> bool:
        """Whether it is of that tenant and that model; None is any."""
        return tenant in (None, self.tenant) and model in (None, self.model)


class Block(NamedTuple):
    """One committed block, without its bytes."""

    id: bytes
    parent: bytes
    """Id of the block before it; 16 zero bytes at the start of a chain."""
    position: int
    """How many blocks come before it."""
    checksum: int
    """See `headwater.kv.checksum`: it travels with the block from tier to tier."""


ROOT = bytes(16)
"""The parent of the first block of a chain."""
