"""The built-in policies."""

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

from headwater.router.baselines import Dynamo, LlmD, PowerOfTwo, Preble, Random, SglangCacheAware
from headwater.router.delay import Delay
from headwater.router.policy import Candidate, Decision, Policy, decide
from headwater.router.request import RouteRequest
from headwater.router.view import WorkerView

_load_tokens = attrgetter("load_tokens")


class RoundRobin:
    """Each worker in turn, whatever it has to do."""

    name: ClassVar[str] = "round_robin"
    uses_residency: ClassVar[bool] = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        winner = workers[self._turn % len(workers)]
        self._turn += 1
        candidates = tuple(Candidate(worker.worker_id, 0.0) for worker in workers) if request.explain else ()
        return decide(self.name, request, winner, workers, candidates)


class LeastLoaded:
    """The worker with the fewest tokens left to compute; equals take turns.

    Tokens are: booked prompt tokens not yet computed, booked output tokens expected, and the surplus that the worker
    reports over these, which is what other frontends sent.
    """

    name: ClassVar[str] = "least_loaded"
    uses_residency: ClassVar[bool] = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        self._turn = start = (self._turn + 1) % len(workers)
        winner = min(workers[start:], key=_load_tokens)
        if start and winner.load_tokens > 0:
            before = min(workers[:start], key=_load_tokens)
            if before.load_tokens < winner.load_tokens:
                winner = before
        candidates = tuple(map(_explained, workers)) if request.explain else ()
        return decide(self.name, request, winner, workers, candidates)


def _explained(worker: WorkerView) -> Candidate:
    parts = {
        "booked_prefill_tokens": float(worker.booked_prefill_tokens),
        "booked_output_tokens": float(worker.booked_output_tokens),
        "foreign_tokens": float(worker.foreign_tokens),
    }
    return Candidate(worker.worker_id, float(worker.load_tokens), parts)


BUILTIN: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Delay, LeastLoaded, RoundRobin, Random, PowerOfTwo, Dynamo, SglangCacheAware, LlmD, Preble)
}
