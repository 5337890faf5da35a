"""What only sockets can suffer: bytes that are no ZeroMQ, peers that do not read, descriptors used again."""

import asyncio
import os
import socket
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.backend

from headwater.errors import ConfigError, HeadwaterError, ProtocolError, WorkerLost
from headwater.protocol import PROTOCOL_VERSION
from headwater.protocol.frames import Abort, Hello, Pong, Submit, Welcome, WorkerFrame
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.endpoints import IpcEndpoints, parse_bind
from headwater.runtime.planes import ZmqPlanes
from headwater.runtime.requests.conformance import FrontendEnd, WorkerEnd, example_request, example_step
from headwater.runtime.wire import Limits, join_frames
from headwater.runtime.zeromq import ROUTER, ZmqContext

SMALL = Limits(queue_messages=5, linger_s=0.1)
HELLO = join_frames([msgspec.msgpack.encode(Hello("raw", PROTOCOL_VERSION))])


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("z") / "run"


def encoded(*frames: WorkerFrame) -> bytes:
    return join_frames([msgspec.msgpack.encode(frame) for frame in frames])


class MutePeer:
    """A bare DEALER that is read only on demand."""

    def __init__(self, context: ZmqContext, address: str, kind: int = int(zmq.DEALER)) -> None:
        self.context = context
        self.socket = context.socket(kind, SMALL)
        self.socket.connect(address)

    async def receive(self) -> bytes:
        while True:
            try:
                return self.socket.recv(1)
            except zmq.Again:
                await asyncio.sleep(0.002)

    def close(self) -> None:
        self.context.close(self.socket)


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f\x03" + b"x" * 500, b"\0" * 70]
)
@pytest.mark.parametrize("bind", ["ipc", "127.0.0.1", "::1"])
def test_bytes_that_are_no_zeromq_hurt_nobody(folder: Path, junk: bytes, bind: str) -> None:
    async def check() -> None:
        endpoints = parse_bind(bind, run_folder=folder)
        planes = ZmqPlanes(endpoints)
        worker = await WorkerEnd(planes.listener()).listen()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        await front.connect()
        for _ in range(5):
            await asyncio.to_thread(_send_junk, worker.address, junk)
        front.link.send(Abort([1]))
        await eventually(lambda: len(worker.frames) == 1, "the honest frame")
        assert worker.gone == []
        acceptor = worker.listener._acceptor  # type: ignore[attr-defined]
        await eventually(lambda: len(acceptor._live) == 1, "the junk's connections to be forgotten")
        await front.link.close()
        await worker.listener.close()
        await planes.close()

    run_leak_checked(check())


def _send_junk(address: str, junk: bytes) -> None:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(rest)
    else:
        host, _, port = rest.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)))
    with connection:
        connection.sendall(junk)


def test_messages_of_several_parts_are_refused(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        worker = await WorkerEnd(planes.listener()).listen()
        peer = MutePeer(planes._context, worker.address)
        peer.socket.send(HELLO, zmq.SNDMORE)
        peer.socket.send(b"more", zmq.SNDMORE)
        peer.socket.send(b"and more")
        assert msgspec.msgpack.decode(await peer.receive())[0]["type"] == "refused"
        peer.socket.send(HELLO)
        assert msgspec.msgpack.decode(await peer.receive())[0]["type"] == "welcome"
        peer.close()
        await eventually(lambda: len(worker.gone) == 1, "the end")
        await worker.listener.close()
        await planes.close()

    run_leak_checked(check())


def test_a_frontend_that_does_not_read_is_given_up(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder), SMALL)
        worker = await WorkerEnd(planes.listener()).listen()
        front = FrontendEnd(planes.link(worker.address, "frontend-1"))
        await front.connect()
        mute = MutePeer(planes._context, worker.address)
        mute.socket.send(HELLO)
        await mute.receive()
        mute.socket.send(join_frames([msgspec.msgpack.encode(Abort([1]))]))
        await eventually(lambda: len(worker.frames) == 1, "its frame")
        peer = worker.frames[0][0]
        sent = 0
        frame = example_step(*range(500))
        while not worker.gone and sent < 20_000:
            worker.listener.send(peer, frame)
            sent += 1
            await asyncio.sleep(0)
        assert worker.gone == [peer]
        assert sent < 5000
        worker.listener.send(peer, frame)
        await asyncio.sleep(0.02)
        assert worker.gone == [peer]
        front.link.send(Abort([2]))
        await eventually(lambda: len(worker.frames) == 2, "the other frontend's frame")
        mute.close()
        await front.link.close()
        await worker.listener.close()
        await planes.close()

    run_leak_checked(check())


