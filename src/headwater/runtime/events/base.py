"""The event plane contract.

A publisher numbers its batches from 0 within an epoch and keeps the last ones for replay. A subscriber gets every
batch of an epoch exactly once and in order; when a gap cannot be replayed it gets a snapshot instead, and goes on
from there. A subscriber that is too slow loses its place, not the publisher's memory.
"""

from collections.abc import Callable
from typing import Protocol

from headwater.protocol.events import EventBatch, EventSnapshot, WorkerEvent

TakeSnapshot = Callable[[], list[WorkerEvent]]
"""Events that rebuild the publisher's present state."""
OnBatch = Callable[[EventBatch], None]
OnSnapshot = Callable[[EventSnapshot], None]


class EventPublisher(Protocol):
    async def open(self, worker_id: str, take_snapshot: TakeSnapshot) -> str:
        """Bind and return the address to publish."""
        ...

    def publish(self, events: list[WorkerEvent]) -> None: ...

    async def close(self) -> None: ...


class EventSubscriber(Protocol):
    async def subscribe(self, address: str, on_batch: OnBatch, on_snapshot: OnSnapshot) -> None:
        """Follow one publisher, beginning with a snapshot."""
        ...

    async def unsubscribe(self, address: str) -> None: ...

    async def close(self) -> None: ...
