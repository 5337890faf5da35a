"""A publisher of events, over any transport.

Events published in one turn of the loop leave as one batch (more only when they are very many). The last batches are
kept for replay within a bound of bytes. Snapshots are shared by all who ask at the same state, and taken so rarely
that they cost at most a twentieth of the loop's time.
"""

import asyncio
import logging
import time
from collections.abc import Iterator

import msgspec

from headwater.clock import Clock
from headwater.protocol.events import BlocksStored, EventBatch, EventSnapshot, LoadReport, WorkerEvent
from headwater.runtime.events.base import TakeSnapshot
from headwater.runtime.events.ring import ReplayRing
from headwater.runtime.events.transport import Broadcaster
from headwater.runtime.events.wire import Answer, Forgotten, Join, Recall, Recalled, Snapshot, decode_ask, encode

_log = logging.getLogger(__name__)

REPLAY_BYTES = 16 << 20
ANSWER_BYTES = 1 << 20
HEARTBEAT_S = 0.5
MAX_WAITING_FOR_SNAPSHOT = 4096
_MAX_BATCH_EVENTS = 4096
_MAX_BATCH_IDS_BYTES = 4 << 20
_SNAPSHOT_SHARE = 0.05


class Publisher:
    """Implements `EventPublisher`."""

    def __init__(self, broadcaster: Broadcaster, clock: Clock, *, replay_bytes: int = REPLAY_BYTES) -> None:
        self._broadcaster = broadcaster
        self._clock = clock
        self._ring = ReplayRing(replay_bytes)
        self._epoch = time.time_ns()
        self._pending: list[WorkerEvent] = []
        self._flush_scheduled = False
        self._waiting: set[bytes] = set()
        """Peers that asked for a snapshot."""
        self._snapshot_at: tuple[int, bytes] | None = None
        """The last snapshot, and what the ring's end was when it was taken."""
        self._next_snapshot = 0.0
        self._snapshot_timer: asyncio.TimerHandle | None = None
        self._beaten_at = -1
        """The ring's end at the last heartbeat."""
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.garbage = 0
        """Questions that could not be understood."""

    async def open(self, worker_id: str, take_snapshot: TakeSnapshot) -> str:
        self._loop = asyncio.get_running_loop()
        self._worker_id = worker_id
        self._take_snapshot = take_snapshot
        address = self._broadcaster.open(self._on_ask)
        self._heartbeat_timer = self._loop.call_later(HEARTBEAT_S, self._heartbeat)
        return address

    def publish(self, events: list[WorkerEvent]) -> None:
        if events and not self._closed:
            self._pending += events
            self._schedule_flush()

    async def close(self) -> None:
        if self._closed:
            return
        self._flush_events()
        self._closed = True
        for timer in (self._heartbeat_timer, self._snapshot_timer):
            if timer is not None:
                timer.cancel()
        if self._heartbeat_timer is not None:
            self._broadcaster.close()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if not self._closed:
            self._flush_events()
            self._answer_waiting()

    def _flush_events(self) -> None:
        pending, self._pending = self._pending, []
        for events in _split(pending):
            message = encode(self._batch(self._ring.end, events))
            self._ring.append(message)
            self._broadcaster.broadcast(message)

    def _batch(self, sequence: int, events: list[WorkerEvent]) -> EventBatch:
        return EventBatch(self._worker_id, self._epoch, sequence, self._clock.epoch(), events)

    def _heartbeat(self) -> None:
        """Subscribers that missed the last batch of a burst would not know otherwise."""
        self._snapshot_at = None
        if self._beaten_at == self._ring.end:
            self._broadcaster.broadcast(encode(self._batch(self._ring.end - 1, [])))
        self._beaten_at = self._ring.end
        self._heartbeat_timer = self._loop.call_later(HEARTBEAT_S, self._heartbeat)

    def _on_ask(self, peer: bytes, question: bytes) -> None:
        try:
            ask = decode_ask(question)
        except msgspec.DecodeError:
            self.garbage += 1
            return
        match ask:
            case Join() if len(self._waiting) < MAX_WAITING_FOR_SNAPSHOT:
                self._waiting.add(peer)
                self._schedule_flush()
            case Recall():
                self._broadcaster.answer(peer, encode(self._recall(ask)))

    def _recall(self, ask: Recall) -> Answer:
        found = self._ring.recall(ask.first, ANSWER_BYTES) if ask.epoch == self._epoch else None
        if found is None:
            return Forgotten()
        return Recalled([msgspec.Raw(batch) for batch in found], more=ask.first + len(found) < self._ring.end)

    def _answer_waiting(self) -> None:
        if not self._waiting or self._snapshot_timer is not None:
            return
        if self._snapshot_at is None or self._snapshot_at[0] != self._ring.end:
            wait_s = self._next_snapshot - self._loop.time()
            if wait_s > 0:
                self._snapshot_timer = self._loop.call_later(wait_s, self._snapshot_due)
                return
            self._snapshot_at = (self._ring.end, self._encode_snapshot())
        message = self._snapshot_at[1]
        for peer in self._waiting:
            self._broadcaster.answer(peer, message)
        self._waiting.clear()

    def _snapshot_due(self) -> None:
        self._snapshot_timer = None
        self._flush()

    def _encode_snapshot(self) -> bytes:
        started = time.thread_time()
        events = self._take_snapshot()
        loads = [event for event in events if isinstance(event, LoadReport)]
        stored = [event for event in events if isinstance(event, BlocksStored)]
        snapshot = EventSnapshot(self._worker_id, self._epoch, self._ring.end - 1, stored, loads[-1] if loads else None)
        message = encode(Snapshot(snapshot))
        cost_s = time.thread_time() - started
        self._next_snapshot = self._loop.time() + cost_s / _SNAPSHOT_SHARE
        return message


def _split(events: list[WorkerEvent]) -> Iterator[list[WorkerEvent]]:
    """Runs of bounded size; one run is the rule."""
    start = num_bytes = 0
    for number, event in enumerate(events):
        ids = 0 if isinstance(event, LoadReport) else len(getattr(event, "block_ids", b""))
        if number > start and (number - start == _MAX_BATCH_EVENTS or num_bytes + ids > _MAX_BATCH_IDS_BYTES):
            yield events[start:number]
            start, num_bytes = number, 0
        num_bytes += ids
    if start < len(events):
        yield events[start:]