class FakeWorker:
    """A bare ROUTER that answers by hand."""

    def __init__(self, planes: ZmqPlanes, folder: Path) -> None:
        self.context = planes._context
        self.socket = self.context.socket(ROUTER, SMALL)
        folder.mkdir(mode=0o700, exist_ok=True)
        self.address = f"ipc://{folder}/fake"
        self.socket.bind(self.address)

    async def answer(self, message: bytes) -> bytes:
        """To the next frame that comes; returns the peer."""
        while True:
            try:
                peer = self.socket.recv(1)
                break
            except zmq.Again:
                await asyncio.sleep(0.002)
        self.socket.recv(1)
        self.send(peer, message)
        return peer

    def send(self, peer: bytes, message: bytes) -> None:
        self.socket.send(peer, zmq.SNDMORE)
        self.socket.send(message)

    def close(self) -> None:
        self.context.close(self.socket)


def test_a_worker_that_does_not_read_is_given_up(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder), SMALL)
        fake = FakeWorker(planes, folder)
        front = FrontendEnd(planes.link(fake.address, "frontend-1"))
        connecting = asyncio.ensure_future(front.connect())
        await fake.answer(encoded(Welcome("w", PROTOCOL_VERSION)))
        assert await connecting == "w"
        sent = 0
        while not front.broken and sent < 20_000:
            front.link.send(Submit([example_request(1, tokens=2000)]))
            sent += 1
            await asyncio.sleep(0)
        assert sent < 5000
        assert [type(error) for error in front.broken] == [WorkerLost]
        assert "does not read" in str(front.broken[0])
        await front.link.close()
        fake.close()
        await planes.close()

    run_leak_checked(check())


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (b"\xc1", "cannot be understood"),
        (b"", "cannot be understood"),
        (encoded(Pong(1)), "without a welcome"),
        (encoded(example_step(1)), "without a welcome"),
        (encoded(Welcome("w", (PROTOCOL_VERSION[0] + 1, 0))), "cannot talk"),
        (encoded(Welcome("w", (PROTOCOL_VERSION[0], PROTOCOL_VERSION[1] + 2))), "cannot talk"),
    ],
)
def test_a_worker_that_begins_wrongly_is_not_connected(folder: Path, first: bytes, words: str) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        fake = FakeWorker(planes, folder)
        front = FrontendEnd(planes.link(fake.address, "frontend-1"))
        connecting = asyncio.ensure_future(front.connect())
        await fake.answer(first)
        with pytest.raises(ProtocolError, match=words):
            await connecting
        assert front.broken == []
        await front.link.close()
        fake.close()
        await planes.close()

    run_leak_checked(check())


