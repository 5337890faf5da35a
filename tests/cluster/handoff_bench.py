"""Prefill and decode workers in one process, on in-process planes, with a client that asks one of them."""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headwater.engines.base import Engine
from headwater.protocol.events import EventBatch, EventSnapshot, HandoffCounts, LoadReport, StoreCounts
from headwater.protocol.frames import Abort, StepFrame, Submit, WorkerFrame
from headwater.protocol.request import EngineRequest, ErrorInfo, RemotePrefill, SamplingParams
from headwater.runtime.conformance import eventually
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore
from headwater.runtime.requests.base import WorkerLink
from headwater.transfer.options import AgentOptions
from headwater.worker.shell import ShellConfig, WorkerShell

END_S = 30.0


@dataclass
class Member:
    """One worker, what it reports, and a client's connection to it."""

    name: str
    engine: Engine
    shell: WorkerShell
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    reasons: dict[int, str] = field(default_factory=dict[int, str])
    errors: dict[int, ErrorInfo] = field(default_factory=dict[int, ErrorInfo])
    cached: dict[int, int] = field(default_factory=dict[int, int])
    load: LoadReport | None = None
    batches: list[EventBatch] = field(default_factory=list[EventBatch])
    snapshots: list[EventSnapshot] = field(default_factory=list[EventSnapshot])
    link: WorkerLink | None = None

    def on_frame(self, frame: WorkerFrame) -> None:
        if isinstance(frame, StepFrame):
            for output in frame.outputs:
                assert output.stream not in self.reasons, "output after the end"
                self.tokens.setdefault(output.stream, []).extend(output.token_ids)
                if output.num_cached_tokens is not None:
                    self.cached[output.stream] = output.num_cached_tokens
                if output.finish_reason is not None:
                    self.reasons[output.stream] = output.finish_reason
                if output.error is not None:
                    self.errors[output.stream] = output.error

    def on_batch(self, batch: EventBatch) -> None:
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, LoadReport):
                self.load = event

    def on_snapshot(self, snapshot: EventSnapshot) -> None:
        self.snapshots.append(snapshot)
        self.load = snapshot.load or self.load

    @property
    def stored(self) -> StoreCounts:
        return (self.load and self.load.store) or StoreCounts(0, 0, 0, 0)

    @property
    def counts(self) -> HandoffCounts:
        return (self.load and self.load.handoffs) or HandoffCounts(0, 0, 0, 0)

    def send(self, *requests: EngineRequest) -> None:
        assert self.link is not None
        self.link.send(Submit(list(requests)))

    def abort(self, *streams: int) -> None:
        assert self.link is not None
        self.link.send(Abort(list(streams)))

    async def run(self, *requests: EngineRequest) -> list[list[int]]:
        self.send(*requests)
        streams = [request.stream for request in requests]
        await eventually(lambda: all(stream in self.reasons for stream in streams), f"{streams} end", END_S)
        assert not self.errors, self.errors
        return [self.tokens[stream] for stream in streams]

    async def all_free(self) -> None:
        """Nothing runs and nothing is held."""

        def free() -> bool:
            load = self.load
            return load is not None and load.kv_blocks_free == load.kv_blocks_total and load.num_running == 0

        await eventually(free, f"all blocks of {self.name} are free", END_S)


class Workers:
    """A cluster without a frontend."""

    def __init__(self, planes: InprocPlanes, store: MemoryStore) -> None:
        self.planes = planes
        self.store = store
        self.members: dict[str, Member] = {}

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def prefill_at(self, name: str, expected_ms: float = 0.0) -> RemotePrefill:
        return RemotePrefill(name, self.store.feed.instances[name].request_address, expected_ms)


@contextlib.asynccontextmanager
async def workers(
    engines: dict[str, Engine],
    *,
    checksums: bool = False,
    adaptive: bool = False,
    kv_socket: Path | None = None,
    transfer: AgentOptions | None = None,
) -> AsyncIterator[Workers]:
    """Started and connected, under the names given."""
    cluster = Workers(InprocPlanes(), MemoryStore())
    registry = MemoryRegistry(cluster.store)
    running = []
    subscribers = []
    for name, engine in engines.items():
        options = transfer or AgentOptions(host=None, checksums=checksums)
        about = ShellConfig(name, "m", "m", adaptive=adaptive, drain_timeout_s=1, transfer=options, kv_socket=kv_socket)
        shell = WorkerShell(engine, registry, cluster.planes, about)
        cluster.members[name] = Member(name, engine, shell)
        running.append(asyncio.create_task(shell.run(lambda progress: None)))
    try:
        for name, member in cluster.members.items():
            await eventually(
                lambda n=name: n in cluster.store.feed.instances and cluster.store.feed.instances[n].state == "ready",
                f"{name} is ready",
                END_S,
            )
            instance = cluster.store.feed.instances[name]
            member.link = cluster.planes.link(instance.request_address, "client")
            await member.link.connect(member.on_frame, lambda error: None, 5)
            subscriber = cluster.planes.subscriber()
            await subscriber.subscribe(instance.event_address, member.on_batch, member.on_snapshot)
            subscribers.append(subscriber)
        yield cluster
    finally:
        for member in cluster.members.values():
            if member.link is not None:
                await member.link.close()
            member.shell.stop()
            member.shell.stop()
        await asyncio.gather(*running)
        for subscriber in subscribers:
            await subscriber.close()
        await registry.close()


def prompt_of(length: int, letter: int = 1) -> list[int]:
    """Different letters share no prefix."""
    return [20 + letter] + [20 + (letter * 31 + position * 7) % 170 for position in range(length - 1)]


def request(
    stream: int,
    prompt: Sequence[int],
    max_tokens: int = 20,
    *,
    prefill: RemotePrefill | None = None,
    **sampling: object,
) -> EngineRequest:
    given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | sampling
    return EngineRequest(
        stream,
        f"r{stream}",
        "m",
        array("I", prompt).tobytes(),
        SamplingParams(**given),
        prefill=prefill,  # type: ignore[arg-type]
    )
