"""Which blocks a request is made of."""

from dataclasses import dataclass

from headwater.kv.block import ROOT, Family
from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.node.store import Piece
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest
from headwater.types import TOKEN_ID_BYTES


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The full blocks of a request as it arrived."""

    chain: Piece
    """From the start on."""
    num_tokens: int
    block_tokens: int

    @property
    def usable(self) -> int:
        """How many of them can save computing: at least one token is left to compute, since its logits are wanted."""
        return min(self.chain.num_blocks, (self.num_tokens - 1) // self.block_tokens)


class Chains:
    """Names the blocks of requests to one model."""

    def __init__(self, card: ModelCard, block_bytes: int) -> None:
        self.block_tokens = card.block_size
        self._model, self._layout = card.fingerprint, card.kv_layout
        self._block_bytes = block_bytes
        self._namespace = namespace(card.fingerprint, card.kv_layout)

    def of(self, request: EngineRequest) -> RequestBlocks:
        num_tokens = (len(request.prompt) + len(request.resumed_tokens)) // TOKEN_ID_BYTES
        ids = request.block_ids
        if request.resumed_tokens or not ids:
            tokens = request.prompt + request.resumed_tokens
            ids = chain_block_ids(request.namespace or self._namespace, tokens, self.block_tokens)
        family = Family(self._model, self._layout, request.tenant, self._block_bytes)
        return RequestBlocks(Piece(family, ids, 0, ROOT), num_tokens, self.block_tokens)
