"""The words of a supervisor: the processes it looks after, and what it does with them or has to say of them."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["frontend", "store", "worker"]

PERMANENT_EXIT = 2
"""Exit code of a process whose configuration or model cannot work."""
NOT_READY_EXIT = 3
FAILED_EXIT = 1


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One supervised process of the graph."""

    kind: Kind
    index: int
    life: int = 0
    """Successors have the same index."""

    @property
    def successor(self) -> "Part":
        return Part(self.kind, self.index, self.life + 1)

    def __str__(self) -> str:
        return f"{self.kind}-{self.index}"


@dataclass(frozen=True, slots=True)
class Start:
    part: Part


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask to drain and leave. `succeeded`: another one accepts in its place, so there is no hurry."""

    part: Part
    succeeded: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    part: Part


@dataclass(frozen=True, slots=True)
class Restarting:
    """News: it died and will be started again in `delay_s`."""

    part: Part
    reason: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class GaveUp:
    """News: it will not be started again."""

    part: Part
    reason: str


@dataclass(frozen=True, slots=True)
class AllReady:
    """News: every part that is left has reported ready. Comes once."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """News: the graph is being drained."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rolled:
    """News: a rolling restart is over; `failure` says why, if not everything was replaced."""

    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    code: int
    reason: str


Action = Start | Terminate | Kill | Restarting | GaveUp | AllReady | Stopping | Rolled | Finish
