"""A worker shell around a scripted engine, with in-process planes and registry."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest
from scripted_engine import DIGEST, TOKENIZER, ScriptedEngine, scripted_card

from headwater.engines.base import Progress
from headwater.errors import EngineFailed, ModelError
from headwater.protocol.events import BlocksStored, EventBatch, EventSnapshot, LoadReport
from headwater.protocol.frames import Abort, ArtifactChunk, FetchArtifact, StepFrame, Submit, WorkerFrame
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore
from headwater.runtime.requests.base import WorkerLink
from headwater.worker.shell import ShellConfig, WorkerShell


def request(stream: int, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest(stream, f"r{stream}", "org/scripted", b"\0" * 16, SamplingParams(max_tokens=max_tokens))


@dataclass
class Client:
    """A frontend's link, with the outputs sorted by stream."""

    link: WorkerLink
    frames: list[WorkerFrame] = field(default_factory=list[WorkerFrame])
    outputs: dict[int, list[SequenceOutput]] = field(default_factory=dict[int, list[SequenceOutput]])
    broken: list[str] = field(default_factory=list[str])

    def on_frame(self, frame: WorkerFrame) -> None:
        self.frames.append(frame)
        if isinstance(frame, StepFrame):
            for output in frame.outputs:
                self.outputs.setdefault(output.stream, []).append(output)

    def tokens(self, stream: int) -> list[int]:
        return [token for output in self.outputs.get(stream, []) for token in output.token_ids]

    def ended(self, stream: int) -> str | None:
        """The finish reason; exactly one."""
        reasons = [output.finish_reason for output in self.outputs.get(stream, []) if output.finish_reason]
        assert len(reasons) <= 1
        assert not reasons or self.outputs[stream][-1].finish_reason
        return reasons[0] if reasons else None

    def error(self, stream: int) -> str | None:
        error = self.outputs[stream][-1].error
        return error.code if error is not None else None


class World:
    """One worker, and what is needed to look at it."""

    def __init__(self, engine: ScriptedEngine, drain_timeout_s: float = 5.0) -> None:
        self.engine = engine
        self.planes = InprocPlanes()
        self.store = MemoryStore()
        self.registry = MemoryRegistry(self.store)
        config = ShellConfig("worker-1", "scripted", "org/named", drain_timeout_s=drain_timeout_s)
        self.shell = WorkerShell(engine, self.registry, self.planes, config)
        self.progress: list[Progress] = []
        self.running: asyncio.Task[None] | None = None
        self.clients: list[Client] = []

    @property
    def state(self) -> str | None:
        instance = self.store.feed.instances.get("worker-1")
        return instance.state if instance is not None else None

    def run(self) -> None:
        self.running = asyncio.create_task(self.shell.run(self.progress.append))

    async def ready(self) -> None:
        self.run()
        await eventually(lambda: self.state == "ready", "the worker to be ready")

    async def client(self) -> Client:
        instance = self.store.feed.instances["worker-1"]
        client = Client(self.planes.link(instance.request_address, "frontend"))
        assert (
            await client.link.connect(client.on_frame, lambda error: client.broken.append(str(error)), 5) == "worker-1"
        )
        self.clients.append(client)
        return client

    async def close(self) -> None:
        for client in self.clients:
            await client.link.close()
        if self.running is not None:
            self.shell.stop()
            self.shell.stop()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.registry.close()
        await self.planes.close()
        assert not self.planes.network.acceptors
        assert not self.planes.air.broadcasters


@contextlib.asynccontextmanager
async def world(engine: ScriptedEngine | None = None, **options: float) -> AsyncIterator[World]:
    made = World(engine or ScriptedEngine(), **options)
    try:
        yield made
    finally:
        await made.close()


def test_life_is_published() -> None:
    async def check() -> None:
        async with world(ScriptedEngine(load_s=0.05)) as it:
            it.run()
            await eventually(lambda: it.state == "starting", "the first registration")
            starting = it.store.feed.instances["worker-1"]
            assert starting.card.name == "org/named"
            assert it.store.feed.models == {}
            await eventually(lambda: it.state == "ready", "readiness")
            ready = it.store.feed.instances["worker-1"]
            card = msgspec.structs.replace(scripted_card(), created=ready.card.created)
            assert (ready.card, ready.kv_blocks, ready.hardware) == (card, 64, "test")
            assert abs(time.time() - card.created) < 60, "the engine does not say; it is when it was first seen"
            assert list(it.store.feed.models) == ["org/scripted"]
            assert it.progress == [Progress("load"), Progress("ready", detail="org/scripted")]
            it.shell.stop()
            await eventually(lambda: it.state == "draining", "draining")
            assert it.running is not None
            await it.running
            assert it.state is None
            assert list(it.store.feed.models) == ["org/scripted"]
            assert it.engine.closed == 1
            assert not it.shell.abandoned

    run_leak_checked(check())


