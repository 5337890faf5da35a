"""What moves messages for the event plane. The protocol (`publisher`, `subscriber`, `follower`) is the same over each.

Broadcasts may be lost; asking is one question and one answer, either of which may be lost as well.
"""

from collections.abc import Callable
from typing import Protocol

OnAsk = Callable[[bytes, bytes], None]
"""(peer, question)"""
OnMessage = Callable[[bytes], None]


class Broadcaster(Protocol):
    """A publisher's end."""

    def open(self, on_ask: OnAsk) -> str:
        """Bind; returns the address to publish."""
        ...

    def broadcast(self, message: bytes) -> None: ...

    def answer(self, peer: bytes, message: bytes) -> None:
        """Lost when the peer is gone or does not read."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """A subscriber's end of one publisher."""

    def open(self, on_broadcast: OnMessage, on_answer: OnMessage) -> None:
        """Raises `ConfigError` for an address that cannot be understood."""
        ...

    def ask(self, question: bytes) -> None: ...

    def rest(self) -> None:
        """No question will follow soon: what is only needed for asking may go."""
        ...

    def close(self) -> None: ...


MakeReceiver = Callable[[str], Receiver]
"""Address to receiver."""
