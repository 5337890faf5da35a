"""Prefill for others and decode after others: TensorRT-LLM's `DisaggregatedParams` as tickets.

A ticket is msgpack, never a pickle; only the fields named here are taken from it. TensorRT-LLM keeps the blocks of a
context-only request until they are fetched or its own time for that is over.
"""

from typing import Any

import msgspec

from headwater.engines.trtllm.installed import Installed
from headwater.errors import InvalidRequest, WorkerLost
from headwater.protocol.request import EngineRequest, SequenceOutput


class _Ticket(msgspec.Struct, omit_defaults=True):
    first_gen_tokens: list[int]
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None


class HandingOver:
    def __init__(self, installed: Installed) -> None:
        self._params = installed.DisaggregatedParams

    def context_only(self, request: EngineRequest) -> Any:
        """Raises `InvalidRequest`."""
        if request.sampling.logprobs is not None:
            raise InvalidRequest("log probabilities of a first token do not pass to another worker", param="logprobs")
        return self._params(request_type="context_only")

    def generation_only(self, ticket: bytes) -> Any:
        """Raises `InvalidRequest`."""
        try:
            found = msgspec.msgpack.decode(ticket, type=_Ticket)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"this is no ticket of TensorRT-LLM: {error}", param="ticket") from error
        given = {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}
        return self._params(request_type="generation_only", **given)

    def prefilled(self, number: int, result: Any) -> SequenceOutput:
        """Without a ticket where the first token was also the last."""
        output = result.outputs[0]
        params, reason = output.disaggregated_params, output.finish_reason
        if reason not in ("length", "not_finished", "stop", None):
            raise WorkerLost(f"TensorRT-LLM gave up on a prompt ({reason})")
        token_ids = list(params.first_gen_tokens or ()) if params is not None else []
        ticket = b""
        if params is not None and reason != "stop":
            given = {name: getattr(params, name, None) for name in _Ticket.__struct_fields__}
            ticket = msgspec.msgpack.encode(_Ticket(**given | {"first_gen_tokens": token_ids}))
        return SequenceOutput(number, token_ids, "length", None, int(result.cached_tokens), ticket=ticket)
