"""The event plane inside one process. Messages are encoded all the same, so nothing is shared by accident."""

import asyncio
import itertools
from dataclasses import dataclass, field

from headwater.runtime.events.transport import OnAsk, OnMessage


@dataclass(slots=True)
class InprocAir:
    """The event addresses of one process's planes."""

    broadcasters: "dict[str, InprocBroadcaster]" = field(default_factory=dict)
    receivers: "dict[str, dict[bytes, InprocReceiver]]" = field(default_factory=dict)
    """Who listens to which address, whether or not anybody broadcasts there."""
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)


class InprocBroadcaster:
    """Implements `Broadcaster`."""

    def __init__(self, air: InprocAir) -> None:
        self._air = air
        self.address = f"inproc://events/{next(air.numbers)}"

    def open(self, on_ask: OnAsk) -> str:
        self._loop = asyncio.get_running_loop()
        self.on_ask = on_ask
        self._air.broadcasters[self.address] = self
        return self.address

    def broadcast(self, message: bytes) -> None:
        for receiver in self._air.receivers.get(self.address, {}).values():
            self._loop.call_soon(receiver.on_broadcast, message)

    def answer(self, peer: bytes, message: bytes) -> None:
        receiver = self._air.receivers.get(self.address, {}).get(peer)
        if receiver is not None:
            self._loop.call_soon(receiver.on_answer, message)

    def close(self) -> None:
        self._air.broadcasters.pop(self.address, None)


class InprocReceiver:
    """Implements `Receiver`."""

    def __init__(self, air: InprocAir, address: str) -> None:
        self._air = air
        self._address = address
        self._name = b"receiver-%d" % next(air.numbers)

    def open(self, on_broadcast: OnMessage, on_answer: OnMessage) -> None:
        self._loop = asyncio.get_running_loop()
        self.on_broadcast = on_broadcast
        self.on_answer = on_answer
        self._air.receivers.setdefault(self._address, {})[self._name] = self

    def ask(self, question: bytes) -> None:
        broadcaster = self._air.broadcasters.get(self._address)
        if broadcaster is not None:
            self._loop.call_soon(broadcaster.on_ask, self._name, question)

    def rest(self) -> None:
        """Nothing is held for asking."""

    def close(self) -> None:
        listeners = self._air.receivers.get(self._address, {})
        listeners.pop(self._name, None)
        if not listeners:
            self._air.receivers.pop(self._address, None)
