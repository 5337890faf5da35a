"""The request plane inside one process. Messages are encoded all the same, so nothing is shared by accident."""

import asyncio
import itertools
from dataclasses import dataclass, field

from headwater.runtime.requests.transport import OnLost, OnMessage, OnPeerLost, OnPeerMessage, PeerGone


@dataclass(slots=True)
class InprocNetwork:
    """The addresses of one process's planes."""

    acceptors: "dict[str, InprocAcceptor]" = field(default_factory=dict)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def sever(self, address: str) -> None:
        """Break every connection to this address, as the death of its process would."""
        acceptor = self.acceptors.get(address)
        if acceptor is not None:
            acceptor.close()


class InprocDialer:
    """Implements `Dialer`."""

    def __init__(self, network: InprocNetwork, address: str) -> None:
        self._network = network
        self._acceptor: InprocAcceptor | None = None
        self._closed = False
        self.peer = b"peer-%d" % next(network.numbers)
        self.address = address

    def open(self, on_message: OnMessage, on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_lost = on_lost
        self._acceptor = self._network.acceptors.get(self.address)
        if self._acceptor is None:
            self._loop.call_soon(self.lose, "nobody listens there")
        else:
            self._acceptor.dialers[self.peer] = self

    def transmit(self, message: bytes) -> None:
        if self._acceptor is not None and not self._closed:
            self._loop.call_soon(self._acceptor.deliver, self.peer, message)

    def deliver(self, message: bytes) -> None:
        if not self._closed:
            self._on_message(message)

    def lose(self, reason: str) -> None:
        if not self._closed:
            self._on_lost(reason)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._acceptor is not None and self._acceptor.dialers.pop(self.peer, None) is not None:
                self._loop.call_soon(self._acceptor.lose, self.peer)


class InprocAcceptor:
    """Implements `Acceptor`."""

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network
        self._closed = False
        self.dialers: dict[bytes, InprocDialer] = {}

    def open(self, on_message: OnPeerMessage, on_lost: OnPeerLost) -> str:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_lost = on_lost
        self.address = f"inproc://requests/{next(self._network.numbers)}"
        self._network.acceptors[self.address] = self
        return self.address

    def transmit(self, peer: bytes, message: bytes) -> None:
        dialer = self.dialers.get(peer)
        if dialer is None:
            raise PeerGone
        self._loop.call_soon(dialer.deliver, message)

    def flushed(self) -> None:
        """Nothing is held back."""

    def deliver(self, peer: bytes, message: bytes) -> None:
        if peer in self.dialers and not self._closed:
            self._on_message(peer, message)

    def lose(self, peer: bytes) -> None:
        if not self._closed:
            self._on_lost(peer)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        del self._network.acceptors[self.address]
        for dialer in self.dialers.values():
            self._loop.call_soon(dialer.lose, "the worker closed the connection or died")
        self.dialers.clear()
