"""Makes the ends of the request and event planes, so that who uses them need not know what carries them."""

from pathlib import Path
from typing import Protocol

from headwater.clock import RealClock
from headwater.config.schema import RuntimeConfig
from headwater.runtime.curve import Membership
from headwater.runtime.endpoints import Endpoints, parse_bind
from headwater.runtime.events.base import EventPublisher, EventSubscriber
from headwater.runtime.events.inproc_transport import InprocAir, InprocBroadcaster, InprocReceiver
from headwater.runtime.events.publisher import Publisher
from headwater.runtime.events.subscriber import Subscriber
from headwater.runtime.events.zmq_transport import ZmqBroadcaster, ZmqTuner
from headwater.runtime.requests.base import RequestListener, WorkerLink
from headwater.runtime.requests.inproc_transport import InprocAcceptor, InprocDialer, InprocNetwork
from headwater.runtime.requests.link import Link
from headwater.runtime.requests.listener import Listener
from headwater.runtime.requests.zmq_transport import ZmqAcceptor, ZmqDialer
from headwater.runtime.wire import Limits
from headwater.runtime.zeromq import ZmqContext


class Planes(Protocol):
    """One per process (`ZmqPlanes`), or one per test and simulated cluster (`InprocPlanes`)."""

    def listener(self) -> RequestListener: ...

    def link(self, address: str, frontend_id: str) -> WorkerLink: ...

    def publisher(self) -> EventPublisher: ...

    def subscriber(self) -> EventSubscriber: ...

    async def close(self) -> None:
        """To be called after everything made here was closed."""
        ...


class ZmqPlanes:
    """Between processes. `endpoints` says where listeners bind; links go wherever the address says, and with a
    membership only to members."""

    def __init__(
        self, endpoints: Endpoints, limits: Limits | None = None, *, membership: Membership | None = None
    ) -> None:
        self._context = ZmqContext(membership)
        self._clock = RealClock()
        self._endpoints = endpoints
        self._limits = limits or Limits()

    def listener(self) -> Listener:
        return Listener(ZmqAcceptor(self._context, self._endpoints, self._limits), self._limits)

    def link(self, address: str, frontend_id: str) -> Link:
        return Link(ZmqDialer(self._context, address, self._limits), frontend_id, self._limits)

    def publisher(self) -> Publisher:
        return Publisher(ZmqBroadcaster(self._context, self._endpoints, self._limits), self._clock)

    def subscriber(self) -> Subscriber:
        tuner = ZmqTuner(self._context, self._limits)
        return Subscriber(tuner.receiver, on_close=tuner.close)

    async def close(self) -> None:
        await self._context.term()


def open_planes(config: RuntimeConfig) -> ZmqPlanes:
    """As the configuration says. Raises `ConfigError`, also for an address that anybody could reach."""
    membership = Membership(Path(config.cluster_key).expanduser()) if config.cluster_key else None
    endpoints = parse_bind(config.bind, insecure=config.insecure or membership is not None)
    return ZmqPlanes(endpoints, membership=membership)


class InprocPlanes:
    """Inside one process and one event loop."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._clock = RealClock()
        self.network = InprocNetwork()
        self.air = InprocAir()

    def listener(self) -> Listener:
        return Listener(InprocAcceptor(self.network), self._limits)

    def link(self, address: str, frontend_id: str) -> Link:
        return Link(InprocDialer(self.network, address), frontend_id, self._limits)

    def publisher(self) -> Publisher:
        return Publisher(InprocBroadcaster(self.air), self._clock)

    def subscriber(self) -> Subscriber:
        return Subscriber(lambda address: InprocReceiver(self.air, address))

    async def close(self) -> None:
        """Nothing is held."""
