"""What every request plane must do. Subclass, provide the fixtures, and let pytest collect the class."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headwater.errors import HeadwaterError, PayloadTooLarge, ProtocolError, WorkerLost
from headwater.protocol import PROTOCOL_VERSION
from headwater.protocol.frames import (
    Abort,
    ArtifactChunk,
    FetchArtifact,
    FrontendFrame,
    Hello,
    Refused,
    StepFrame,
    Submit,
    WorkerFrame,
)
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput, TokenLogprobs
from headwater.runtime.conformance import eventually, on_loop
from headwater.runtime.planes import Planes
from headwater.runtime.requests.base import RequestListener, WorkerLink
from headwater.runtime.wire import MAX_MESSAGE_BYTES, Limits, join_frames

CONNECT_TIMEOUT_S = 5.0
QUICK = Limits(queue_messages=20, heartbeat_s=0.05, silence_s=0.3, linger_s=0.2)


def example_request(stream: int, tokens: int = 4) -> EngineRequest:
    return EngineRequest(
        stream=stream,
        request_id=f"request-{stream}",
        model="org/model",
        prompt=b"\1\0\0\0" * tokens,
        sampling=SamplingParams(max_tokens=3),
    )


def example_step(*streams: int) -> StepFrame:
    return StepFrame([SequenceOutput(stream, [7, 8], logprobs=[TokenLogprobs(-0.5, 1)]) for stream in streams])


@dataclass
class WorkerEnd:
    """A listener that remembers what it was told."""

    listener: RequestListener
    address: str = ""
    frames: list[tuple[bytes, FrontendFrame]] = field(default_factory=list[tuple[bytes, FrontendFrame]])
    gone: list[bytes] = field(default_factory=list[bytes])

    async def listen(self, worker_id: str = "worker-1") -> "WorkerEnd":
        self.address = await self.listener.listen(
            worker_id, lambda peer, frame: self.frames.append((peer, frame)), self.gone.append
        )
        return self


@dataclass
class FrontendEnd:
    """A link that remembers what it was told."""

    link: WorkerLink
    frames: list[WorkerFrame] = field(default_factory=list[WorkerFrame])
    broken: list[HeadwaterError] = field(default_factory=list[HeadwaterError])

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> str:
        return await self.link.connect(self.frames.append, self.broken.append, timeout_s)


class RawPeer:
    """A peer that sends whatever bytes it likes."""

    async def send(self, message: bytes) -> None:
        raise NotImplementedError

    async def receive(self) -> bytes:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class RequestPlaneConformance:
    """The suite."""

    def make_planes(self, limits: Limits) -> Planes:
        raise NotImplementedError

    def raw_peer(self, planes: Planes, address: str) -> RawPeer:
        """Connect to a listener below the protocol."""
        raise NotImplementedError

    @on_loop
    async def test_frames_arrive_in_order_both_ways(self) -> None:
        planes = self.make_planes(Limits())
        worker = await WorkerEnd(planes.listener()).listen("worker-9")
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        assert await front.connect() == "worker-9"
        sent: list[FrontendFrame] = []
        for number in range(200):
            sent += [Submit([example_request(number)]), Abort([number])]
        for frame in [*sent, FetchArtifact("d" * 64, 0, 10)]:
            front.link.send(frame)
        await eventually(lambda: len(worker.frames) == 401, "all frames at the worker")
        assert [frame for _, frame in worker.frames[:-1]] == sent
        peer = worker.frames[0][0]
        for number in range(200):
            worker.listener.send(peer, example_step(number, number + 1))
        worker.listener.send(peer, ArtifactChunk("d" * 64, 0, 10, b"0123456789"))
        await eventually(lambda: len(front.frames) == 201, "all frames at the frontend")
        assert front.frames[:-1] == [example_step(number, number + 1) for number in range(200)]
        await front.link.close()
        await eventually(lambda: worker.gone == [peer], "the frontend's leaving")
        await worker.listener.close()
        assert front.broken == []
        await planes.close()

    @on_loop
    async def test_each_frontend_gets_its_own(self) -> None:
        planes = self.make_planes(Limits())
        worker = await WorkerEnd(planes.listener()).listen()
        fronts = [FrontendEnd(planes.link(worker.address, f"frontend-{number}")) for number in range(5)]
        for number, front in enumerate(fronts):
            await front.connect()
            front.link.send(Abort([number]))
        await eventually(lambda: len(worker.frames) == 5, "all frames")
        for peer, frame in worker.frames:
            assert isinstance(frame, Abort)
            worker.listener.send(peer, example_step(*frame.streams))
        for number, front in enumerate(fronts):
            await eventually(lambda front=front: len(front.frames) == 1, "an answer")  # type: ignore[misc]
            assert front.frames == [example_step(number)]
            await front.link.close()
        await eventually(lambda: len(set(worker.gone)) == 5, "all to leave")
        assert len(worker.gone) == 5
        await worker.listener.close()
        await planes.close()

    @on_loop
    async def test_large_frames_pass_and_larger_are_refused_at_once(self) -> None:
        planes = self.make_planes(Limits())
        worker = await WorkerEnd(planes.listener()).listen()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        await front.connect()
        large = Submit([example_request(1, tokens=4 << 20)])
        front.link.send(large)
        front.link.send(large)
        await eventually(lambda: len(worker.frames) == 2, "two large frames")
        assert worker.frames[1][1] == large
        refused = False
        try:
            front.link.send(Submit([example_request(1, tokens=MAX_MESSAGE_BYTES // 4)]))
        except PayloadTooLarge:
            refused = True
        assert refused
        assert front.broken == []
        await front.link.close()
        await worker.listener.close()
        await planes.close()

    @on_loop
    async def test_worker_that_vanishes_is_reported_once_after_its_last_frames(self) -> None:
        planes = self.make_planes(Limits())
        worker = await WorkerEnd(planes.listener()).listen()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        await front.connect()
        front.link.send(Abort([1]))
        await eventually(lambda: len(worker.frames) == 1, "the frame")
        for number in range(50):
            worker.listener.send(worker.frames[0][0], example_step(number))
        await worker.listener.close()
        await eventually(lambda: bool(front.broken), "the break")
        assert len(front.frames) == 50
        assert isinstance(front.broken[0], WorkerLost)
        front.link.send(Abort([1]))
        await asyncio.sleep(0.05)
        assert len(front.broken) == 1
        await front.link.close()
        await worker.listener.close()
        await planes.close()

    @on_loop
    async def test_nobody_listens(self) -> None:
        planes = self.make_planes(Limits())
        worker = await WorkerEnd(planes.listener()).listen()
        await worker.listener.close()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        assert isinstance(await _failure(front.connect()), WorkerLost)
        assert front.broken == []
        await front.link.close()
        await planes.close()

    @on_loop
    async def test_connect_is_cancelled_cleanly(self) -> None:
        planes = self.make_planes(Limits())
        worker = await WorkerEnd(planes.listener()).listen()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        connecting = asyncio.ensure_future(front.connect())
        await asyncio.sleep(0)
        connecting.cancel()
        assert isinstance(await _outcome(connecting), asyncio.CancelledError)
        await front.link.close()
        await worker.listener.close()
        await planes.close()

    @on_loop
    async def test_close_is_idempotent_and_silent(self) -> None:
        planes = self.make_planes(Limits())
        worker = await WorkerEnd(planes.listener()).listen()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        await front.connect()
        for _ in range(2):
            await front.link.close()
        front.link.send(Abort([1]))
        for _ in range(2):
            await worker.listener.close()
        worker.listener.send(b"nobody", example_step(1))
        assert front.broken == []
        await planes.close()

    @on_loop
    async def test_versions_must_be_adjacent(self) -> None:
        planes = self.make_planes(Limits())
        worker = await WorkerEnd(planes.listener()).listen()
        major, minor = PROTOCOL_VERSION
        for version, fits in (((major, minor + 1), True), ((major, minor + 2), False), ((major + 1, minor), False)):
            peer = self.raw_peer(planes, worker.address)
            await peer.send(join_frames([msgspec.msgpack.encode(Hello("frontend-1", version))]))
            answer = msgspec.msgpack.decode(await peer.receive())[0]
            assert answer["type"] == ("welcome" if fits else "refused"), (version, answer)
            if not fits:
                assert f"protocol {version[0]}.{version[1]} cannot talk" in answer["error"]["message"]
            await peer.close()
        await worker.listener.close()
        await planes.close()

    @on_loop
    async def test_garbage_is_refused_and_hurts_nobody_else(self) -> None:
        planes = self.make_planes(Limits())
        worker = await WorkerEnd(planes.listener()).listen()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        await front.connect()
        hello = msgspec.msgpack.encode(Hello("frontend-2", PROTOCOL_VERSION))
        first_frames = (b"", b"\xc1", b"\x00" * 100, b"\xdd\xff\xff\xff\xff", join_frames([b"\x80"]), b"\x91" * 5000)
        for garbage in (*first_frames, join_frames([msgspec.msgpack.encode(Abort([1]))])):
            peer = self.raw_peer(planes, worker.address)
            await peer.send(garbage)
            assert msgspec.msgpack.decode(await peer.receive())[0]["type"] == "refused", garbage
            await peer.close()
        peer = self.raw_peer(planes, worker.address)
        await peer.send(join_frames([hello]))
        assert msgspec.msgpack.decode(await peer.receive())[0]["type"] == "welcome"
        await peer.send(b"\xc1")
        assert msgspec.msgpack.decode(await peer.receive())[0]["type"] == "refused"
        await eventually(lambda: len(worker.gone) == 1, "the refused peer to be given up")
        await peer.send(join_frames([msgspec.msgpack.encode(Abort([1]))]))
        assert msgspec.msgpack.decode(await peer.receive())[0]["type"] == "refused"
        await peer.close()
        front.link.send(Abort([5]))
        await eventually(lambda: len(worker.frames) == 1, "the honest peer's frame")
        assert front.broken == []
        await front.link.close()
        await worker.listener.close()
        await planes.close()

    @on_loop
    async def test_hello_is_bounded_and_said_once(self) -> None:
        planes = self.make_planes(Limits(max_peers=1))
        worker = await WorkerEnd(planes.listener()).listen()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        await front.connect()
        second = FrontendEnd(planes.link(worker.address, "frontend-2"))
        error = await _failure(second.connect())
        assert isinstance(error, ProtocolError)
        assert "1 frontends are connected already" in str(error)
        await second.link.close()
        await front.link.close()
        await eventually(lambda: len(worker.gone) == 1, "room")
        for name in ("", "x" * 129):
            peer = self.raw_peer(planes, worker.address)
            await peer.send(join_frames([msgspec.msgpack.encode(Hello(name, PROTOCOL_VERSION))]))
            assert msgspec.msgpack.decode(await peer.receive())[0]["type"] == "refused"
            await peer.close()
        await worker.listener.close()
        await planes.close()

    @on_loop
    async def test_idle_connections_live_and_silent_peers_are_given_up(self) -> None:
        planes = self.make_planes(QUICK)
        worker = await WorkerEnd(planes.listener()).listen()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        await front.connect()
        silent = self.raw_peer(planes, worker.address)
        await silent.send(join_frames([msgspec.msgpack.encode(Hello("silent", PROTOCOL_VERSION))]))
        await silent.receive()
        await asyncio.sleep(QUICK.silence_s * 1.5)
        assert worker.gone == [], "its connection lives: it may only be slow"
        await eventually(lambda: len(worker.gone) == 1, "the silent peer to be given up")
        await asyncio.sleep(QUICK.silence_s * 2)
        assert front.broken == []
        front.link.send(Abort([1]))
        await eventually(lambda: len(worker.frames) == 1, "the live one's frame")
        assert len(worker.gone) == 1
        await silent.send(join_frames([msgspec.msgpack.encode(Abort([1]))]))
        (refusal,) = msgspec.msgpack.decode(await silent.receive(), type=list[WorkerFrame])
        assert isinstance(refusal, Refused)
        assert refusal.error.code == WorkerLost.code
        assert "was silent for" in refusal.error.message
        assert "connect again" in refusal.error.message
        await silent.close()
        await front.link.close()
        await worker.listener.close()
        await planes.close()


async def _outcome(task: "asyncio.Future[str]") -> BaseException | None:
    await asyncio.wait([task])
    return asyncio.CancelledError() if task.cancelled() else task.exception()


async def _failure(call: Coroutine[Any, Any, str]) -> BaseException | None:
    return await _outcome(asyncio.ensure_future(call))