def test_a_worker_that_turns_to_garbage_breaks_the_link(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        fake = FakeWorker(planes, folder)
        front = FrontendEnd(planes.link(fake.address, "frontend-1"))
        connecting = asyncio.ensure_future(front.connect())
        peer = await fake.answer(encoded(Welcome("w", PROTOCOL_VERSION)))
        await connecting
        fake.send(peer, encoded(example_step(1)))
        fake.send(peer, os.urandom(100))
        fake.send(peer, encoded(example_step(2)))
        await eventually(lambda: bool(front.broken), "the break")
        assert front.frames == [example_step(1)]
        assert [type(error) for error in front.broken] == [ProtocolError]
        await front.link.close()
        fake.close()
        await planes.close()

    run_leak_checked(check())


def test_a_worker_that_never_answers_is_given_up_in_time(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        fake = FakeWorker(planes, folder)
        front = FrontendEnd(planes.link(fake.address, "frontend-1"))
        with pytest.raises(WorkerLost, match=r"did not answer within 0\.05 s"):
            await front.connect(timeout_s=0.05)
        with pytest.raises(ProtocolError, match="connected once"):
            await front.connect()
        await front.link.close()
        fake.close()
        await planes.close()

    run_leak_checked(check())


def test_an_address_that_is_none_is_refused(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        for address in ("nonsense", "http://x", "tcp://", ""):
            front = FrontendEnd(planes.link(address, "frontend-1"))
            with pytest.raises(HeadwaterError):
                await front.connect()
            await front.link.close()
        subscriber = planes.subscriber()
        for address in ("nonsense", "ipc:///x", "http://a#http://b"):
            with pytest.raises(ConfigError):
                await subscriber.subscribe(address, lambda batch: None, lambda snapshot: None)
        await subscriber.close()
        await planes.close()

    run_leak_checked(check())


def test_descriptors_are_used_again_and_peers_never_mixed_up(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        worker = await WorkerEnd(planes.listener()).listen()
        for number in range(60):
            front = FrontendEnd(planes.link(worker.address, f"frontend-{number}"))
            await front.connect()
            front.link.send(Abort([number]))
            await eventually(lambda n=number: len(worker.frames) == n + 1, "its frame")  # type: ignore[misc]
            await front.link.close()
        await eventually(lambda: len(worker.gone) == 60, "all to leave")
        assert worker.gone == [peer for peer, _ in worker.frames]
        acceptor = worker.listener._acceptor  # type: ignore[attr-defined]
        assert not acceptor._peer_by_fd
        assert not acceptor._known
        assert not acceptor._live
        await worker.listener.close()
        await planes.close()

    run_leak_checked(check())


class LateWord:
    """A socket on which something is still read from a peer whose descriptor another one has by now."""

    more, bytes = False, b""

    def __init__(self, peer: bytes, fd: int) -> None:
        self._parts = [peer, self]
        self._fd = fd

    def recv(self, _flags: int, _copy: bool = True) -> object:
        return self._parts.pop(0)

    def get(self, _option: int) -> int:
        return self._fd


def test_the_late_word_of_a_peer_that_is_gone_costs_its_successor_nothing(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        worker = await WorkerEnd(planes.listener()).listen()
        first, second = (FrontendEnd(planes.link(worker.address, f"frontend-{number}")) for number in range(2))
        await first.connect()
        first.link.send(Abort([1]))
        await eventually(lambda: len(worker.frames) == 1, "its frame")
        await first.link.close()
        await eventually(lambda: len(worker.gone) == 1, "it to leave")
        await second.connect()
        acceptor = worker.listener._acceptor  # type: ignore[attr-defined]
        ((fd, peer),) = acceptor._peer_by_fd.items()
        socket, acceptor._socket = acceptor._socket, LateWord(worker.gone[0], fd)
        acceptor._receive()
        acceptor._socket = socket
        assert acceptor._peer_by_fd == {fd: peer}
        assert len(worker.gone) == 1
        second.link.send(Abort([2]))
        await eventually(lambda: len(worker.frames) == 2, "the living one's frame")
        assert worker.frames[1][0] == peer
        await second.link.close()
        await worker.listener.close()
        await planes.close()

    run_leak_checked(check())


def test_sockets_have_no_name_left_after_a_close(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        worker = await WorkerEnd(planes.listener()).listen()
        publisher = planes.publisher()
        await publisher.open("w", list)
        assert len(os.listdir(folder)) == 3
        await worker.listener.close()
        await publisher.close()
        await planes.close()
        assert os.listdir(folder) == []

    run_leak_checked(check())


def test_closing_planes_closes_what_was_forgotten(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        planes._context.socket(ROUTER, Limits())
        await planes.close()

    run_leak_checked(check())


def test_an_error_in_a_callback_does_not_stop_the_others(folder: Path) -> None:
    async def check() -> None:
        planes = ZmqPlanes(IpcEndpoints(folder))
        worker = await WorkerEnd(planes.listener()).listen()
        loop = asyncio.get_running_loop()
        errors: list[BaseException] = []
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        seen: list[WorkerFrame] = []

        def stumble(frame: WorkerFrame) -> None:
            seen.append(frame)
            if len(seen) == 1:
                raise ValueError("a bug")

        link = planes.link(worker.address, "frontend-1")
        await link.connect(stumble, lambda error: None, 5)
        link.send(Abort([1]))
        await eventually(lambda: len(worker.frames) == 1, "the frame")
        for number in range(3):
            worker.listener.send(worker.frames[0][0], example_step(number))
            await asyncio.sleep(0)
        await eventually(lambda: len(seen) == 3, "all frames")
        assert [str(error) for error in errors] == ["a bug"]
        await link.close()
        await worker.listener.close()
        await planes.close()

    run_leak_checked(check())
