"""What every event plane must do. Subclass, provide the fixtures, and let pytest collect the class."""

import asyncio
import random
from dataclasses import dataclass, field

from headwater.clock import RealClock
from headwater.errors import ConfigError, WorkerLost
from headwater.protocol.events import BlocksStored, EventBatch, EventSnapshot, LoadReport, WorkerEvent
from headwater.runtime.conformance import eventually, on_loop
from headwater.runtime.events.base import EventPublisher, EventSubscriber
from headwater.runtime.events.publisher import Publisher
from headwater.runtime.events.subscriber import Subscriber
from headwater.runtime.events.transport import Broadcaster, MakeReceiver, OnMessage, Receiver


def block(number: int) -> bytes:
    return number.to_bytes(16, "little")


@dataclass
class Source:
    """A worker whose state is the set of blocks it holds."""

    publisher: EventPublisher
    blocks: list[bytes] = field(default_factory=list[bytes])
    load: LoadReport = field(default_factory=lambda: LoadReport(0, 0, 0, 100, 100))
    snapshots: int = 0
    address: str = ""

    async def open(self, worker_id: str = "worker-1") -> "Source":
        self.address = await self.publisher.open(worker_id, self._snapshot)
        return self

    def store(self, *numbers: int) -> None:
        events: list[WorkerEvent] = [BlocksStored(block(number)) for number in numbers]
        self.blocks += [block(number) for number in numbers]
        self.publisher.publish(events)

    def _snapshot(self) -> list[WorkerEvent]:
        self.snapshots += 1
        return [*(BlocksStored(found) for found in self.blocks), self.load]


@dataclass
class View:
    """A subscriber's picture, and a check that history was whole and ordered."""

    blocks: list[bytes] = field(default_factory=list[bytes])
    snapshots: list[EventSnapshot] = field(default_factory=list[EventSnapshot])
    batches: list[EventBatch] = field(default_factory=list[EventBatch])
    last: tuple[int, int] = (0, -1)

    def on_snapshot(self, snapshot: EventSnapshot) -> None:
        self.snapshots.append(snapshot)
        self.blocks = [stored.block_ids for stored in snapshot.stored]
        self.last = (snapshot.epoch, snapshot.sequence)

    def on_batch(self, batch: EventBatch) -> None:
        assert (batch.epoch, batch.sequence) == (self.last[0], self.last[1] + 1), "a batch was lost, doubled or moved"
        self.last = (batch.epoch, batch.sequence)
        self.batches.append(batch)
        self.blocks += [event.block_ids for event in batch.events if isinstance(event, BlocksStored)]


class FaultyReceiver:
    """Loses, doubles and reorders broadcasts, and loses answers, by the draw of a seeded generator."""

    def __init__(self, inner: Receiver, rng: random.Random) -> None:
        self._inner = inner
        self._rng = rng
        self._held: bytes | None = None
        self.faults = 0
        self.lose_everything = False

    def open(self, on_broadcast: OnMessage, on_answer: OnMessage) -> None:
        self._deliver = on_broadcast
        self._deliver_answer = on_answer
        self._inner.open(self._on_broadcast, self._on_answer)

    def ask(self, question: bytes) -> None:
        self._inner.ask(question)

    def rest(self) -> None:
        self._inner.rest()

    def close(self) -> None:
        self._inner.close()

    def _on_broadcast(self, message: bytes) -> None:
        draw = self._rng.random()
        if self.lose_everything or draw < 0.15:
            self.faults += 1
            return
        if draw < 0.3 and self._held is None:
            self.faults += 1
            self._held = message
            return
        self._deliver(message)
        if draw > 0.85:
            self.faults += 1
            self._deliver(message)
        if self._held is not None:
            held, self._held = self._held, None
            self._deliver(held)

    def _on_answer(self, message: bytes) -> None:
        if self._rng.random() < 0.2:
            self.faults += 1
            return
        self._deliver_answer(message)


