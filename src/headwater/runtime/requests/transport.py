"""What moves messages for the request plane. The protocol itself (`link`, `listener`) is the same over each.

Transports know bytes and connections, not frames. All calls and callbacks happen on the event loop.
"""

from collections.abc import Callable
from typing import Protocol


class QueueFull(Exception):
    """The peer does not read."""


class PeerGone(Exception):
    """There is no such connection any more."""


OnMessage = Callable[[bytes], None]
OnPeerMessage = Callable[[bytes, bytes], None]
"""(peer, message)"""
OnLost = Callable[[str], None]
"""Why the connection is lost. What had arrived before has been delivered."""
OnPeerLost = Callable[[bytes], None]


class Dialer(Protocol):
    """One connection, from the side that opens it."""

    address: str

    def open(self, on_message: OnMessage, on_lost: OnLost) -> None:
        """Begin to connect; messages may be sent at once."""
        ...

    def transmit(self, message: bytes) -> None:
        """Raises `QueueFull`."""
        ...

    def close(self) -> None: ...


class Acceptor(Protocol):
    """Many connections, from the side that is dialled."""

    def open(self, on_message: OnPeerMessage, on_lost: OnPeerLost) -> str:
        """Bind; returns the address to dial."""
        ...

    def transmit(self, peer: bytes, message: bytes) -> None:
        """Raises `QueueFull` or `PeerGone`."""
        ...

    def flushed(self) -> None:
        """A round of `transmit` is over."""
        ...

    def close(self) -> None: ...
