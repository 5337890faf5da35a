"""What the connectors have in common: which store, the ids of a request's blocks, and what is saved after a step."""

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import byteorder

from headwater.kv.block import ROOT, Family
from headwater.kv.identity import chain_block_ids
from headwater.kv.node.address import default_socket
from headwater.kv.node.store import Piece
from headwater.types import BLOCK_ID_BYTES, BlockId

_SOCKET_VARIABLE = "HEADWATER_KV_SOCKET"


def socket_path(given: str | None = None) -> Path:
    """Where `headwater kv serve` listens: as told, as in the environment, or the user's default."""
    named = given or os.environ.get(_SOCKET_VARIABLE)
    return Path(named) if named else default_socket()


@dataclass(frozen=True)
class Save:
    """Blocks that are full after this step."""

    chain: Piece
    block_ids: list[int]


class RequestChain:
    """Ids of the full blocks of a request that grows; each block is hashed once."""

    def __init__(self, family: Family, namespace_key: bytes, block_tokens: int) -> None:
        self._family, self._key, self._block_tokens = family, namespace_key, block_tokens
        self._ids = bytearray()

    def upto(self, tokens: Sequence[int], num_blocks: int) -> Piece:
        """The first blocks of the request, whose tokens begin with those given before."""
        known = len(self._ids) // BLOCK_ID_BYTES
        if known < num_blocks:
            packed = packed_tokens(tokens[known * self._block_tokens : num_blocks * self._block_tokens])
            parent = BlockId(bytes(self._ids[-BLOCK_ID_BYTES:])) if known else None
            self._ids += chain_block_ids(self._key, packed, self._block_tokens, parent=parent)
        return Piece(self._family, bytes(self._ids[: num_blocks * BLOCK_ID_BYTES]), 0, ROOT)


def packed_tokens(tokens: Sequence[int]) -> bytes:
    """As `chain_block_ids` takes them."""
    packed = array("I", tokens)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