class EventPlaneConformance:
    """The suite."""

    def start(self) -> None:
        """Called on the loop before each check."""
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    def broadcaster(self, former: str | None = None) -> Broadcaster:
        """A publisher's end; at a former address if given one."""
        raise NotImplementedError

    def receiver(self) -> MakeReceiver:
        raise NotImplementedError

    def subscriber(self, make_receiver: MakeReceiver | None = None) -> EventSubscriber:
        return Subscriber(make_receiver or self.receiver())

    def source(self, *, replay_bytes: int = 1 << 20, former: str | None = None) -> Source:
        return Source(Publisher(self.broadcaster(former), RealClock(), replay_bytes=replay_bytes))

    @on_loop
    async def test_begins_with_a_snapshot_then_every_batch_in_order(self) -> None:
        self.start()
        source = await self.source().open("worker-7")
        source.store(1, 2)
        await asyncio.sleep(0.01)
        view, subscriber = View(), self.subscriber()
        await subscriber.subscribe(source.address, view.on_batch, view.on_snapshot)
        assert view.snapshots[0].worker_id == "worker-7"
        assert view.blocks == [block(1), block(2)]
        assert view.snapshots[0].load == source.load
        for number in range(3, 300):
            source.store(number)
            if number % 10 == 0:
                await asyncio.sleep(0)
        await eventually(lambda: view.blocks == source.blocks, "everything")
        assert source.snapshots == 1
        await self._end(subscriber, source)

    @on_loop
    async def test_events_of_one_turn_are_one_batch(self) -> None:
        self.start()
        source, view, subscriber = await self._followed()
        source.store(1)
        source.store(2, 3)
        source.publisher.publish([])
        await eventually(lambda: len(view.blocks) == 3, "the batch")
        assert [len(batch.events) for batch in view.batches] == [3]
        await self._end(subscriber, source)

    @on_loop
    async def test_very_many_events_are_split(self) -> None:
        self.start()
        source, view, subscriber = await self._followed()
        source.store(*range(10_000))
        await eventually(lambda: view.blocks == source.blocks, "all events")
        assert 1 < len(view.batches) <= 10
        await self._end(subscriber, source)

    @on_loop
    async def test_late_and_several_subscribers_agree(self) -> None:
        self.start()
        source, first, subscriber = await self._followed()
        source.store(*range(50))
        late, other = View(), self.subscriber()
        await other.subscribe(source.address, late.on_batch, late.on_snapshot)
        source.store(*range(50, 100))
        await eventually(lambda: first.blocks == late.blocks == source.blocks, "agreement")
        await other.close()
        await self._end(subscriber, source)

    @on_loop
    async def test_one_subscriber_follows_many_publishers(self) -> None:
        self.start()
        sources = [await self.source().open(f"worker-{number}") for number in range(5)]
        views = [View() for _ in sources]
        subscriber = self.subscriber()
        for source, view in zip(sources, views, strict=True):
            await subscriber.subscribe(source.address, view.on_batch, view.on_snapshot)
        for number, source in enumerate(sources):
            source.store(number)
        await eventually(lambda: [v.blocks for v in views] == [s.blocks for s in sources], "all")
        await subscriber.unsubscribe(sources[0].address)
        await subscriber.unsubscribe(sources[0].address)
        for source in sources:
            source.store(99)
        await eventually(lambda: all(len(view.blocks) == 2 for view in views[1:]), "the rest")
        assert len(views[0].blocks) == 1
        await self._end(subscriber, *sources)

    @on_loop
    async def test_loss_doubling_and_reordering_heal(self) -> None:
        for seed in range(3):
            self.start()
            source = await self.source().open()
            faulty: list[FaultyReceiver] = []
            view, subscriber = View(), self.subscriber(self._faulty(faulty, seed))
            await subscriber.subscribe(source.address, view.on_batch, view.on_snapshot)
            for number in range(200):
                source.store(number)
                await asyncio.sleep(0.0005)
            await eventually(lambda: view.blocks == source.blocks, "healing", timeout_s=15.0)  # noqa: B023
            assert faulty[0].faults > 20
            assert source.snapshots <= 3
            await self._end(subscriber, source)

    @on_loop
    async def test_a_lost_last_batch_is_noticed_without_another(self) -> None:
        self.start()
        source = await self.source().open()
        faulty: list[FaultyReceiver] = []
        view, subscriber = View(), self.subscriber(self._faulty(faulty, 0))
        await subscriber.subscribe(source.address, view.on_batch, view.on_snapshot)
        faulty[0].lose_everything = True
        source.store(1)
        await asyncio.sleep(0.05)
        faulty[0].lose_everything = False
        await eventually(lambda: view.blocks == source.blocks, "the lost batch")
        assert source.snapshots == 1
        await self._end(subscriber, source)

    @on_loop
    async def test_what_cannot_be_replayed_comes_as_a_snapshot(self) -> None:
        self.start()
        source = await self.source(replay_bytes=2000).open()
        faulty: list[FaultyReceiver] = []
        view, subscriber = View(), self.subscriber(self._faulty(faulty, 1))
        await subscriber.subscribe(source.address, view.on_batch, view.on_snapshot)
        faulty[0].lose_everything = True
        for number in range(200):
            source.store(number)
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        faulty[0].lose_everything = False
        source.store(200)
        await eventually(lambda: view.blocks == source.blocks, "healing")
        assert len(view.snapshots) >= 2
        await self._end(subscriber, source)

    @on_loop
    async def test_a_publisher_that_begins_anew_is_followed(self) -> None:
        self.start()
        source, view, subscriber = await self._followed()
        source.store(*range(10))
        await eventually(lambda: view.blocks == source.blocks, "the first life")
        await source.publisher.close()
        again = await self._reopened(source.address)
        again.store(77)
        await eventually(lambda: view.blocks == again.blocks, "the second life")
        assert view.snapshots[-1].epoch != view.snapshots[0].epoch
        again.store(78)
        await eventually(lambda: view.blocks == [block(77), block(78)], "its events")
        await self._end(subscriber, again)

    @on_loop
    async def test_unsubscribing_while_joining_ends_the_wait(self) -> None:
        self.start()
        source = await self.source().open()
        await source.publisher.close()
        view, subscriber = View(), self.subscriber()
        joining = asyncio.ensure_future(subscriber.subscribe(source.address, view.on_batch, view.on_snapshot))
        await asyncio.sleep(0.02)
        await subscriber.unsubscribe(source.address)
        await asyncio.wait([joining])
        assert isinstance(joining.exception(), WorkerLost)
        await subscriber.close()
        await source.publisher.close()
        await self.stop()

    @on_loop
    async def test_close_is_idempotent(self) -> None:
        self.start()
        source, _, subscriber = await self._followed()
        for _ in range(2):
            await subscriber.close()
            await source.publisher.close()
        source.store(1)
        unopened, unused = self.source(), self.subscriber()
        await unopened.publisher.close()
        await unused.close()
        await self.stop()

    async def _followed(self) -> tuple[Source, View, EventSubscriber]:
        source, view, subscriber = await self.source().open(), View(), self.subscriber()
        await subscriber.subscribe(source.address, view.on_batch, view.on_snapshot)
        return source, view, subscriber

    async def _reopened(self, address: str) -> Source:
        """A new publisher at the address of one that closed: it may take a moment to become free."""
        for _ in range(1000):
            source = self.source(former=address)
            try:
                await source.open()
            except ConfigError:
                await asyncio.sleep(0.02)
            else:
                assert source.address == address
                return source
        raise AssertionError(f"{address} did not become free")

    def _faulty(self, made: list[FaultyReceiver], seed: int) -> MakeReceiver:
        inner = self.receiver()

        def make(address: str) -> Receiver:
            made.append(FaultyReceiver(inner(address), random.Random(seed)))
            return made[-1]

        return make

    async def _end(self, subscriber: EventSubscriber, *sources: Source) -> None:
        await subscriber.close()
        for source in sources:
            await source.publisher.close()
        await self.stop()
