"""The router: a view and a policy."""

from collections.abc import Collection

from headwater.errors import NoWorkers
from headwater.router.policy import Decision, Policy, RouteRequest
from headwater.router.view import ClusterView, WorkerView

_RETRY_AFTER_S = 2.0


class Router:
    """Answers where a request goes."""

    def __init__(self, view: ClusterView, policy: Policy) -> None:
        self.view = view
        self.view.tracks_residency = policy.uses_residency
        self.policy = policy

    def route(self, request: RouteRequest, model: str, avoid: Collection[str] = ()) -> tuple[WorkerView, Decision]:
        """Choose a worker that is not to be avoided. `model` is for the message of `NoWorkers` alone."""
        workers = self.view.eligible(request.fingerprint)
        if avoid:
            workers = [worker for worker in workers if worker.worker_id not in avoid]
        if not workers:
            raise NoWorkers(f"no worker serves {model} at the moment", retry_after_s=_RETRY_AFTER_S)
        self.view.look_up(request)
        decision = self.policy.choose(request, workers)
        winner = self.view.worker(decision.winner)
        if winner is None:
            raise NoWorkers(f"the routing policy {self.policy.name} chose {decision.winner}, which is not there")
        return winner, decision
