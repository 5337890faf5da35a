"""Both request planes against the contract, and what only ZeroMQ can suffer."""

import asyncio

import pytest

from headwater.runtime.cluster_keys import encode_cluster_keys, new_cluster
from headwater.runtime.curve import Membership
from headwater.runtime.endpoints import IpcEndpoints, TcpEndpoints
from headwater.runtime.planes import InprocPlanes, Planes, ZmqPlanes
from headwater.runtime.requests.conformance import RawPeer, RequestPlaneConformance
from headwater.runtime.requests.inproc_transport import InprocDialer
from headwater.runtime.requests.transport import Dialer
from headwater.runtime.requests.zmq_transport import ZmqDialer
from headwater.runtime.wire import Limits


class DialerPeer(RawPeer):
    """A bare dialer."""

    def __init__(self, dialer: Dialer) -> None:
        self.dialer = dialer
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        dialer.open(self.messages.put_nowait, lambda reason: None)

    async def send(self, message: bytes) -> None:
        self.dialer.transmit(message)

    async def receive(self) -> bytes:
        return await asyncio.wait_for(self.messages.get(), 5)

    async def close(self) -> None:
        self.dialer.close()


class TestInprocRequestPlane(RequestPlaneConformance):
    def make_planes(self, limits: Limits) -> Planes:
        return InprocPlanes(limits)

    def raw_peer(self, planes: Planes, address: str) -> RawPeer:
        assert isinstance(planes, InprocPlanes)
        return DialerPeer(InprocDialer(planes.network, address))


class TestZmqIpcRequestPlane(RequestPlaneConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.mktemp("p") / "run"

    def make_planes(self, limits: Limits) -> Planes:
        return ZmqPlanes(IpcEndpoints(self.folder), limits)

    def raw_peer(self, planes: Planes, address: str) -> RawPeer:
        assert isinstance(planes, ZmqPlanes)
        return DialerPeer(ZmqDialer(planes._context, address, Limits()))


class TestZmqCurveRequestPlane(TestZmqIpcRequestPlane):
    def make_planes(self, limits: Limits) -> Planes:
        path = self.folder.parent / "cluster.json"
        path.write_bytes(encode_cluster_keys(new_cluster("here")))
        path.chmod(0o600)
        return ZmqPlanes(TcpEndpoints("127.0.0.1", insecure=False), limits, membership=Membership(path))


class TestZmqTcpRequestPlane(TestZmqIpcRequestPlane):
    def make_planes(self, limits: Limits) -> Planes:
        return ZmqPlanes(TcpEndpoints("127.0.0.1", insecure=False), limits)
