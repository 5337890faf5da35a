"""The queue before the workers: order, fairness, bounds, and that nothing is lost."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_router_delay import BLOCKS, learn
from test_router_view import connected_view, instance, told

from headwater.errors import DeadlineExceeded, NoWorkers, Overloaded, RateLimited, Unavailable
from headwater.protocol.events import BlocksStored, FrontendLoad
from headwater.router.delay import Delay
from headwater.router.policies import RoundRobin
from headwater.router.policy import Policy
from headwater.router.price import UNKNOWN, StepCosts
from headwater.router.queue import AdmissionQueue, QueueLimits
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.ticket import Outcome, Placed, Refused, Ticket
from headwater.router.view import ClusterView
from headwater.router.worker import Booking

CHUNK = UNKNOWN.chunk_tokens
FULL = 4
"""Prompts of a full step each that close a worker."""


class Bench:
    """A queue before workers whose work the test ends by hand."""

    def __init__(self, num_workers: int = 1, policy: Policy | None = None, **limits: object) -> None:
        self.view: ClusterView = connected_view(*(instance(f"w{number}") for number in range(num_workers)))
        learn(self.view)
        self.router = Router(self.view, policy or Delay())
        self.queue = AdmissionQueue(self.router, QueueLimits(**limits))
        self.now = 0.0
        self.bookings: dict[Ticket, Booking] = {}
        self.others: dict[str, list[Booking]] = {}
        """What keeps workers busy, by worker."""
        self.placed: list[Ticket] = []
        self.refused: list[Refused] = []

    def ticket(self, tokens: int = 1000, *, tenant: str = "", priority: int = 0, **rest: object) -> Ticket:
        deadline = rest.pop("deadline", None)
        request = RouteRequest("f1", tokens, 50, **rest)
        return Ticket(request, "m", tenant=tenant, priority=priority, deadline=deadline)

    def submit(self, ticket: Ticket) -> Ticket:
        placed = self.queue.submit(ticket, self.now)
        if placed is not None:
            self.act(placed)
        return ticket

    def fill(self) -> None:
        """Give every worker as much as closes it."""
        for worker in self.view.workers:
            self.others[worker.worker_id] = [self.view.book(worker, CHUNK, 10) for _ in range(FULL)]
            assert not self.queue.is_open(worker)

    def free(self, worker_id: str) -> None:
        for booking in self.others.pop(worker_id, ()):
            self.view.release(booking)

    def act(self, outcome: Outcome) -> None:
        if isinstance(outcome, Refused):
            self.refused.append(outcome)
            return
        request = outcome.ticket.request
        cached = outcome.decision.cached_tokens
        self.bookings[outcome.ticket] = self.view.book(
            outcome.worker, request.num_prompt_tokens, 50, cached, request.keys
        )
        self.placed.append(outcome.ticket)

    def pump(self) -> list[Ticket]:
        """The tickets placed."""
        before = len(self.placed)
        for outcome in self.queue.pump(self.now):
            self.act(outcome)
        return self.placed[before:]

    def finish(self, ticket: Ticket) -> None:
        self.view.release(self.bookings.pop(ticket), 50)

    def serve_one(self) -> Ticket:
        """Everything running ends, and one more begins that leaves no room for others."""
        for ticket in list(self.bookings):
            self.finish(ticket)
        for worker_id in list(self.others):
            self.free(worker_id)
        outcomes = self.queue.pump(self.now)
        outcome = next(outcomes)
        outcomes.close()
        assert isinstance(outcome, Placed)
        self.act(outcome)
        return outcome.ticket

    def worker_of(self, ticket: Ticket) -> str:
        return self.bookings[ticket].worker.worker_id


def test_requests_pass_at_once_while_any_worker_is_open() -> None:
    bench = Bench(2)
    for _ in range(2 * FULL):
        bench.submit(bench.ticket(CHUNK))
    assert len(bench.placed) == 2 * FULL
    assert len(bench.queue) == 0
    assert not any(map(bench.queue.is_open, bench.view.workers))
    late = bench.submit(bench.ticket(10))
    assert late.waiting
    assert len(bench.queue) == 1


def test_a_few_prompts_close_no_worker_however_long_and_many_short_ones_neither() -> None:
    bench = Bench(1)
    for _ in range(FULL - 1):
        bench.submit(bench.ticket(100_000))
    assert bench.queue.is_open(bench.view.workers[0])
    bench.submit(bench.ticket(10))
    assert not bench.queue.is_open(bench.view.workers[0])
    bench = Bench(1)
    for _ in range(100):
        bench.submit(bench.ticket(3 * CHUNK // 100))
    assert bench.queue.is_open(bench.view.workers[0])


def test_what_other_frontends_have_there_closes_a_worker_too() -> None:
    bench = Bench(1)
    theirs = FrontendLoad("other", FULL, 0, FULL * CHUNK, 0.0, 0)
    bench.view.report("w0", told(theirs))
    waiting = bench.submit(bench.ticket())
    assert waiting.waiting
    bench.view.report("w0", told())
    assert bench.pump() == [waiting]


def test_what_waits_is_placed_when_load_falls_and_not_before() -> None:
    bench = Bench(2)
    bench.fill()
    waiting = bench.submit(bench.ticket())
    assert bench.pump() == []
    bench.free("w1")
    assert bench.pump() == [waiting]
    assert bench.worker_of(waiting) == "w1"
    assert len(bench.queue) == 0
    assert bench.queue.next_expiry() is None


def test_a_limit_of_zero_is_no_queue() -> None:
    bench = Bench(1, backlog_chunks=0)
    for _ in range(20):
        bench.submit(bench.ticket(CHUNK))
    assert len(bench.placed) == 20


def test_a_worker_that_joins_takes_what_waits() -> None:
    bench = Bench(1)
    bench.fill()
    for _ in range(FULL + 1):
        bench.submit(bench.ticket(CHUNK))
    bench.view.put(instance("new"))
    bench.view.set_connected("new", True)
    placed = bench.pump()
    assert len(placed) == FULL
    assert {bench.worker_of(ticket) for ticket in placed} == {"new"}
    assert len(bench.queue) == 1


def test_no_worker_at_all_is_said_at_once_and_those_who_wait_go_on_waiting() -> None:
    bench = Bench(1)
    bench.fill()
    waiting = bench.submit(bench.ticket())
    bench.view.set_connected("w0", False)
    with pytest.raises(NoWorkers):
        bench.submit(bench.ticket())
    assert bench.pump() == []
    bench.view.set_connected("w0", True)
    assert bench.pump() == [waiting]


def drain_order(bench: Bench) -> list[Ticket]:
    """Tickets in the order they are placed when workers take one at a time."""
    order: list[Ticket] = []
    while len(bench.queue):
        order.append(bench.serve_one())
        bench.now += 0.001
    return order


def test_the_order_within_a_tenant() -> None:
    bench = Bench(1)
    bench.fill()
    names = {
        "long": bench.ticket(20_000),
        "short": bench.ticket(100),
        "urgent long": bench.ticket(20_000, priority=3),
        "urgent short": bench.ticket(100, priority=3),
        "low": bench.ticket(10, priority=-1),
        "soon": bench.ticket(20_000, deadline=20.0),
    }
    for ticket in names.values():
        bench.submit(ticket)
    by_ticket = {ticket: name for name, ticket in names.items()}
    order = [by_ticket[ticket] for ticket in drain_order(bench)]
    assert order == ["urgent short", "urgent long", "soon", "short", "long", "low"]


def test_a_request_gets_cheaper_while_it_waits() -> None:
    bench = Bench(1, max_wait_s=10_000)
    bench.fill()
    long = bench.submit(bench.ticket(20_000))
    bench.now = 0.05
    short = bench.submit(bench.ticket(100))
    assert drain_order(bench) == [short, long]
    bench = Bench(1, max_wait_s=10_000)
    bench.fill()
    long = bench.submit(bench.ticket(20_000))
    bench.now = 9_000.0
    short = bench.submit(bench.ticket(100))
    assert drain_order(bench) == [long, short]


PROMPT = b"".join(number.to_bytes(8, "little") + bytes(8) for number in range(1, 257))
"""4,096 tokens."""


def holder_and_other() -> Bench:
    """Two closed workers, of which w0 holds `PROMPT`, and is to be free in 45 ms."""
    bench = Bench(2, backlog_chunks=0.4)
    bench.view.apply("w0", [BlocksStored(PROMPT)])
    for worker in bench.view.workers:
        bench.others[worker.worker_id] = [bench.view.book(worker, 900, 10)]
        assert not bench.queue.is_open(worker)
    return bench


def test_a_request_waits_for_a_worker_that_is_much_cheaper() -> None:
    bench = holder_and_other()
    known = bench.submit(bench.ticket(4100, block_ids=PROMPT))
    bench.free("w1")
    assert bench.pump() == [], "w0 is busy for 45 ms and saves 200"
    stranger = bench.submit(bench.ticket(500))
    assert bench.pump() == [stranger], "others are not held up"
    bench.free("w0")
    assert bench.pump() == [known]
    assert bench.worker_of(known) == "w0"


def test_waiting_for_a_worker_ends_with_patience() -> None:
    bench = holder_and_other()
    known = bench.submit(bench.ticket(4100, block_ids=PROMPT))
    bench.free("w1")
    assert bench.pump() == []
    bench.now = 5.0
    assert bench.pump() == [known]
    assert bench.worker_of(known) == "w1"


def test_a_pinned_request_waits_for_its_worker_alone_and_for_nothing_when_it_is_gone() -> None:
    bench = Bench(2)
    bench.fill()
    pinned = [bench.submit(bench.ticket(pinned_to="w1")) for _ in range(2)]
    bench.free("w0")
    assert bench.pump() == []
    free = bench.submit(bench.ticket())
    assert bench.pump() == [free]
    bench.queue.cancel(pinned[0])
    bench.view.remove("w1")
    bench.pump()
    bench.pump()
    assert [refused.ticket for refused in bench.refused] == [pinned[1]]
    assert isinstance(bench.refused[0].error, NoWorkers)


def test_a_deadline_that_cannot_be_met_is_refused_at_once_and_one_that_is_missed_later() -> None:
    bench = Bench(2)
    with pytest.raises(DeadlineExceeded, match="no worker can begin"):
        bench.submit(bench.ticket(100_000, deadline=1.0))
    assert not bench.placed
    bench.fill()
    waiting = bench.submit(bench.ticket(100, deadline=25.0))
    patient = bench.submit(bench.ticket(100, deadline=29.0))
    bench.now = 25.0
    assert bench.pump() == []
    assert [type(refused.error) for refused in bench.refused] == [DeadlineExceeded]
    assert bench.refused[0].ticket is waiting
    assert bench.queue.next_expiry() == 29.0
    assert patient.waiting


def test_a_deadline_chooses_the_worker_that_can_meet_it() -> None:
    bench = Bench(2, policy=RoundRobin())
    bench.view.book(bench.view.workers[0], 20_000, 10)
    for _ in range(3):
        ticket = bench.submit(bench.ticket(100, deadline=0.5))
        assert bench.worker_of(ticket) == "w1"


def test_nothing_waits_longer_than_the_limit() -> None:
    bench = Bench(1, max_wait_s=2.0)
    bench.fill()
    waiting = bench.submit(bench.ticket())
    assert bench.queue.next_expiry() == 2.0
    bench.now = 2.0
    bench.pump()
    (refused,) = bench.refused
    assert refused.ticket is waiting
    assert isinstance(refused.error, Overloaded)
    assert "2.0 s" in refused.error.message
    assert refused.error.retry_after_s >= 1


def test_a_request_that_is_cancelled_leaves_at_once() -> None:
    bench = Bench(1)
    bench.fill()
    first, second = (bench.submit(bench.ticket()) for _ in range(2))
    assert bench.queue.cancel(first)
    assert not bench.queue.cancel(first)
    assert len(bench.queue) == 1
    bench.free("w0")
    assert bench.pump() == [second]
    bench.fill()
    for _ in range(5000):
        bench.queue.cancel(bench.submit(bench.ticket()))
    assert len(bench.queue._expiring) < 200, "what left is not remembered"


def test_a_full_queue_takes_from_the_tenant_that_fills_it() -> None:
    bench = Bench(1, max_waiting=10)
    bench.fill()
    flood = [bench.submit(bench.ticket(tenant="flood")) for _ in range(10)]
    with pytest.raises(Overloaded) as caught:
        bench.submit(bench.ticket(tenant="flood"))
    assert caught.value.retry_after_s >= 1
    small = [bench.submit(bench.ticket(tenant="small")) for _ in range(4)]
    bench.pump()
    assert small[0].ahead, "it asked for less than its share"
    assert [refused.ticket for refused in bench.refused] == flood[:6:-1]
    assert all(isinstance(refused.error, RateLimited) for refused in bench.refused)
    assert all(ticket.waiting for ticket in small[1:])
    for _ in range(8):
        try:
            bench.submit(bench.ticket(tenant="small"))
        except Overloaded:
            break
    bench.pump()
    assert bench.queue.waiting_by_tenant() == {"flood": 5, "small": 5}


def test_a_full_queue_of_ones_own_makes_room_for_what_is_more_important() -> None:
    bench = Bench(1, max_waiting=2)
    bench.fill()
    low = bench.submit(bench.ticket(priority=-1))
    normal = bench.submit(bench.ticket())
    high = bench.submit(bench.ticket(priority=5))
    bench.pump()
    assert [refused.ticket for refused in bench.refused] == [low]
    assert normal.waiting
    assert high.waiting


def test_classes_of_priority_have_limits() -> None:
    bench = Bench(1, class_limits={"low": 2})
    bench.fill()
    low = [bench.submit(bench.ticket(priority=-5)) for _ in range(2)]
    with pytest.raises(RateLimited, match="low priority"):
        bench.submit(bench.ticket(priority=-1))
    bench.submit(bench.ticket())
    bench.submit(bench.ticket(priority=1))
    bench.queue.cancel(low[0])
    assert bench.submit(bench.ticket(priority=-1)).waiting


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_share_worker_time_by_weight_whatever_they_ask(weight: float) -> None:
    """One sends few long prompts, the other very many short ones."""
    bench = Bench(1, max_waiting=5000, tenant_weights={"long": weight})
    bench.fill()
    for _ in range(200):
        bench.submit(bench.ticket(8000, tenant="long"))
    for _ in range(3000):
        bench.submit(bench.ticket(500, tenant="short"))
    served: Counter[str] = Counter()
    for ticket in drain_order(bench)[:800]:
        served[ticket.tenant] += bench.router.service_ms(ticket.request, bench.view.workers[0])
    assert served["long"] / served["short"] == pytest.approx(weight, rel=0.05)


def test_a_tenant_that_comes_back_neither_gains_nor_loses() -> None:
    bench = Bench(1)
    bench.fill()
    for _ in range(20):
        bench.submit(bench.ticket(tenant="steady"))
    order = drain_order(bench)[:10]
    assert len(order) == 10
    bench.fill()
    for _ in range(10):
        bench.submit(bench.ticket(tenant="steady"))
        bench.submit(bench.ticket(tenant="new"))
    passed = [ticket for ticket in bench.placed if ticket.ahead]
    assert [ticket.tenant for ticket in passed] == ["new"]
    tenants = Counter(ticket.tenant for ticket in [*passed, *drain_order(bench)[:9]])
    assert tenants == {"steady": 5, "new": 5}


def test_who_asks_for_less_than_its_share_passes_the_line_and_pays_for_it() -> None:
    bench = Bench(1)
    bench.fill()
    for _ in range(20):
        bench.submit(bench.ticket(tenant="flood"))
    first, second = bench.submit(bench.ticket(tenant="small")), bench.submit(bench.ticket(tenant="small"))
    assert (first.ahead, first.waiting) == (True, False)
    assert (second.ahead, second.waiting) == (False, True), "its share is used up for now"
    while second.waiting:
        bench.serve_one()
    assert second.ahead, "all that it has waiting"
    assert not any(ticket.ahead for ticket in bench.placed if ticket.tenant == "flood")
    made_up = bench.ticket(tenant="salt")
    made_up.may_pass = False
    assert bench.submit(made_up).waiting, "names that clients make up for themselves do not pass"


def test_those_in_line_get_short_steps_while_somebody_is_expected_to_go_ahead() -> None:
    bench = Bench(1, max_wait_s=1000.0)
    bench.fill()
    for _ in range(20):
        bench.submit(bench.ticket(tenant="flood"))
    assert bench.serve_one().step_tokens == 0, "nobody else is there"
    bench.fill()
    ahead = bench.submit(bench.ticket(tenant="small"))
    assert (ahead.ahead, ahead.step_tokens) == (True, 0)
    in_line = bench.serve_one()
    assert in_line.tenant == "flood"
    assert CHUNK / 16 <= in_line.step_tokens < CHUNK
    bench.now += 61.0
    assert bench.serve_one().step_tokens == 0, "it has not come again for a while"


@pytest.mark.parametrize(
    ("step_ms", "token_ms", "expected"), [(5.0, 0.05, 300), (1.0, 0.05, 128), (500.0, 0.05, 2048), (5.0, 0.0, 2048)]
)
def test_a_short_step_wastes_little_on_what_every_step_costs(step_ms: float, token_ms: float, expected: int) -> None:
    """Of 2048 tokens, a sixteenth at least."""
    bench = Bench(1)
    (worker,) = bench.view.workers
    worker.costs = StepCosts(step_ms, token_ms, 0.0, 0.0, 0.0, 0.0, CHUNK)
    assert bench.router.short_step_tokens(worker) == expected


def test_who_goes_ahead_at_one_model_makes_no_steps_of_another_shorter() -> None:
    bench = Bench(1, max_wait_s=1000.0)
    bench.view.put(instance("other", fingerprint="f2"))
    bench.view.set_connected("other", True)
    bench.fill()
    for fingerprint in ("f1", "f2"):
        for _ in range(20):
            bench.submit(Ticket(RouteRequest(fingerprint, 1000, 50), "m", tenant="flood"))
    assert bench.submit(Ticket(RouteRequest("f2", 1000, 50), "m", tenant="small")).ahead
    served = [bench.serve_one() for _ in range(5)]
    assert {ticket.request.fingerprint for ticket in served} == {"f1"}
    assert [ticket.step_tokens for ticket in served] == [0] * 5


def test_there_is_an_end_to_passing_the_line() -> None:
    """However many tenants say they are new."""
    bench = Bench(1)
    bench.fill()
    bench.submit(bench.ticket(tenant="flood"))
    passed = [bench.submit(bench.ticket(CHUNK, tenant=f"t{number}")).ahead for number in range(20)]
    assert passed == sorted(passed, reverse=True)
    assert 1 <= sum(passed) <= FULL


def test_low_priority_is_not_starved_by_a_flood_of_high() -> None:
    bench = Bench(1)
    bench.fill()
    low = bench.submit(bench.ticket(priority=-9))
    turns = 0
    while low.waiting:
        for _ in range(2):
            bench.submit(bench.ticket(priority=9))
        assert bench.now >= 15.0 or bench.serve_one() is not low, "patience first"
        if bench.now >= 15.0:
            bench.serve_one()
            turns += 1
        bench.now += 1.0
        bench.fill()
    assert turns <= 8


class QueueMachine(RuleBasedStateMachine):
    """Every request ends exactly once; the queue stays within its bounds; time never runs past an expiry unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(3, max_waiting=12, max_wait_s=5.0, class_limits={"low": 5}, tenant_weights={"a": 2.0})
        self.open: dict[Ticket, None] = {}
        self.ended: Counter[Ticket] = Counter()

    @rule(
        tokens=st.integers(1, 40_000),
        tenant=st.sampled_from("abc"),
        priority=st.integers(-2, 2),
        patience=st.none() | st.floats(0.01, 10),
        pinned=st.sampled_from([None, None, None, "w1"]),
        known=st.booleans(),
    )
    def submit(
        self, tokens: int, tenant: str, priority: int, patience: float | None, pinned: str | None, known: bool
    ) -> None:
        bench = self.bench
        blocks = BLOCKS[: 16 * min(64, tokens // 16)] if known else b""
        ticket = bench.ticket(tokens, tenant=tenant, priority=priority, pinned_to=pinned, block_ids=blocks)
        ticket.deadline = None if patience is None else bench.now + patience
        self.open[ticket] = None
        try:
            bench.submit(ticket)
        except Unavailable:
            self.end(ticket)
        self.collect()

    @rule()
    def pump(self) -> None:
        self.bench.pump()
        self.collect()

    @rule(passed=st.floats(0.0, 6.0))
    def time_passes(self, passed: float) -> None:
        self.bench.now += passed
        self.pump()
        expiry = self.bench.queue.next_expiry()
        assert expiry is None or expiry > self.bench.now

    @precondition(lambda self: self.bench.bookings)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.bench.finish(data.draw(st.sampled_from(list(self.bench.bookings))))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(list(self.open)))
        waiting = ticket.waiting
        assert self.bench.queue.cancel(ticket) == waiting
        if waiting:
            self.end(ticket)

    @rule(worker=st.sampled_from(["w0", "w1", "w2"]), there=st.booleans())
    def connection(self, worker: str, there: bool) -> None:
        self.bench.view.set_connected(worker, there)

    def end(self, ticket: Ticket) -> None:
        self.open.pop(ticket, None)
        self.ended[ticket] += 1
        assert self.ended[ticket] == 1
        assert not ticket.waiting

    def collect(self) -> None:
        bench = self.bench
        for ticket in [*bench.placed, *(refused.ticket for refused in bench.refused)]:
            self.end(ticket)
        bench.placed.clear()
        bench.refused.clear()

    @invariant()
    def bounded_and_nothing_lost(self) -> None:
        queue = self.bench.queue
        waiting = {ticket for ticket in self.open if ticket.waiting}
        gone = {refused.ticket for refused in queue._refused}
        assert set(self.open) == waiting | gone
        assert len(queue) == len(waiting) <= 12
        assert sum(ticket.priority < 0 for ticket in waiting) <= 5
        assert sum(queue.waiting_by_tenant().values()) == len(waiting)
        self.bench.view.check()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_long_prompt_that_waited_for_a_while_goes_before_short_ones_that_come_now() -> None:
    bench = Bench(1)
    bench.fill()
    long = bench.submit(bench.ticket(2 * CHUNK))
    bench.now = 1.0
    shorter = bench.submit(bench.ticket(CHUNK))
    assert bench.serve_one() is long
    assert shorter.waiting


def test_of_those_that_come_together_the_short_one_goes_first() -> None:
    bench = Bench(1)
    bench.fill()
    long = bench.submit(bench.ticket(2 * CHUNK))
    shorter = bench.submit(bench.ticket(CHUNK))
    assert bench.serve_one() is shorter
    assert long.waiting
