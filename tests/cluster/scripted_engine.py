"""A small engine for tests of the worker shell: counts up, obeys aborts, fails and stalls on command."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.engines.base import EngineInfo, EngineListener, KvPort, Progress, ProgressSink
from headwater.errors import Draining, EngineFailed, HeadwaterError
from headwater.protocol.cluster import Artifact, ModelCard
from headwater.protocol.events import BlocksStored, LoadReport, WorkerEvent
from headwater.protocol.request import EngineRequest, ErrorInfo, SequenceOutput
from headwater.runtime.conformance import eventually
from headwater.types import Role

TOKENIZER = b'{"model": {"vocab": {}}}' * 1000
DIGEST = hashlib.sha256(TOKENIZER).hexdigest()


def scripted_card(name: str = "org/scripted") -> ModelCard:
    return ModelCard(
        name=name,
        served_names=[name],
        fingerprint="c" * 64,
        architecture="Scripted",
        dtype="none",
        kv_layout="scripted",
        max_model_len=1024,
        block_size=16,
        vocab_size=1000,
        artifacts=[Artifact("tokenizer.json", DIGEST, len(TOKENIZER))],
    )


@dataclass
class ScriptedEngine:
    """Each step gives every open sequence its next token: 0, 1, 2, ... up to `max_tokens`."""

    step_s: float = 0.001
    load_s: float = 0.0
    start_error: HeadwaterError | None = None
    aborted: list[int] = field(default_factory=list[int])
    submitted: list[EngineRequest] = field(default_factory=list[EngineRequest])
    closed: int = 0
    stalled: bool = False
    kv: KvPort | None = None
    role: Role = "both"

    def __post_init__(self) -> None:
        self._open: dict[int, EngineRequest] = {}
        self._done: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._draining = False
        self.blocks: list[bytes] = []
        self.steps = 0

    async def start(self, listener: EngineListener, progress: ProgressSink) -> EngineInfo:
        self._listener = listener
        progress(Progress("load"))
        await asyncio.sleep(self.load_s)
        if self.start_error is not None:
            raise self.start_error
        self._task = asyncio.create_task(self._run())
        return EngineInfo("scripted", scripted_card(), {DIGEST: TOKENIZER}, 64, 8, 512, "test", True)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        self.submitted += requests
        for request in requests:
            if self._draining:
                error = ErrorInfo.of(Draining("draining"))
                self._listener.on_step([SequenceOutput(request.stream, [], "error", error=error)])
            else:
                self._open[request.stream] = request
                self._done[request.stream] = 0

    def abort(self, streams: Sequence[int]) -> None:
        self.aborted += streams
        for stream in streams:
            self._open.pop(stream, None)

    def load(self) -> LoadReport:
        return LoadReport(len(self._open), 0, 0, 64, 64 - len(self._open), steps=self.steps)

    def resident_blocks(self) -> list[WorkerEvent]:
        return [BlocksStored(block) for block in self.blocks]

    async def set_role(self, role: Role) -> None:
        self.role = role

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        try:
            await eventually(lambda: not self._open, "all to end", timeout_s)
        except AssertionError:
            return False
        return True

    async def close(self) -> None:
        self.closed += 1
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def fail(self) -> None:
        error = EngineFailed("the device fell off the bus")
        outputs = [SequenceOutput.failed(stream, error) for stream in self._open]
        self._open.clear()
        self._listener.on_step(outputs)
        self._listener.on_failed(error)

    def store_block(self) -> None:
        block = len(self.blocks).to_bytes(16, "little")
        self.blocks.append(block)
        self._listener.on_events([BlocksStored(block), self.load()])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if self._open and not self.stalled:
                self.steps += 1
                self._listener.on_step([self._step(stream) for stream in list(self._open)])
                self._listener.on_events([self.load()])

    def _step(self, stream: int) -> SequenceOutput:
        request = self._open[stream]
        number = self._done[stream]
        self._done[stream] += 1
        last = self._done[stream] >= request.sampling.max_tokens
        if last:
            del self._open[stream]
        return SequenceOutput(stream, [number], "length" if last else None)