def test_streams_of_several_frontends_do_not_mix() -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            clients = [await it.client() for _ in range(3)]
            for number, client in enumerate(clients):
                client.link.send(Submit([request(7, 3 + number), request(8, 1)]))
            for number, client in enumerate(clients):
                await eventually(lambda c=client: c.ended(7) and c.ended(8), "the end")  # type: ignore[misc]
                assert client.tokens(7) == list(range(3 + number))
                assert client.tokens(8) == [0]
            assert len({sent.stream for sent in it.engine.submitted}) == 6
            assert it.shell.num_streams == 0

    run_leak_checked(check())


def test_one_frame_per_step_and_frontend() -> None:
    async def check() -> None:
        async with world(ScriptedEngine(step_s=0.02)) as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(stream, 4) for stream in range(50)]))
            await eventually(lambda: client.ended(49) is not None, "the end")
            assert len([frame for frame in client.frames if isinstance(frame, StepFrame)]) == 4

    run_leak_checked(check())


def test_a_stream_number_is_used_once_at_a_time() -> None:
    async def check() -> None:
        async with world(ScriptedEngine(step_s=0.01)) as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(1, 5), request(1, 2)]))
            await eventually(lambda: bool(client.outputs), "the refusal")
            assert client.error(1) == "invalid_value"
            client.outputs.clear()
            await eventually(lambda: client.ended(1) == "length", "the first one's end")
            client.outputs.clear()
            client.link.send(Submit([request(1, 2)]))
            await eventually(lambda: client.ended(1) == "length", "the number used again")
            assert client.tokens(1) == [0, 1]

    run_leak_checked(check())


def test_requests_are_found_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(7)]))
            await eventually(lambda: client.ended(7) == "length", "the end")

    with caplog.at_level(logging.DEBUG, logger="headwater.worker.shell"):
        run_leak_checked(check())
    assert [vars(record)["request_id"] for record in caplog.records if record.getMessage() == "accepted"] == ["r7"]


def test_abort_reaches_the_engine_and_ends_the_output() -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(1, 100_000), request(2, 100_000)]))
            await eventually(lambda: len(client.tokens(1)) > 3, "tokens")
            client.link.send(Abort([1, 1, 99]))
            await eventually(lambda: it.engine.aborted == [it.engine.submitted[0].stream], "the abort")
            count = len(client.tokens(2))
            await eventually(lambda: len(client.tokens(2)) > count + 5, "the other stream to go on")
            stopped = len(client.tokens(1))
            await asyncio.sleep(0.02)
            assert len(client.tokens(1)) == stopped
            assert client.ended(1) is None

    run_leak_checked(check())


def test_a_vanished_frontend_is_aborted() -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            leaving, staying = await it.client(), await it.client()
            leaving.link.send(Submit([request(stream, 100_000) for stream in range(3)]))
            staying.link.send(Submit([request(0, 200)]))
            await eventually(lambda: it.shell.num_streams == 4, "the streams")
            gone = [sent.stream for sent in it.engine.submitted if sent.sampling.max_tokens == 100_000]
            await leaving.link.close()
            await eventually(lambda: sorted(it.engine.aborted) == sorted(gone), "the aborts")
            await eventually(lambda: staying.ended(0) == "length", "the other frontend's stream")
            assert staying.tokens(0) == list(range(200))

    run_leak_checked(check())


def test_a_worker_that_is_loading_refuses() -> None:
    async def check() -> None:
        async with world(ScriptedEngine(load_s=0.2)) as it:
            it.run()
            await eventually(lambda: it.state == "starting", "the registration")
            client = await it.client()
            client.link.send(Submit([request(1)]))
            await eventually(lambda: client.ended(1) == "error", "the refusal")
            error = client.outputs[1][0].error
            assert error is not None
            assert (error.code, error.retryable) == ("unavailable", True)
            assert it.engine.submitted == []

    run_leak_checked(check())


def test_drain_finishes_what_runs_and_refuses_what_is_new() -> None:
    async def check() -> None:
        async with world(ScriptedEngine(step_s=0.01)) as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(1, 60)]))
            await eventually(lambda: bool(client.tokens(1)), "tokens")
            it.shell.stop()
            client.link.send(Submit([request(2)]))
            await eventually(lambda: client.ended(2) == "error", "the refusal")
            assert client.error(2) == "draining"
            assert it.running is not None
            await it.running
            await eventually(lambda: client.ended(1) == "length", "the running stream")
            assert client.tokens(1) == list(range(60))
            await eventually(lambda: len(client.broken) == 1, "the link's end")

    run_leak_checked(check())


def test_an_idle_worker_answers_for_a_moment_while_it_leaves() -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            client = await it.client()
            it.shell.stop()
            await eventually(lambda: it.state == "draining", "draining")
            await asyncio.sleep(0.05)
            client.link.send(Submit([request(1)]))
            await eventually(lambda: client.ended(1) == "error", "the refusal")
            assert client.error(1) == "draining"

    run_leak_checked(check())


def test_drain_gives_up_after_its_time() -> None:
    async def check() -> None:
        async with world(drain_timeout_s=0.05) as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(1, 100_000)]))
            await eventually(lambda: bool(client.tokens(1)), "tokens")
            it.shell.stop()
            assert it.running is not None
            await it.running
            await eventually(lambda: client.ended(1) == "error", "the end")
            error = client.outputs[1][-1].error
            assert error is not None
            assert (error.code, error.retryable) == ("draining", True)
            assert not it.shell.hurried

    run_leak_checked(check())


