"""Both event planes against the contract."""

import asyncio

import pytest

from headwater.runtime.cluster_keys import encode_cluster_keys, new_cluster, split_key
from headwater.runtime.conformance import eventually, on_loop
from headwater.runtime.curve import Membership
from headwater.runtime.endpoints import Endpoints, IpcEndpoints, TcpEndpoints
from headwater.runtime.events.conformance import EventPlaneConformance, View
from headwater.runtime.events.inproc_transport import InprocAir, InprocBroadcaster, InprocReceiver
from headwater.runtime.events.transport import Broadcaster, MakeReceiver
from headwater.runtime.events.zmq_transport import ZmqBroadcaster, ZmqTuner
from headwater.runtime.wire import Limits
from headwater.runtime.zeromq import ZmqContext


class TestInprocEventPlane(EventPlaneConformance):
    def start(self) -> None:
        self.air = InprocAir()

    async def stop(self) -> None:
        assert not self.air.broadcasters
        assert not self.air.receivers

    def broadcaster(self, former: str | None = None) -> Broadcaster:
        made = InprocBroadcaster(self.air)
        made.address = former or made.address
        return made

    def receiver(self) -> MakeReceiver:
        return lambda address: InprocReceiver(self.air, address)


class Former:
    """Endpoints used before, in order."""

    def __init__(self, address: str) -> None:
        self.left = [split_key(part)[0] for part in address.split("#")]

    def new(self, purpose: str) -> str:
        return self.left.pop(0)


class TestZmqIpcEventPlane(EventPlaneConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.mktemp("p") / "run"

    def endpoints(self) -> Endpoints:
        return IpcEndpoints(self.folder)

    def membership(self) -> Membership | None:
        return None

    def start(self) -> None:
        self.context = ZmqContext(self.membership())
        self.tuners: list[ZmqTuner] = []

    async def stop(self) -> None:
        for tuner in self.tuners:
            tuner.close()
        assert not self.context._sockets
        await self.context.term()

    def broadcaster(self, former: str | None = None) -> Broadcaster:
        endpoints = self.endpoints() if former is None else Former(former)
        return ZmqBroadcaster(self.context, endpoints, Limits())  # type: ignore[arg-type]

    def receiver(self) -> MakeReceiver:
        self.tuners.append(ZmqTuner(self.context, Limits()))
        return self.tuners[-1].receiver

    @on_loop
    async def test_a_publisher_that_was_left_sends_nothing_more(self) -> None:
        self.start()
        left, followed = [await self.source().open(name) for name in ("worker-1", "worker-2")]
        subscriber, view, last_words = self.subscriber(), View(), View()
        await subscriber.subscribe(left.address, last_words.on_batch, last_words.on_snapshot)
        await subscriber.subscribe(followed.address, view.on_batch, view.on_snapshot)
        await eventually(lambda: bool(view.snapshots), "it is followed")
        await subscriber.unsubscribe(left.address)
        for number in range(20):
            left.store(number)
            followed.store(number)
            await asyncio.sleep(0.005)
        await eventually(lambda: view.blocks == followed.blocks, "what the other one says")
        assert self.tuners[-1].foreign == 0
        await self._end(subscriber, left, followed)


class TestZmqCurveEventPlane(TestZmqIpcEventPlane):
    def membership(self) -> Membership | None:
        path = self.folder.parent / "cluster.json"
        path.write_bytes(encode_cluster_keys(new_cluster("here")))
        path.chmod(0o600)
        return Membership(path)


class TestZmqTcpEventPlane(TestZmqIpcEventPlane):
    def endpoints(self) -> Endpoints:
        return TcpEndpoints("127.0.0.1", insecure=False)
