"""Where requests meet the accounts of their tenants: what each is expected to need, what it did need.

Worker time is the learned model's: a request's own prefill, and per output token its own part of a decode step and an
even share of what every step costs anyhow. 0 as long as nothing was measured.
"""

from collections.abc import Sequence

from headwater.frontend.records import RequestRecord
from headwater.frontend.tenants.ledger import Usage
from headwater.frontend.tenants.meter import Meter
from headwater.protocol.request import EngineRequest
from headwater.router.price import prefill_pairs
from headwater.router.view import ClusterView
from headwater.types import TOKEN_ID_BYTES


class TenantAdmission:
    """Asked by the dispatcher before sequences go to a worker."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def admit(self, record: RequestRecord, requests: Sequence[EngineRequest]) -> None:
        """Raises `QuotaExceeded`."""
        record.num_sequences += len(requests)
        for request in requests:
            request.tenant, request.kv_share = record.kv_group, record.kv_share
        if record.visit is not None:
            first = requests[0]
            prompt_tokens = len(first.prompt) // TOKEN_ID_BYTES
            self._meter.reserve(record.visit, prompt_tokens, len(requests), first.sampling.max_tokens)


def usage_of(record: RequestRecord, view: ClusterView) -> Usage:
    """What did not get as far as a worker took nothing, and is no request in any account."""
    if not record.worker_id:
        return Usage()
    return Usage(
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        accelerator_ms=_accelerator_ms(record, view),
        requests=1,
    )


def _accelerator_ms(record: RequestRecord, view: ClusterView) -> float:
    worker = view.worker(record.worker_id) if record.worker_id else None
    if worker is None or worker.costs is None or not record.first_token:
        return 0.0
    costs = worker.costs
    new_tokens = max(0, record.prompt_tokens - record.cached_tokens)
    running = max(1, worker.load.num_running if worker.load is not None else 1)
    mean_context = record.prompt_tokens + record.output_tokens / 2
    token_ms = costs.decode_step_ms / running + costs.decode_sequence_ms + costs.decode_context_token_ms * mean_context
    return (
        costs.prefill_ms(new_tokens, prefill_pairs(new_tokens, record.cached_tokens)) + record.output_tokens * token_ms
    )
