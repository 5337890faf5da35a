"""The contract of a routing policy, and what goes in and out.

A policy is a plug-in: a class under the entry-point group `headwater.router` (or one of
`headwater.router.policies.BUILTIN`), made once per frontend: by its `configured` if it has one, else without
arguments. It chooses among workers that can all serve the request, and only chooses: bookkeeping is the view's. A
decision depends on the request, the workers and the policy's own state alone, so that it can be replayed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self, runtime_checkable

from headwater.router.request import RouteRequest as RouteRequest
from headwater.router.worker import WorkerView


@dataclass(frozen=True, slots=True)
class Candidate:
    """One possible choice: the lower the total, the better. `parts` add up to it; the policy says in which unit."""

    worker_id: str
    total: float
    parts: dict[str, float] = field(default_factory=dict[str, float])


def _unexplained() -> tuple[Candidate, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker chosen and why."""

    policy: str
    winner: str
    num_candidates: int
    cached_tokens: int = 0
    """Prompt tokens that the winner is expected not to compute."""
    explain: Callable[[], tuple[Candidate, ...]] = _unexplained
    """All candidates as they stood, in the order of the workers. Called later, or never: it holds what it needs."""


def decide(
    policy: str,
    request: RouteRequest,
    winner: WorkerView,
    workers: Sequence[WorkerView],
    explain: Callable[[], tuple[Candidate, ...]] = _unexplained,
) -> Decision:
    """The decision for a winner."""
    worker_id = winner.worker_id
    return Decision(policy, worker_id, len(workers), request.cached_tokens.get(worker_id, 0), explain)


class Policy(Protocol):
    name: ClassVar[str]
    uses_residency: ClassVar[bool]
    """Whether it wants to know which worker holds which blocks, which costs memory and time to keep."""

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        """`workers` is not empty, ordered by worker id, and must not be changed."""
        ...


@runtime_checkable
class PricingPolicy(Protocol):
    """A policy that can say what a placement costs in milliseconds, so that the queue can compare requests."""

    def prices(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Sequence[float]:
        """Of each worker; `choose` takes the lowest."""
        ...


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What an operator may say about routing, whatever the policy."""

    decode_share: float = 1.0
    """How much the time after the first token matters: 0, only the first token counts; 1, the whole answer."""


@runtime_checkable
class ConfigurablePolicy(Protocol):
    @classmethod
    def configured(cls, settings: PolicySettings) -> Self: ...
