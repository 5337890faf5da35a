"""Workers around the mocker engine, with in-process planes: real scheduling and KV accounting behind the shell."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headwater.config.schema import EngineConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.protocol.events import EventBatch, EventSnapshot, LoadReport
from headwater.protocol.frames import Abort, ArtifactChunk, FetchArtifact, StepFrame, Submit, WorkerFrame
from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore
from headwater.worker.shell import ShellConfig, WorkerShell

NUM_BLOCKS = 400


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    vocab = {"<s>": 0, **{f"Ġword{number}": number for number in range(1, 200)}}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return path


def mocker(tokenizer: Path, **options: object) -> MockerEngine:
    settings = {"mocker_speedup": 0.0, "num_kv_blocks": NUM_BLOCKS, "max_num_seqs": 16} | options
    return MockerEngine(EngineConfig(engine="mocker", tokenizer=str(tokenizer), **settings))  # type: ignore[arg-type]


def request(stream: int, prompt_tokens: int = 64, max_tokens: int = 20) -> EngineRequest:
    prompt = b"".join(((stream * 7 + position) % 199 + 1).to_bytes(4, "little") for position in range(prompt_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, seed=stream, ignore_eos=True)
    return EngineRequest(stream, f"r{stream}", "m", prompt, sampling)


@dataclass
class Watcher:
    """A frontend that counts tokens and follows events."""

    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    reasons: dict[int, str] = field(default_factory=dict[int, str])
    frames: list[WorkerFrame] = field(default_factory=list[WorkerFrame])
    load: LoadReport | None = None

    def on_frame(self, frame: WorkerFrame) -> None:
        self.frames.append(frame)
        if isinstance(frame, StepFrame):
            for output in frame.outputs:
                self.tokens.setdefault(output.stream, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    assert output.stream not in self.reasons
                    self.reasons[output.stream] = output.finish_reason

    def on_batch(self, batch: EventBatch) -> None:
        self._keep([event for event in batch.events if isinstance(event, LoadReport)])

    def on_snapshot(self, snapshot: EventSnapshot) -> None:
        self._keep([snapshot.load] if snapshot.load is not None else [])

    def _keep(self, reports: list[LoadReport]) -> None:
        self.load = reports[-1] if reports else self.load

    def idle(self) -> bool:
        load = self.load
        return load is not None and (load.num_running, load.num_waiting, load.kv_blocks_free) == (0, 0, NUM_BLOCKS)


@contextlib.asynccontextmanager
async def worker(
    engine: MockerEngine, planes: InprocPlanes, store: MemoryStore, name: str
) -> AsyncIterator[WorkerShell]:
    registry = MemoryRegistry(store)
    shell = WorkerShell(engine, registry, planes, ShellConfig(name, "mocker", "m", drain_timeout_s=5))
    running = asyncio.create_task(shell.run(lambda progress: None))
    await eventually(lambda: name in store.feed.instances and store.feed.instances[name].state == "ready", "readiness")
    try:
        yield shell
    finally:
        shell.stop()
        shell.stop()
        await running
        await registry.close()


def test_many_streams_on_two_workers_are_the_same_everywhere(tokenizer: Path) -> None:
    async def check() -> None:
        planes, store = InprocPlanes(), MemoryStore()
        async with (
            worker(mocker(tokenizer), planes, store, "one"),
            worker(mocker(tokenizer, max_num_seqs=3, num_kv_blocks=30), planes, store, "two"),
        ):
            seen = []
            for name in ("one", "two"):
                watcher = Watcher()
                link = planes.link(store.feed.instances[name].request_address, "frontend")
                await link.connect(watcher.on_frame, lambda error: None, 5)
                link.send(Submit([request(stream) for stream in range(64)]))
                await eventually(lambda w=watcher: len(w.reasons) == 64, "all to end", 20)  # type: ignore[misc]
                assert set(watcher.reasons.values()) == {"length"}
                assert {len(tokens) for tokens in watcher.tokens.values()} == {20}
                seen.append(watcher.tokens)
                await link.close()
            assert seen[0] == seen[1]

    run_leak_checked(check())


@pytest.mark.parametrize("stage", ["waiting", "running", "gone"])
def test_blocks_are_free_after_an_abort_at_any_stage(tokenizer: Path, stage: str) -> None:
    async def check() -> None:
        planes, store = InprocPlanes(), MemoryStore()
        engine = mocker(tokenizer, mocker_speedup=5.0, enable_prefix_caching=False)
        async with worker(engine, planes, store, "one") as shell:
            instance = store.feed.instances["one"]
            watcher, subscriber = Watcher(), planes.subscriber()
            await subscriber.subscribe(instance.event_address, watcher.on_batch, watcher.on_snapshot)
            link = planes.link(instance.request_address, "frontend")
            await link.connect(watcher.on_frame, lambda error: None, 5)
            link.send(Submit([request(stream, 100, 10_000) for stream in range(40)]))
            await eventually(lambda: len(watcher.tokens) == 16, "16 of 40 to run")
            await eventually(lambda: not watcher.idle(), "the load to be told")
            waiting = [stream for stream in range(40) if stream not in watcher.tokens]
            if stage == "gone":
                await link.close()
            else:
                link.send(Abort(waiting if stage == "waiting" else list(watcher.tokens)))
                await eventually(lambda: shell.num_streams < 40, "the abort")
                link.send(Abort(list(range(40))))
            await eventually(watcher.idle, "all blocks to be free")
            assert shell.num_streams == 0
            assert watcher.reasons == {}
            await link.close()
            await subscriber.close()

    run_leak_checked(check())


def test_a_frontend_can_fetch_the_tokenizer(tokenizer: Path) -> None:
    async def check() -> None:
        planes, store = InprocPlanes(), MemoryStore()
        async with worker(mocker(tokenizer), planes, store, "one"):
            instance = store.feed.instances["one"]
            artifact = next(a for a in instance.card.artifacts if a.name == "tokenizer.json")
            watcher = Watcher()
            link = planes.link(instance.request_address, "frontend")
            await link.connect(watcher.on_frame, lambda error: None, 5)
            data = b""
            while len(data) < artifact.size:
                link.send(FetchArtifact(artifact.digest, len(data), 700))
                await eventually(lambda: bool(watcher.frames), "a part")
                chunk = watcher.frames.pop()
                assert isinstance(chunk, ArtifactChunk)
                data += chunk.data
            assert hashlib.sha256(data).hexdigest() == artifact.digest
            await link.close()

    run_leak_checked(check())