def test_a_second_stop_leaves_at_once() -> None:
    async def check() -> None:
        async with world(drain_timeout_s=60) as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(1, 100_000)]))
            await eventually(lambda: bool(client.tokens(1)), "tokens")
            it.shell.stop()
            await asyncio.sleep(0.05)
            it.shell.stop()
            assert it.running is not None
            await asyncio.wait_for(it.running, 5)
            assert it.shell.hurried
            await eventually(lambda: client.ended(1) == "error", "the end")

    run_leak_checked(check())


def test_stop_while_loading_leaves_at_once() -> None:
    async def check() -> None:
        async with world(ScriptedEngine(load_s=60)) as it:
            it.run()
            await eventually(lambda: it.state == "starting", "the registration")
            it.shell.stop()
            assert it.running is not None
            await asyncio.wait_for(it.running, 5)
            assert it.shell.abandoned
            assert not it.shell.hurried
            assert it.state is None

    run_leak_checked(check())


def test_a_failed_engine_ends_streams_and_gives_up_the_lease() -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(1, 100_000)]))
            await eventually(lambda: bool(client.tokens(1)), "tokens")
            it.engine.fail()
            assert it.running is not None
            with pytest.raises(EngineFailed, match="fell off the bus"):
                await it.running
            await eventually(lambda: client.ended(1) == "error", "the end")
            assert client.error(1) == "engine_failed"
            assert it.state is None

    run_leak_checked(check())


def test_an_engine_that_fails_while_draining_is_still_reported() -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(1, 100_000)]))
            await eventually(lambda: bool(client.tokens(1)), "tokens")
            it.shell.stop()
            await eventually(lambda: it.state == "draining", "draining")
            it.engine.fail()
            assert it.running is not None
            with pytest.raises(EngineFailed):
                await it.running

    run_leak_checked(check())


def test_a_model_that_cannot_be_loaded_leaves_nothing_behind() -> None:
    async def check() -> None:
        async with world(ScriptedEngine(start_error=ModelError("no such architecture"))) as it:
            it.run()
            assert it.running is not None
            with pytest.raises(ModelError, match="no such architecture"):
                await it.running
            assert it.state is None
            assert it.store.feed.models == {}
            assert it.engine.closed == 1

    run_leak_checked(check())


def test_artifacts_are_given_out_in_parts() -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            client = await it.client()
            for offset in range(0, len(TOKENIZER), 5000):
                client.link.send(FetchArtifact(DIGEST, offset, 5000))
            parts = (len(TOKENIZER) + 4999) // 5000
            await eventually(lambda: len(client.frames) == parts, "all parts")
            chunks = [frame for frame in client.frames if isinstance(frame, ArtifactChunk)]
            assert b"".join(chunk.data for chunk in chunks) == TOKENIZER
            assert {chunk.total for chunk in chunks} == {len(TOKENIZER)}

    run_leak_checked(check())


def test_events_and_load_reach_subscribers() -> None:
    async def check() -> None:
        async with world(ScriptedEngine(step_s=0.001)) as it:
            await it.ready()
            it.engine.store_block()
            snapshots: list[EventSnapshot] = []
            batches: list[EventBatch] = []
            subscriber = it.planes.subscriber()
            address = it.store.feed.instances["worker-1"].event_address
            await subscriber.subscribe(address, batches.append, snapshots.append)
            assert [stored.block_ids for stored in snapshots[0].stored] == it.engine.blocks
            client = await it.client()
            began = it.engine.steps
            client.link.send(Submit([request(1, 300)]))
            await eventually(lambda: client.ended(1) == "length", "the end")
            it.engine.store_block()
            stored = BlocksStored(it.engine.blocks[1])
            await eventually(lambda: any(stored in batch.events for batch in batches), "the KV event")
            reports = [event for batch in batches for event in batch.events if isinstance(event, LoadReport)]
            assert reports
            assert len(reports) < (it.engine.steps - began) / 5
            await subscriber.close()

    run_leak_checked(check())


def test_a_registry_outage_does_not_stop_a_worker() -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            client = await it.client()
            it.store.interrupt("switched off")
            client.link.send(Submit([request(1, 5)]))
            await eventually(lambda: client.ended(1) == "length", "service during the outage")
            it.shell.stop()
            assert it.running is not None
            await it.running

    run_leak_checked(check())


def test_a_crash_breaks_links_once() -> None:
    async def check() -> None:
        async with world() as it:
            await it.ready()
            client = await it.client()
            client.link.send(Submit([request(1, 100_000)]))
            await eventually(lambda: bool(client.tokens(1)), "tokens")
            it.planes.network.sever(it.store.feed.instances["worker-1"].request_address)
            await eventually(lambda: len(client.broken) == 1, "the break")
            await asyncio.sleep(0.02)
            assert len(client.broken) == 1

    run_leak_checked(check())
