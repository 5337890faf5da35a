"""A subscriber's view of one publisher, without any I/O: batches in, whole and ordered history out.

    joining   no snapshot yet; batches wait
    live      every batch so far was delivered
    healing   a gap was seen and a replay asked for; batches beyond the gap wait

Loss, duplication and reordering heal by replay; what cannot be replayed, and a publisher that began anew, by a
snapshot. A question that gets no answer is asked again, ever more seldom: a large snapshot takes its time, and more
questions would make it longer. Only `MAX_WAITING` batches wait: beyond that they are dropped
and count as lost.
"""

from collections.abc import Callable
from typing import Literal

from headwater.protocol.events import EventBatch, EventSnapshot
from headwater.runtime.events.base import OnBatch, OnSnapshot
from headwater.runtime.events.wire import Ask, Join, Recall

MAX_WAITING = 1024
ANSWER_TIMEOUT_S = 0.5
_LONGEST_TIMEOUT_S = 4.0
CONFIRM_S = 0.2
"""A subscription may become active a moment after the snapshot was taken: ask what was published in between."""

State = Literal["joining", "live", "healing"]


class Follower:
    """Delivers every batch of an epoch once and in order. Time is given with each call."""

    def __init__(self, on_batch: OnBatch, on_snapshot: OnSnapshot, ask: Callable[[Ask], None]) -> None:
        self._on_batch = on_batch
        self._on_snapshot = on_snapshot
        self._ask = ask
        self._state: State = "joining"
        self._epoch = 0
        self._next = 0
        """Sequence number of the batch to deliver next."""
        self._waiting: dict[int, EventBatch] = {}
        """Batches of the present epoch beyond a gap, or of any while joining."""
        self._ask_again_at = 0.0
        self._patience_s = ANSWER_TIMEOUT_S
        self._confirm_at: float | None = None

    @property
    def resting(self) -> bool:
        """Whether no question is open or due."""
        return self._state == "live" and self._confirm_at is None

    @property
    def waits_for_answer(self) -> bool:
        return self._state != "live"

    def begin(self, now: float) -> None:
        """Ask for the first snapshot."""
        self._join(now)

    def receive(self, batch: EventBatch, now: float) -> None:
        """A batch from the publisher, in whatever order."""
        if self._state == "joining":
            self._keep(batch)
        elif batch.epoch != self._epoch:
            self._join(now)
            self._keep(batch)
        elif not batch.events:
            self._heartbeat(batch.sequence, now)
        elif batch.sequence == self._next:
            self._deliver(batch)
            self._advance(now)
        elif batch.sequence > self._next:
            self._keep(batch)
            self._heal(now)

    def snapshot(self, snapshot: EventSnapshot, now: float) -> None:
        """The answer to `Join`."""
        if self._state != "joining":
            return
        self._patience_s = ANSWER_TIMEOUT_S
        self._epoch, self._next = snapshot.epoch, snapshot.sequence + 1
        self._state = "live"
        self._confirm_at = now + CONFIRM_S
        self._on_snapshot(snapshot)
        self._waiting = {
            number: batch
            for number, batch in self._waiting.items()
            if batch.epoch == self._epoch and number >= self._next
        }
        self._advance(now)

    def recalled(self, batches: list[EventBatch], now: float, *, more: bool = False) -> None:
        """The answer to `Recall`. `more`: it did not hold all that can be recalled."""
        if self._state != "healing":
            return
        self._patience_s = ANSWER_TIMEOUT_S
        before = self._next
        for batch in batches:
            if batch.epoch == self._epoch and batch.sequence == self._next:
                self._deliver(batch)
        self._state = "live"
        if self._next == before and (self._waiting or more):
            self._join(now)
        elif more:
            self._recall(now)
        else:
            self._advance(now)

    def forgotten(self, now: float) -> None:
        """The other answer to `Recall`."""
        if self._state == "healing":
            self._patience_s = ANSWER_TIMEOUT_S
            self._join(now)

    def tick(self, now: float) -> None:
        """To be called now and then: asks what is due, and again what got no answer."""
        if self._state == "live":
            if self._confirm_at is not None and now >= self._confirm_at:
                self._recall(now)
        elif now >= self._ask_again_at:
            if self._state == "joining":
                self._join(now)
            else:
                self._recall(now)

    def _heartbeat(self, newest: int, now: float) -> None:
        """An empty batch names the newest sequence number without using one."""
        if newest >= self._next:
            self._heal(now)

    def _deliver(self, batch: EventBatch) -> None:
        self._next = batch.sequence + 1
        self._on_batch(batch)

    def _advance(self, now: float) -> None:
        """Deliver what waited for its turn; what still waits is beyond another gap."""
        if not self._waiting:
            self._state = "live"
            return
        while (batch := self._waiting.pop(self._next, None)) is not None:
            self._deliver(batch)
        self._waiting = {number: batch for number, batch in self._waiting.items() if number > self._next}
        if self._waiting:
            self._heal(now)
        else:
            self._state = "live"

    def _keep(self, batch: EventBatch) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()
        if batch.events:
            self._waiting[batch.sequence] = batch

    def _heal(self, now: float) -> None:
        if self._state != "healing":
            self._recall(now)

    def _ask_until(self, now: float) -> None:
        self._ask_again_at = now + self._patience_s
        self._patience_s = min(2 * self._patience_s, _LONGEST_TIMEOUT_S)

    def _recall(self, now: float) -> None:
        self._state = "healing"
        self._confirm_at = None
        self._ask_until(now)
        self._ask(Recall(self._epoch, self._next))

    def _join(self, now: float) -> None:
        if self._state != "joining":
            self._waiting.clear()
        self._state = "joining"
        self._ask_until(now)
        self._ask(Join())
