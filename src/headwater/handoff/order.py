"""The request as a prefill worker gets it."""

import msgspec

from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest, ExportOrder, RemotePrefill
from headwater.types import TOKEN_ID_BYTES


def prefill_order(
    request: EngineRequest, where: RemotePrefill, card: ModelCard, first_block: int, hold_s: float
) -> EngineRequest:
    """Up to the first new token."""
    num_tokens = 1 + len(request.resumed_tokens) // TOKEN_ID_BYTES
    sampling = msgspec.structs.replace(
        request.sampling, max_tokens=num_tokens, min_tokens=min(num_tokens, request.sampling.min_tokens)
    )
    return msgspec.structs.replace(
        request,
        sampling=sampling,
        expected_cached_tokens=where.expected_cached_tokens,
        prefill=None,
        export=ExportOrder(
            first_block=first_block,
            hold_s=hold_s,
            fingerprint=card.fingerprint,
            kv_layout=card.kv_layout,
            dtype=card.dtype,
            block_size=card.block_size,
            frontend_id=where.frontend_id,
            hears_waits=True,
        ),
    )
