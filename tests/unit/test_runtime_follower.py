"""The follower against a publisher whose messages are lost, doubled, delayed and reordered at will."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.protocol.events import BlocksStored, EventBatch, EventSnapshot
from headwater.runtime.events.follower import ANSWER_TIMEOUT_S, CONFIRM_S, MAX_WAITING, Follower
from headwater.runtime.events.wire import Ask, Join, Recall


def stored(number: int) -> BlocksStored:
    return BlocksStored(number.to_bytes(16, "little"))


@dataclass
class ToyPublisher:
    """Numbers batches, keeps the last few, answers questions."""

    epoch: int
    keep: int
    history: list[EventBatch] = field(default_factory=list[EventBatch])

    def publish(self, number: int) -> EventBatch:
        batch = EventBatch("w", self.epoch, len(self.history), 0.0, [stored(number)])
        self.history.append(batch)
        return batch

    def heartbeat(self) -> EventBatch:
        return EventBatch("w", self.epoch, len(self.history) - 1, 0.0, [])

    def snapshot(self) -> EventSnapshot:
        events = [event for batch in self.history for event in batch.events if isinstance(event, BlocksStored)]
        return EventSnapshot("w", self.epoch, len(self.history) - 1, events)

    def recall(self, ask: Recall, limit: int) -> list[EventBatch] | None:
        end = len(self.history)
        if ask.epoch != self.epoch or not max(0, end - self.keep) <= ask.first <= end:
            return None
        return self.history[ask.first : ask.first + limit]

    @property
    def state(self) -> list[bytes]:
        return [event.block_ids for event in self.snapshot().stored]


class Network(RuleBasedStateMachine):
    """Every rule is something a network, a publisher or time may do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_number = 0
        self.publisher = ToyPublisher(epoch=1, keep=5)
        self.in_flight: list[EventBatch] = []
        self.asks: list[Ask] = []
        self.view: list[bytes] = []
        self.last = (0, -1)
        self.follower = Follower(self.on_batch, self.on_snapshot, self.asks.append)
        self.follower.begin(self.now)

    def on_batch(self, batch: EventBatch) -> None:
        assert (batch.epoch, batch.sequence) == (self.last[0], self.last[1] + 1)
        self.last = (batch.epoch, batch.sequence)
        self.view += [event.block_ids for event in batch.events if isinstance(event, BlocksStored)]

    def on_snapshot(self, snapshot: EventSnapshot) -> None:
        self.last = (snapshot.epoch, snapshot.sequence)
        self.view = [event.block_ids for event in snapshot.stored]

    @rule(count=st.integers(1, 4))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.next_number += 1
            self.in_flight.append(self.publisher.publish(self.next_number))

    @rule()
    def heartbeat(self) -> None:
        self.in_flight.append(self.publisher.heartbeat())

    @rule()
    def publisher_restarts(self) -> None:
        self.publisher = ToyPublisher(epoch=self.publisher.epoch + 1, keep=5)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), again=st.booleans())
    def deliver_any(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.in_flight) - 1))
        batch = self.in_flight[index] if again else self.in_flight.pop(index)
        self.follower.receive(batch, self.now)

    @precondition(lambda self: self.in_flight)
    @rule()
    def lose_all(self) -> None:
        self.in_flight.clear()

    @precondition(lambda self: self.asks)
    @rule(lose=st.booleans(), limit=st.integers(1, 3))
    def answer(self, lose: bool, limit: int) -> None:
        self.answer_next(self.asks.pop(0), lose=lose, limit=limit)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.follower.tick(self.now)

    def answer_next(self, ask: Ask, *, lose: bool, limit: int) -> None:
        if lose:
            return
        if isinstance(ask, Join):
            self.follower.snapshot(self.publisher.snapshot(), self.now)
            return
        found = self.publisher.recall(ask, limit)
        if found is None:
            self.follower.forgotten(self.now)
        else:
            more = ask.first + len(found) < len(self.publisher.history)
            self.follower.recalled(found, self.now, more=more)

    @invariant()
    def view_is_a_state_that_was(self) -> None:
        if self.last[0] == self.publisher.epoch:
            assert self.view == self.publisher.state[: len(self.view)]

    def teardown(self) -> None:
        """Once the network behaves, the view becomes the state."""
        self.in_flight.clear()
        for _ in range(60):
            self.now += ANSWER_TIMEOUT_S + CONFIRM_S
            self.follower.receive(self.publisher.heartbeat(), self.now)
            self.follower.tick(self.now)
            while self.asks:
                self.answer_next(self.asks.pop(0), lose=False, limit=3)
            if self.follower.resting and self.view == self.publisher.state:
                return
        raise AssertionError("the view never became the state")


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def follow() -> tuple[Follower, list[EventBatch], list[EventSnapshot], list[Ask]]:
    batches: list[EventBatch] = []
    snapshots: list[EventSnapshot] = []
    asks: list[Ask] = []
    return Follower(batches.append, snapshots.append, asks.append), batches, snapshots, asks


