"""The engine contract: everything the rest of Headwater knows about an engine.

Life: construct -> start -> (submit, abort, outputs) -> drain -> close. All methods are called on one event loop;
outputs come back on that loop, once per engine step.

Guarantees an implementation gives (checked by `headwater.engines.conformance`):
- every submitted sequence ends with exactly one output that has a `finish_reason`, unless it was aborted;
- after `abort` no further output comes for that sequence and its blocks are free within one step;
- `submit` never blocks; what cannot be served is answered with an output carrying an `ErrorInfo`;
- an engine failure ends every open sequence with an error, then calls `on_failed` once;
- `drain` waits for open sequences and refuses new ones; `close` is idempotent and never hangs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headwater.errors import HeadwaterError
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import LoadReport, WorkerEvent
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.types import Role


@dataclass(frozen=True, slots=True)
class Progress:
    """One report during start-up. `done` and `total` are in `unit`; `total` is None when unknown."""

    phase: str
    """`resolve`, `download`, `load`, `convert`, `warm`, `ready`."""
    done: float = 0.0
    total: float | None = None
    unit: str = ""
    detail: str = ""


ProgressSink = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which of how many engines on this host: they divide its cores and memory among them."""

    index: int = 0
    count: int = 1


ALONE = Placement()


class EngineListener(Protocol):
    """Where an engine delivers. Called on the event loop that started the engine."""

    def on_step(self, outputs: list[SequenceOutput]) -> None:
        """Outputs of one engine step, at most one per sequence."""
        ...

    def on_events(self, events: list[WorkerEvent]) -> None:
        """KV events and load, in order; a `BlocksStored` never overtakes the step that computed it."""
        ...

    def on_failed(self, error: HeadwaterError) -> None:
        """The engine is dead; it must be closed and started again."""
        ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine turned out to be, once started."""

    engine: str
    card: ModelCard
    artifacts: dict[str, Path | bytes]
    """Content by digest, for every `card.artifacts` entry."""
    kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    hardware: str
    batch_invariant: bool
    """Whether output is bit-identical whatever else runs, so that a moved stream continues token for token."""


class Engine(Protocol):
    """One model on one set of devices."""

    async def start(self, listener: EngineListener, progress: ProgressSink) -> EngineInfo:
        """Load and warm. Raises `ModelError` or `ConfigError`."""
        ...

    def submit(self, requests: Sequence[EngineRequest]) -> None: ...

    def abort(self, streams: Sequence[int]) -> None: ...

    def load(self) -> LoadReport: ...

    def resident_blocks(self) -> list[WorkerEvent]:
        """`BlocksStored` events that describe what is resident now: the snapshot for late subscribers."""
        ...

    async def set_role(self, role: Role) -> None: ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait for the rest. True when nothing is left."""
        ...

    async def close(self) -> None: ...
