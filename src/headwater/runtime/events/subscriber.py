"""A subscriber to any number of publishers, over any transport."""

import asyncio
from collections.abc import Callable

import msgspec

from headwater.errors import ConfigError, WorkerLost
from headwater.protocol.events import EventSnapshot
from headwater.runtime.events.base import OnBatch, OnSnapshot
from headwater.runtime.events.follower import Follower
from headwater.runtime.events.transport import MakeReceiver, Receiver
from headwater.runtime.events.wire import Ask, Recalled, Snapshot, decode_answer, decode_batch, encode

JOIN_TIMEOUT_S = 10.0
TICK_S = 0.1


class Subscriber:
    """Implements `EventSubscriber`."""

    def __init__(self, make_receiver: MakeReceiver, *, on_close: Callable[[], None] | None = None) -> None:
        self._make_receiver = make_receiver
        self._on_close = on_close
        self._subscriptions: dict[str, _Subscription] = {}
        self._tick_handle: asyncio.TimerHandle | None = None
        self._closed = False

    async def subscribe(self, address: str, on_batch: OnBatch, on_snapshot: OnSnapshot) -> None:
        """Returns after the first snapshot. Raises `WorkerLost` when none comes in time."""
        if self._closed or address in self._subscriptions:
            raise ConfigError(f"cannot subscribe to {address}: {'closed' if self._closed else 'subscribed already'}")
        subscription = _Subscription(self._make_receiver(address), on_batch, on_snapshot)
        self._subscriptions[address] = subscription
        if self._tick_handle is None:
            self._tick_handle = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        try:
            await asyncio.wait_for(subscription.begin(), JOIN_TIMEOUT_S)
        except TimeoutError:
            await self.unsubscribe(address)
            raise WorkerLost(f"no event snapshot from {address} within {JOIN_TIMEOUT_S:g} s") from None
        except BaseException:
            await self.unsubscribe(address)
            raise

    async def unsubscribe(self, address: str) -> None:
        subscription = self._subscriptions.pop(address, None)
        if subscription is not None:
            subscription.end()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        for address in list(self._subscriptions):
            await self.unsubscribe(address)
        if self._on_close is not None:
            self._on_close()

    def _tick(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.tick()
        self._tick_handle = asyncio.get_running_loop().call_later(TICK_S, self._tick)


class _Subscription:
    """One publisher followed."""

    def __init__(self, receiver: Receiver, on_batch: OnBatch, on_snapshot: OnSnapshot) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._on_snapshot = on_snapshot
        self._joined = self._loop.create_future()
        self._follower = Follower(on_batch, self._joined_by, self._ask)
        self._opened = False
        self._asking = False
        self._ended = False
        self.garbage = 0

    async def begin(self) -> None:
        self._receiver.open(self._on_broadcast, self._on_answer)
        self._opened = True
        self._follower.begin(self._loop.time())
        await self._joined

    def tick(self) -> None:
        self._follower.tick(self._loop.time())
        if self._asking and self._follower.resting:
            self._asking = False
            self._receiver.rest()

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            if self._opened:
                self._receiver.close()
            if not self._joined.done():
                self._joined.set_exception(WorkerLost("unsubscribed before the first snapshot"))

    def _joined_by(self, snapshot: EventSnapshot) -> None:
        if not self._joined.done():
            self._joined.set_result(None)
        self._on_snapshot(snapshot)

    def _ask(self, ask: Ask) -> None:
        self._asking = True
        self._receiver.ask(encode(ask))

    def _on_broadcast(self, message: bytes) -> None:
        if self._ended:
            return
        try:
            batch = decode_batch(message)
        except msgspec.DecodeError:
            self.garbage += 1
            return
        self._follower.receive(batch, self._loop.time())

    def _on_answer(self, message: bytes) -> None:
        if self._ended or not self._follower.waits_for_answer:
            return  # nor is it worth decoding, large as it may be
        now = self._loop.time()
        try:
            answer = decode_answer(message)
            batches = [decode_batch(raw) for raw in answer.batches] if isinstance(answer, Recalled) else []
        except msgspec.DecodeError:
            self.garbage += 1
            return
        if isinstance(answer, Snapshot):
            self._follower.snapshot(answer.snapshot, now)
        elif isinstance(answer, Recalled):
            self._follower.recalled(batches, now, more=answer.more)
        else:
            self._follower.forgotten(now)
