"""vLLM's `kv_transfer_params` of connectors that move KV by themselves (NIXL, pull), as tickets.

Written for vLLM 0.32: the prefill is told that its blocks will be fetched, and its answer says where they are; that is
passed on as it is. What expires or fails is vLLM's to compute (`kv_load_failure_policy: recompute`).
"""

from typing import Any

import msgspec

from headwater.errors import InvalidRequest
from headwater.protocol.request import EngineRequest

_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

ticket_of = msgspec.json.encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def kv_transfer_params(request: EngineRequest) -> dict[str, Any] | None:
    """What a request says to vLLM's connector. Raises `InvalidRequest` for a ticket that is none."""
    if request.export is not None:
        return dict(_PREFILL)
    if not request.ticket:
        return None
    try:
        return _decode(request.ticket)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"this is no ticket of vLLM: {error}", param="ticket") from error
