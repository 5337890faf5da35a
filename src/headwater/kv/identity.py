"""Block identity: which prefixes are the same.

The id of a full block is BLAKE2b-128, keyed by a namespace, over (id of the block before it, its token ids as
little-endian u32, extra keys). Two requests share a block exactly when they agree on the namespace and on every
token and extra key up to the end of that block. The namespace binds model, KV layout, adapter and tenant, so tenants
never share a block unless they are given the same salt. A partial block has no id.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import cast

from headwater.types import BLOCK_ID_BYTES, TOKEN_ID_BYTES, BlockId

_ROOT = bytes(BLOCK_ID_BYTES)
_NAMESPACE_BYTES = 32


def namespace(fingerprint: str, kv_layout: str, *, adapter: str = "", salt: str = "") -> bytes:
    """Key under which blocks are hashed: 32 bytes. Fields are length-prefixed, so they cannot run together."""
    digest = blake2b(digest_size=_NAMESPACE_BYTES, person=b"hw-namespace")
    for field in (fingerprint, kv_layout, adapter, salt):
        encoded = field.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def chain_block_ids(
    namespace_key: bytes,
    tokens: bytes | bytearray | memoryview,
    block_size: int,
    *,
    parent: BlockId | None = None,
    extra: Mapping[int, Iterable[bytes]] | None = None,
) -> bytes:
    """Ids of all full blocks of `tokens`, 16 bytes each, joined.

    `tokens`: token ids, 4 bytes little-endian each, starting right after the block `parent`. `extra`: for a block
    number (counted from the first block of `tokens`), content hashes to mix in (images, audio).
    """
    stride = block_size * TOKEN_ID_BYTES
    keyed = blake2b(key=namespace_key, digest_size=BLOCK_ID_BYTES)
    view = memoryview(tokens)
    previous: bytes = parent if parent is not None else _ROOT
    ids: list[bytes] = []
    for number, start in enumerate(range(0, len(view) - stride + 1, stride)):
        block = keyed.copy()
        block.update(previous)
        block.update(view[start : start + stride])
        if extra:
            for key in extra.get(number, ()):
                block.update(len(key).to_bytes(4, "little") + key)
        previous = block.digest()
        ids.append(previous)
    return b"".join(ids)


def split_block_ids(joined: bytes) -> list[BlockId]:
    """The single ids of a joined run."""
    ids = [joined[i : i + BLOCK_ID_BYTES] for i in range(0, len(joined), BLOCK_ID_BYTES)]
    return cast(list[BlockId], ids)


def num_shared_blocks(first: bytes | bytearray, second: bytes | bytearray) -> int:
    """Length of the common prefix of two joined chains: ids are chained, so bisection finds it."""
    low, high = 0, min(len(first), len(second)) // BLOCK_ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        piece = slice((middle - 1) * BLOCK_ID_BYTES, middle * BLOCK_ID_BYTES)
        if first[piece] == second[piece]:
            low = middle
        else:
            high = middle - 1
    return low
