"""The engine contract: everything the rest of Headwater knows about an engine.

Life: construct -> start -> (submit, abort, outputs) -> drain -> close. All methods are called on one event loop;
outputs come back on that loop, once per engine step.

Guarantees an implementation gives (checked by `headwater.engines.conformance`):
- every submitted sequence ends with exactly one output that has a `finish_reason`, unless it was aborted;
- after `abort` no further output comes for that sequence and its blocks are free within one step;
- `submit` never blocks; what cannot be served is answered with an output carrying an `ErrorInfo`;
- an engine failure ends every open sequence with an error, then calls `on_failed` once;
- `drain` waits for open sequences and refuses new ones; `close` is idempotent and never hangs.

The KV port (`Engine.kv`, None where an engine has none) exchanges KV blocks with agents outside the engine: the
hand-off between prefill and decode workers (`headwater.handoff`), and the tiers of the KV store. Everything is by whole
blocks; the last one of a prompt may hold a part. Block `b` lies at `b * block_bytes` of `kv.blocks.memory`.

    load      kv.submit_loading(request, loader, timeout_s)           instead of `submit`
              loader.on_load(LoadStarted)                             admitted: write the missing blocks, on any thread
              kv.arrived(stream, k)                                   the first k blocks of the sequence are there
              kv.prefilled(stream, first) or kv.loaded(stream, k)     done; with loaded, the engine computes the rest
              loader.on_load_ended(LoadEnded)                         instead: stop writing, then kv.stopped(stream)
    export    kv.read(stream, reader)                                 before a request with `export` is submitted
              reader.on_waiting(ExportWaits)                          now and then, while it waits in line
              reader.on_exported(BlocksExported)                      per step: these blocks can be read now
              kv.release(stream)                                      read; until then, or for its `hold_s`, they stay
    offload   kv.watch(watcher)
              watcher.on_committed([BlocksCommitted, ...])            per step: what has become full, with ids
              kv.hold(id, hold_s, on_held)                            keep a block and all before it while reading
              kv.drop(hold)

- A loading sequence waits with its blocks reserved and stops nobody. It may be preempted like any other, and ends its
  load when `timeout_s` from its admission are over; then it is computed here, with what had arrived.
- A loader hears of exactly one end of its load, unless it ended it itself. It may write until it says `prefilled`,
  `loaded` or `stopped`: blocks that have not arrived are given to nobody before. What has arrived must not be written.
- What is held stays as it is until it is released, dropped or its time is up, also if the sequence fails or is aborted
  by `release`. After `hold_s` it must not be believed any more.
- All methods are called on the event loop and never wait; calls for streams that are unknown by now are ignored. All
  news come on the event loop, in order, those of a step before its outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headwater.errors import HeadwaterError
from headwater.kv.pricing import ComputeRate
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import LoadReport, WorkerEvent
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.scheduler.outside import (
    BlocksCommitted,
    BlocksExported,
    ExportWaits,
    FirstToken,
    Held,
    LoadEnded,
    LoadStarted,
)
from headwater.types import Role


@dataclass(frozen=True, slots=True)
class Progress:
    """One report during start-up. `done` and `total` are in `unit`; `total` is None when unknown."""

    phase: str
    """`resolve`, `download`, `load`, `convert`, `warm`, `ready`; `wait` for somebody else, which is no progress."""
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
    store: Path | None = None
    """Where this host's KV store listens, for engines that go there by themselves."""


