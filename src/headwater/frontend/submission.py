"""One prompt's sequences on their way to a worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headwater.frontend.hints import RoutingHints
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest
from headwater.router.decisions import DecisionRecord
from headwater.router.request import RouteRequest
from headwater.router.ticket import Ticket
from headwater.types import TOKEN_ID_BYTES


@dataclass(slots=True, eq=False, kw_only=True)
class Submission(Ticket):
    """What waits in the router's queue: sequences with the same prompt, which share a worker."""

    record: DecisionRecord
    requests: list[EngineRequest] = field(default_factory=list[EngineRequest])

    @classmethod
    def of(
        cls,
        card: ModelCard,
        requests: Sequence[EngineRequest],
        hints: RoutingHints,
        key_tenant: str,
        epoch_ahead: float,
    ) -> "Submission":
        """`key_tenant`: who the API key belongs to. `epoch_ahead`: of the epoch before the clock of the router."""
        first = requests[0]
        tenant = hints.tenant or key_tenant or hints.salt_tenant
        route = _route(card, requests, hints, tenant)
        record = DecisionRecord(
            request_id=first.request_id,
            model=card.name,
            asked=first.arrival,
            prompt_tokens=route.num_prompt_tokens,
            num_sequences=len(requests),
            tenant=tenant,
            session_id=hints.session_id,
            priority=first.priority,
        )
        return cls(
            request=route,
            model=card.name,
            tenant=tenant,
            priority=first.priority,
            may_pass=bool(hints.tenant or key_tenant),
            deadline=None if first.deadline is None else first.deadline - epoch_ahead,
            record=record,
            requests=list(requests),
        )

    def withdraw(self, stream: int) -> bool:
        """A sequence is not wanted any more; whether it was the last one."""
        self.requests = [request for request in self.requests if request.stream != stream]
        self.request.num_sequences = len(self.requests)
        return not self.requests

    def again(self, now: float) -> RouteRequest:
        """The question for one sequence that a worker refused."""
        return replace(self.request, num_sequences=1, now=now)


def _route(card: ModelCard, requests: Sequence[EngineRequest], hints: RoutingHints, tenant: str) -> RouteRequest:
    first = requests[0]
    session = hints.session_id
    return RouteRequest(
        fingerprint=card.fingerprint,
        num_prompt_tokens=len(first.prompt) // TOKEN_ID_BYTES,
        max_tokens=first.sampling.max_tokens,
        num_sequences=len(requests),
        block_ids=first.block_ids,
        block_size=card.block_size,
        expected_output_tokens=hints.expected_output_tokens,
        session_id=f"{tenant}/{session}" if session is not None else None,
        session_keep_s=hints.session_keep_s,
        prefix_group=hints.prefix_group,
        pinned_to=hints.worker_id,
        pinned_by=hints.worker_param,
        latency_sensitivity=hints.latency_sensitivity,
    )