def batch(sequence: int, epoch: int = 1) -> EventBatch:
    return EventBatch("w", epoch, sequence, 0.0, [stored(sequence)])


def test_batches_in_order_ask_nothing() -> None:
    follower, batches, _, asks = follow()
    follower.begin(0.0)
    follower.snapshot(EventSnapshot("w", 1, -1, []), 0.0)
    asks.clear()
    for number in range(1000):
        follower.receive(batch(number), 0.1)
    assert [found.sequence for found in batches] == list(range(1000))
    assert asks == []


def test_what_was_published_while_the_subscription_became_active_is_asked_for() -> None:
    follower, batches, _, asks = follow()
    follower.begin(0.0)
    follower.snapshot(EventSnapshot("w", 1, 4, []), 0.0)
    assert not follower.resting
    follower.tick(CONFIRM_S / 2)
    assert asks == [Join()]
    follower.tick(CONFIRM_S)
    assert asks == [Join(), Recall(1, 5)]
    follower.recalled([batch(5)], CONFIRM_S)
    assert [found.sequence for found in batches] == [5]
    assert follower.resting


def test_an_unanswered_question_is_asked_again_ever_more_seldom() -> None:
    follower, _, _, asks = follow()
    follower.begin(0.0)
    asked_at = [0.0]
    for tenth in range(1, 201):
        before = len(asks)
        follower.tick(tenth / 10)
        asked_at += [tenth / 10] * (len(asks) - before)
    assert asked_at == [0.0, 0.5, 1.5, 3.5, 7.5, 11.5, 15.5, 19.5], "a snapshot may be on its way"
    follower.snapshot(EventSnapshot("w", 1, -1, []), 20.0)
    asks.clear()
    follower.tick(20.3)
    follower.tick(20.9)
    assert asks == [Recall(1, 0)] * 2, "it answers: patience begins anew"


def test_an_answer_is_wanted_only_while_a_question_is_open() -> None:
    follower, _, _, _ = follow()
    follower.begin(0.0)
    assert follower.waits_for_answer
    follower.snapshot(EventSnapshot("w", 1, -1, []), 0.0)
    assert not follower.waits_for_answer
    follower.tick(CONFIRM_S)
    assert follower.waits_for_answer
    follower.recalled([], CONFIRM_S)
    assert not follower.waits_for_answer


@given(missing=st.integers(1, 50))
@settings(max_examples=20, deadline=None)
def test_what_waits_for_a_gap_is_bounded(missing: int) -> None:
    follower, batches, _, asks = follow()
    follower.begin(0.0)
    follower.snapshot(EventSnapshot("w", 1, -1, []), 0.0)
    for number in range(missing, missing + 3 * MAX_WAITING):
        follower.receive(batch(number), 0.0)
    assert len(follower._waiting) <= MAX_WAITING
    assert batches == []
    assert asks[-1] == Recall(1, 0)
