"""The contract of a routing policy, and what goes in and out.

A policy is a plug-in: a class under the entry-point group `headwater.router` (or one of
`headwater.router.policies.BUILTIN`), made once per frontend without arguments. It chooses among workers that can all
serve the request, and only chooses: bookkeeping is the view's. A decision depends on the request, the workers and the
policy's own state alone, so that it can be replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from headwater.router.view import WorkerView


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may know of a request: one prompt, `num_sequences` answers to it."""

    fingerprint: str
    """Of the model: workers with an equal one are exchangeable."""
    num_prompt_tokens: int
    max_tokens: int
    """Per sequence."""
    num_sequences: int = 1
    block_ids: bytes = b""
    """Ids of the prompt's full blocks, 16 bytes each."""
    session_id: str | None = None
    explain: bool = False
    """Whether all candidates are to be listed in the decision."""


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
    candidates: tuple[Candidate, ...] = ()
    """In the order of the workers; empty unless an explanation was asked for."""


class Policy(Protocol):
    name: ClassVar[str]

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        """`workers` is not empty, ordered by worker id, and must not be changed."""
        ...