ALONE = Placement()
STORE_FLAGS = "a KV store (--kv-host, --kv-disk, --kv-object, --kv-peer, --kv-listen, --kv-socket)"
"""What brings `Placement.store` about, for messages of engines that cannot go there."""


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
    role: Role | None = None
    """The only one it can have; None: any."""
    paired: bool = False
    """Whether it moves KV to one like it, which gets the request at the same time (`Pairing`)."""
    bootstrap: str = ""
    """`HOST:PORT` where it listens for the other one."""
    tickets: bool = False
    """Whether it moves KV to others of its kind by itself: `export` ends with a ticket, which another one takes."""
    store: bool = False
    """Whether it goes to the host's KV store by itself, and names blocks there as requests do."""
    num_ranks: int = 1
    """Of tensor parallelism, each of which loads its own part of a block from there."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Where an engine's KV blocks lie: block `b` at `b * block_bytes`, one contiguous run over all layers."""

    num_blocks: int
    block_bytes: int
    memory: Any
    """What `headwater.transfer.agent.Agent.register` takes: shared memory where possible."""
    view: memoryview | None
    """The same bytes, writable; None if the CPU cannot touch them."""
    modelled_block_bytes: int = 0
    """What a block would have in the engine that this one models; 0: these are the real ones."""
    modelled_bytes_per_s: float = 0.0
    """How fast they would be moved; 0: in no time."""

    def block(self, number: int) -> memoryview:
        """The bytes of one block, for memory that the CPU can touch."""
        assert self.view is not None, "this KV memory is on a device"
        return self.view[number * self.block_bytes : (number + 1) * self.block_bytes]


class KvLoader(Protocol):
    """Writes the missing blocks of a sequence."""

    def on_load(self, started: LoadStarted) -> None: ...

    def on_load_ended(self, ended: LoadEnded) -> None:
        """Stop writing, then call `stopped`. Also told when the load had not started yet."""
        ...


class KvReader(Protocol):
    """Reads the blocks of an exported sequence."""

    def on_waiting(self, waits: ExportWaits) -> None: ...

    def on_exported(self, exported: BlocksExported) -> None: ...


class KvWatcher(Protocol):
    def on_committed(self, committed: list[BlocksCommitted]) -> None:
        """All that one step has filled. They may be evicted soon: `hold` them to read them."""
        ...


class KvPort(Protocol):
    """See the module docstring."""

    @property
    def blocks(self) -> KvMemory: ...

    def num_resident(self, block_ids: bytes) -> int:
        """How many of these ids of one chain, from its start, were resident after the last step that was told of."""
        ...

    def submit_loading(self, request: EngineRequest, loader: KvLoader, timeout_s: float) -> None: ...

    def arrived(self, stream: int, num_blocks: int) -> None: ...

    def loaded(self, stream: int, num_blocks: int, *, cached: bool = True) -> None:
        """`cached`: what has arrived came out of a cache, and is told to the client as such."""
        ...

    def prefilled(self, stream: int, first: FirstToken) -> None: ...

    def stopped(self, stream: int) -> None: ...

    def read(self, stream: int, reader: KvReader) -> None:
        """Who is told of the blocks of a stream that is exported, until `release`."""
        ...

    def release(self, stream: int, after_s: float = 0.0) -> None:
        """The blocks of an exported stream are not needed any more (after some time); end it if it is open."""
        ...

    def hold(self, block_id: bytes, hold_s: float, on_held: Callable[[Held], None]) -> None:
        """`on_held` is told the blocks from the start of the sequence up to this one; none if it is not here."""
        ...

    def drop(self, hold: int) -> None: ...

    def watch(self, watcher: KvWatcher) -> None: ...


class Engine(Protocol):
    """One model on one set of devices."""

    @property
    def kv(self) -> KvPort | None:
        """From `start` on, for engines that have one."""
        ...

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


@runtime_checkable
class StoreUser(Protocol):
    """An engine that goes to the host's store by itself (`EngineInfo.store`), and weighs loads against computing."""

    def price(self, rate: ComputeRate) -> None:
        """What computing costs, as its step times have it by now. Told now and then."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its device's memory back for a while, and be ready again sooner than from a start."""

    async def sleep(self) -> None:
        """Called with nothing open. Its KV is forgotten. Raises what keeps it from that; it goes on then."""
        ...

    async def wake(self) -> None: ...
