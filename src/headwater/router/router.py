"""The router: a view, a policy, and what binds requests to workers beside prices.

A request goes through `eligible` (who may have it), `look_up` (who holds its prefix, where it is at home) and `decide`
(the policy's choice); `route` does all three. The queue takes them apart, because it asks again while a request waits.
"""

from collections.abc import Collection, Sequence

from headwater.errors import InvalidRequest, NoWorkers
from headwater.router.affinity import SessionAffinity
from headwater.router.home import HomeRing
from headwater.router.policy import Decision, Policy, RouteRequest
from headwater.router.price import UNKNOWN, Placement, prefill_pairs, price, profile
from headwater.router.view import ClusterView
from headwater.router.worker import WorkerView

_RETRY_AFTER_S = 2.0
_MAX_RINGS = 256
_SHORT_STEP = 3.0
"""Times the constant cost of a step: so long is the rest of a short one, unless ..."""
_SHORTEST_PART = 16
"""... that is less than so small a part of a full one."""


class Router:
    """Answers where a request goes."""

    def __init__(self, view: ClusterView, policy: Policy, affinity: SessionAffinity | None = None) -> None:
        self.view = view
        self.view.tracks_residency = policy.uses_residency
        self.policy = policy
        self.affinity = SessionAffinity("off") if affinity is None else affinity
        self._rings: dict[str, HomeRing] = {}
        self._unweighted = profile(1.0)

    def route(self, request: RouteRequest, model: str, avoid: Collection[str] = ()) -> tuple[WorkerView, Decision]:
        """Choose a worker that is not to be avoided. `model` is for messages alone. Raises `NoWorkers`."""
        workers = self.eligible(request, model, avoid)
        self.look_up(request)
        return self.decide(request, workers)

    def eligible(self, request: RouteRequest, model: str, avoid: Collection[str] = ()) -> Sequence[WorkerView]:
        """Workers it may go to, never none. Raises `NoWorkers`, or `InvalidRequest` for a worker that cannot be."""
        if request.pinned_to is not None:
            return [self._pinned(request, request.pinned_to, model)]
        workers = self.view.eligible(request.fingerprint)
        if avoid:
            workers = [worker for worker in workers if worker.worker_id not in avoid]
        if not workers:
            raise NoWorkers(f"no worker serves {model} at the moment", retry_after_s=_RETRY_AFTER_S)
        if request.session_id is not None and self.affinity.stickiness == "hard":
            bound = self.affinity.worker_of(request.session_id, request.now)
            workers = [worker for worker in workers if worker.worker_id == bound] or workers
        return workers

    def look_up(self, request: RouteRequest) -> None:
        """Fill in what is known of the request."""
        self.view.look_up(request)
        request.home = self._home(request)

    def decide(self, request: RouteRequest, workers: Sequence[WorkerView]) -> tuple[WorkerView, Decision]:
        """The policy's choice among eligible workers."""
        decision = self.policy.choose(request, workers)
        winner = self.view.worker(decision.winner)
        if winner is None:
            raise NoWorkers(f"the routing policy {self.policy.name} chose {decision.winner}, which is not there")
        if request.session_id is not None:
            self.affinity.bind(request.session_id, decision.winner, request.now, request.session_keep_s)
        return winner, decision

    def first_token_ms(self, request: RouteRequest, worker: WorkerView) -> float | None:
        """Predicted time to the first token there; None while step times are unknown."""
        if worker.costs is None:
            return None
        placement = Placement(request.num_prompt_tokens, request.num_sequences, 0.0, 0.0, 0)
        cached = request.cached_tokens.get(worker.worker_id, 0)
        occupied = worker.occupied or worker.occupy()
        return price(occupied.costs, self._unweighted, occupied, placement, cached).first_token

    def prefill_ms(self, request: RouteRequest, worker: WorkerView) -> float:
        """Time that the worker, if it had nothing else to do, would take to the first token; 0 while unknown."""
        if worker.costs is None:
            return 0.0
        cached = request.cached_tokens.get(worker.worker_id, 0)
        new_tokens = request.num_prompt_tokens - cached
        return worker.costs.prefill_ms(new_tokens, prefill_pairs(new_tokens, cached))

    def prompts_per_s(self, request: RouteRequest) -> float:
        """How many like this one all workers together could compute, had they nothing else to do; 0 while unknown."""
        times_ms = [self.prefill_ms(request, worker) for worker in self.view.eligible(request.fingerprint)]
        return sum(1e3 / time_ms for time_ms in times_ms if time_ms > 0)

    def short_step_tokens(self, worker: WorkerView) -> int:
        """Prompt tokens of a step that is as short as it may be without wasting much on what every step costs."""
        costs = worker.costs or UNKNOWN
        worthwhile = _SHORT_STEP * costs.prefill_step_ms / max(costs.prefill_token_ms, 1e-6)
        return int(min(float(worker.chunk_tokens), max(worker.chunk_tokens / _SHORTEST_PART, worthwhile)))

    def service_ms(self, request: RouteRequest, worker: WorkerView) -> float:
        """Worker time that the request takes: its prefill, and what it adds to decode steps."""
        costs = worker.costs or UNKNOWN
        cached = request.cached_tokens.get(worker.worker_id, 0)
        new_tokens = request.num_prompt_tokens - cached
        per_token_ms = costs.decode_sequence_ms + costs.decode_context_token_ms * request.num_prompt_tokens
        generated = request.num_sequences * min(request.expected_output_tokens, float(request.max_tokens))
        return costs.prefill_ms(new_tokens, prefill_pairs(new_tokens, cached)) + generated * per_token_ms

    def _pinned(self, request: RouteRequest, worker_id: str, model: str) -> WorkerView:
        worker = self.view.worker(worker_id)
        if worker is None or worker.instance.card.fingerprint != request.fingerprint:
            missing = "is not known" if worker is None else f"does not serve {model}"
            raise InvalidRequest(f"worker {worker_id} {missing}", param=request.pinned_by)
        if not worker.eligible:
            raise NoWorkers(f"worker {worker_id} takes no requests at the moment", retry_after_s=_RETRY_AFTER_S)
        return worker

    def _home(self, request: RouteRequest) -> str | None:
        if not self.policy.uses_residency:
            return None
        if request.session_id is not None:
            worker_id = self.affinity.worker_of(request.session_id, request.now)
            if worker_id is not None:
                return worker_id
        ring = self._ring(request.fingerprint)
        if request.prefix_group is not None:
            return ring.home_of(request.prefix_group)
        return ring.home(request.keys, request.block_size)

    def _ring(self, fingerprint: str) -> HomeRing:
        ring = self._rings.get(fingerprint)
        if ring is None:
            if len(self._rings) >= _MAX_RINGS:
                self._rings.clear()
            ring = self._rings[fingerprint] = HomeRing()
        ring.place(self.view.eligible(fingerprint))
        return ring
