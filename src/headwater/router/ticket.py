"""A request on its way to a worker, as the queue before the workers keeps it, and what becomes of it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from headwater.errors import HeadwaterError
from headwater.router.line import Key
from headwater.router.policy import Decision
from headwater.router.request import RouteRequest
from headwater.router.worker import WorkerView

PriorityClass = Literal["low", "normal", "high"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request on its way to a worker."""

    request: RouteRequest
    model: str
    """For messages."""
    tenant: str = ""
    priority: int = 0
    """Higher is served first."""
    deadline: float | None = None
    """On the clock of `now`."""
    avoid: Collection[str] = ()
    """Workers it must not go to."""
    since: float = 0.0
    """When it was submitted; filled in here, as is what follows."""
    key: Key = (0, 0, 0.0, 0)
    prefers: str | None = None
    """The busy worker it waits for, ..."""
    recheck_at: float = 0.0
    """... until then at least."""
    may_pass: bool = True
    """Whether its tenant is one that was given its name, not one that a client made up for itself."""
    ahead: bool = False
    """Its tenant asks for no more than its share: the worker is to take it before what waits there."""
    step_tokens: int = 0
    """The worker is to compute it in steps of no more prompt tokens than that; 0: of any size."""
    waiting: bool = False
    expires: float = 0.0

    @property
    def priority_class(self) -> PriorityClass:
        return "normal" if self.priority == 0 else "high" if self.priority > 0 else "low"


@dataclass(frozen=True, slots=True)
class Placed:
    ticket: Ticket
    worker: WorkerView
    decision: Decision


@dataclass(frozen=True, slots=True)
class Refused:
    ticket: Ticket
    error: HeadwaterError


Outcome = Placed | Refused
