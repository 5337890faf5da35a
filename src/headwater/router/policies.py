"""The built-in policies."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from headwater.router.baselines import Dynamo, LlmD, PowerOfTwo, Preble, Random, SglangCacheAware
from headwater.router.delay import Delay
from headwater.router.policy import Candidate, Decision, Policy, decide
from headwater.router.request import RouteRequest
from headwater.router.worker import WorkerView


class RoundRobin:
    """Each worker in turn, whatever it has to do."""

    name: ClassVar[str] = "round_robin"
    uses_residency: ClassVar[bool] = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        winner = workers[self._turn % len(workers)]
        self._turn += 1
        return decide(self.name, request, winner, workers, partial(_by_load, workers, [0] * len(workers)))


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
        loads = [worker.load_tokens for worker in workers]
        least = min(loads)
        winner = loads.index(least, start) if least in loads[start:] else loads.index(least)
        return decide(self.name, request, workers[winner], workers, partial(_by_load, workers, loads))


def _by_load(workers: Sequence[WorkerView], loads: Sequence[int]) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(worker.worker_id, float(load), {"load_tokens": float(load)})
        for worker, load in zip(workers, loads, strict=True)
    )


BUILTIN: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Delay, LeastLoaded, RoundRobin, Random, PowerOfTwo, Dynamo, SglangCacheAware, LlmD, Preble)
}
