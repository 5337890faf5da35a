"""The contract of a routing policy, and what goes in and out.

A policy is a plug-in: a class under the entry-point group `headwater.router` (or one of
`headwater.router.policies.BUILTIN`), made once per frontend without arguments. It chooses among workers that can all
serve the request, and only chooses: bookkeeping is the view's. A decision depends on the request, the workers and the
policy's own state alone, so that it can be replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from headwater.router.request import RouteRequest as RouteRequest
from headwater.router.view import WorkerView


@dataclass(frozen=True, slots=True)
class Candidate:
    """One possible choice: the lower the total, the better. `parts` add up to it; the policy says in which unit."""

    worker_id: str
    total: float
    parts: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker chosen and why."""

    policy: str
    winner: str
    num_candidates: int
    cached_tokens: int = 0
    """Prompt tokens that the winner is expected not to compute."""
    candidates: tuple[Candidate, ...] = ()
    """In the order of the workers; empty unless an explanation was asked for."""


def decide(
    policy: str,
    request: RouteRequest,
    winner: WorkerView,
    workers: Sequence[WorkerView],
    candidates: tuple[Candidate, ...] = (),
) -> Decision:
    """The decision for a winner."""
    cached_tokens = request.cached_tokens.get(winner.worker_id, 0)
    return Decision(policy, winner.worker_id, len(workers), cached_tokens, candidates)


class Policy(Protocol):
    name: ClassVar[str]
    uses_residency: ClassVar[bool]
    """Whether it wants to know which worker holds which blocks, which costs memory and time to keep."""

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        """`workers` is not empty, ordered by worker id, and must not be changed."""
        ...
