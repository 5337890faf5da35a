"""An engine under observation: what the conformance suite drives, sees and breaks."""

import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

from headwater.engines.base import Engine, EngineInfo, Progress, ProgressSink
from headwater.engines.core import BuiltEngine, EngineCore
from headwater.engines.engine import CoreEngine
from headwater.errors import HeadwaterError
from headwater.kv.resident import ResidentBlocks
from headwater.protocol.events import LoadReport, WorkerEvent
from headwater.protocol.request import EngineRequest, ErrorInfo, SamplingParams, SequenceOutput
from headwater.runtime.conformance import eventually
from headwater.scheduler.plan import Executor, Sequence, StepPlan, StepResult

END_S = 20.0
"""Time for what should end."""


class Recorder:
    """A listener that keeps everything and checks what holds for every delivery."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[SequenceOutput]] = {}
        self.events: list[WorkerEvent] = []
        self.resident = ResidentBlocks()
        self.failures: list[HeadwaterError] = []

    def on_step(self, outputs: list[SequenceOutput]) -> None:
        assert outputs, "an empty step was delivered"
        assert len({output.stream for output in outputs}) == len(outputs), "two outputs of a sequence in one step"
        for output in outputs:
            own = self.outputs.setdefault(output.stream, [])
            assert not own or own[-1].finish_reason is None, f"output after the end of {output.stream}"
            assert (output.num_cached_tokens is not None) <= (not own), "cached tokens told twice"
            assert (output.finish_reason == "error") == (output.error is not None)
            own.append(output)

    def on_events(self, events: list[WorkerEvent]) -> None:
        self.events += events
        for event in events:
            if not isinstance(event, LoadReport):
                self.resident.apply(event)

    def on_failed(self, error: HeadwaterError) -> None:
        self.failures.append(error)

    @property
    def loads(self) -> list[LoadReport]:
        return [event for event in self.events if isinstance(event, LoadReport)]

    def tokens(self, stream: int) -> list[int]:
        return [token for output in self.outputs.get(stream, []) for token in output.token_ids]

    def last(self, stream: int) -> SequenceOutput | None:
        own = self.outputs.get(stream)
        return own[-1] if own else None

    def ended(self, *streams: int) -> bool:
        lasts = [self.last(stream) for stream in streams]
        return all(last is not None and last.finish_reason is not None for last in lasts)

    def error(self, stream: int) -> ErrorInfo:
        last = self.last(stream)
        assert last is not None, f"no output for {stream}"
        assert last.error is not None, f"no error for {stream}: {last}"
        return last.error


class WatchedExecutor:
    """Around the real executor: what was planned, how far, and on demand a failure."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.plans: list[set[int]] = []
        """Streams in each step."""
        self.known: set[int] = set()
        self.failing = False
        self.pause_s = 0.0
        self.closed = 0

    def admit(self, sequence: Sequence) -> None:
        self._inner.admit(sequence)
        self.known.add(sequence.stream)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append({piece.sequence.stream for piece in plan.slices})
        time.sleep(self.pause_s)
        if self.failing:
            raise RuntimeError("the device fell off the bus")
        return self._inner.execute(plan)

    def release(self, sequence: Sequence) -> None:
        self._inner.release(sequence)
        self.known.discard(sequence.stream)

    def close(self) -> None:
        self.closed += 1
        self._inner.close()


class Bench:
    """An engine under test, started, with its recorder."""

    def __init__(self, engine: Engine, info: EngineInfo, recorder: Recorder, progress: list[Progress]) -> None:
        self.engine = engine
        self.info = info
        self.recorder = recorder
        self.progress = progress
        self.core: EngineCore | None = None
        self.executor: WatchedExecutor | None = None
        self._streams = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, engine: Engine) -> AsyncIterator[Self]:
        """Started, and closed in the end."""
        recorder = Recorder()
        progress: list[Progress] = []
        info = await engine.start(recorder, progress.append)
        try:
            yield cls(engine, info, recorder, progress)
        finally:
            await engine.close()

    def slow_down(self, pause_s: float) -> None:
        """Make each step at least this long."""
        if self.executor is not None:
            self.executor.pause_s = pause_s

    def request(self, prompt: list[int], max_tokens: int = 8, **fields: object) -> EngineRequest:
        """Greedy and deaf to end tokens unless said otherwise; sampling fields by name."""
        self._streams += 1
        own = {name: fields.pop(name) for name in list(fields) if name in EngineRequest.__struct_fields__}
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | fields
        return EngineRequest(
            stream=self._streams,
            request_id=f"check-{self._streams}",
            model=self.info.card.name,
            prompt=array("I", prompt).tobytes(),
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
            **own,  # type: ignore[arg-type]
        )

    async def run(self, *requests: EngineRequest) -> list[list[int]]:
        """Submit and wait for all to end: their tokens."""
        self.engine.submit(requests)
        streams = [request.stream for request in requests]
        await eventually(lambda: self.recorder.ended(*streams), f"{streams} end", END_S)
        return [self.recorder.tokens(stream) for stream in streams]

    async def all_free(self) -> None:
        total = self.info.kv_blocks
        await eventually(lambda: self.engine.load().kv_blocks_free == total, "all blocks are free", END_S)


def watch(engine: CoreEngine) -> tuple[list[EngineCore], list[WatchedExecutor]]:
    """Put a watched executor into an engine before it starts; core and executor appear in the lists then."""
    cores: list[EngineCore] = []
    executors: list[WatchedExecutor] = []
    build, build_core = engine._build, engine._build_core

    def watched_build(progress: ProgressSink) -> BuiltEngine:
        built = build(progress)
        executors.append(WatchedExecutor(built.executor))
        return replace(built, executor=executors[0])

    def kept_core(progress: ProgressSink) -> tuple[EngineCore, EngineInfo]:
        core, info = build_core(progress)
        cores.append(core)
        return core, info

    engine._build = watched_build
    engine._build_core = kept_core  # type: ignore[method-assign]
    return cores, executors
