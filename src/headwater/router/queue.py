"""The queue before the workers: open only when all that could take a request have enough to do.

As long as one eligible worker has no more than `backlog_chunks` full steps of prefill before it (or no more prompts
than that) and nobody waits, requests pass at once and cost nothing here. Otherwise they wait, and are placed when load
changes (`pump`):

* tenants take turns by weighted fair queueing of worker time: the one that has had least goes first; whoever asks for
  less than its share passes the line, and at the worker goes before what others have waiting there (`Ticket.ahead`),
  as does who has but little in line while others have much: so a flood of one tenant is hardly felt by the rest; as
  nobody goes before what a step computes already, those in line get smaller steps from then on, for a while
  (`Ticket.step_tokens`);
* within a tenant: higher priority first; then by the window of ten seconds in which patience or deadline ends; then
  the lowest price, a request getting cheaper while it waits; every eighth turn, one that has waited for half of its
  time goes first, so that nobody starves;
* a request may wait on for a worker that would be much cheaper than the best open one, the less the longer it waits.

Nothing waits without a bound: what cannot be placed in time is refused with the reason and when to come back, and so
is, at once, what cannot meet its deadline. A full queue takes from the tenant that fills it most.

Events in (`submit`, `cancel`, `pump`), decisions out (`Placed`, `Refused`); no clock. Every `Placed` must be booked in
the view before the next one is asked for, because it changes the prices of the others.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from headwater.errors import DeadlineExceeded, HeadwaterError, InvalidRequest, NoWorkers, Overloaded, RateLimited
from headwater.router.line import Line, Tenant
from headwater.router.policy import PricingPolicy
from headwater.router.router import Router
from headwater.router.ticket import Outcome, Placed, PriorityClass, Refused, Ticket
from headwater.router.worker import WorkerView

AGEING = 3.0
"""Ms that a price falls per ms waited: prices weigh a ms of prefill about as often, in its parts together."""
WORTH_WAITING_FOR = 0.7
"""A busy worker is waited for when its price is below so much of the best open one's."""
RECHECK_S = 0.1
AHEAD_PRIORITY = 1 << 32
"""Added at the worker for what passed the line: above whatever a client may ask for."""
_WINDOW_S = 10.0
_EXPECT_AGAIN_S = 60.0
"""Who asks for less than its share is expected to do so again for so long."""
_MOST_EXAMINED = 1024
"""Prices worked out for one placement, about."""
_LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    backlog_chunks: float = 3.0
    """More full steps of prefill than that, in more prompts than that, close a worker; 0: no queue at all."""
    max_waiting: int = 1024
    max_wait_s: float = 30.0
    class_limits: Mapping[PriorityClass, int] = field(default_factory=dict[PriorityClass, int])
    """How many of a class of priorities (below 0, 0, above 0) may wait."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Shares of tenants; 1 for those not named."""


class AdmissionQueue:
    """See the module docstring."""

    def __init__(self, router: Router, limits: QueueLimits | None = None) -> None:
        self.limits = limits or QueueLimits()
        self._router = router
        self._policy = router.policy if isinstance(router.policy, PricingPolicy) else None
        self._lines: dict[str, Line[Ticket]] = {}
        """By model fingerprint."""
        self._numbers = 0
        self._expiring: list[tuple[float, int, Ticket]] = []
        self._classes: dict[PriorityClass, int] = {}
        self._refused: list[Refused] = []
        self._interval_s = 0.0
        self._placed_at: float | None = None
        self._went_ahead: dict[str, float] = {}
        """When somebody last did, by model fingerprint."""

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    # Events

    def submit(self, ticket: Ticket, now: float) -> Placed | None:
        """Place it at once, or let it wait (None). Raises `Unavailable` when it can do neither."""
        request = ticket.request
        ticket.since = request.now = now
        workers = self._router.eligible(request, ticket.model, ticket.avoid)
        self._router.look_up(request)
        line = self._lines.get(request.fingerprint)
        if self.limits.backlog_chunks <= 0 or (line is None and any(map(self.is_open, workers))):
            return self._place(ticket, workers, now)
        self._check_deadline(ticket, workers, now)
        passes = line is not None and ticket.may_pass and line.is_within_share(ticket.tenant)
        if line is not None and passes and any(map(self._is_nearly_open, workers)):
            return self._pass_line(line, ticket, workers, now)
        self._make_room(ticket)
        self._enqueue(ticket, workers, now)
        return None

    def cancel(self, ticket: Ticket) -> bool:
        """It is not wanted any more. False when it was not waiting."""
        if not ticket.waiting:
            return False
        self._remove(ticket)
        return True

    def pump(self, now: float) -> Iterator[Outcome]:
        """After load has changed, or time has passed: what is placed or refused now."""
        yield from self._expire(now)
        for line in list(self._lines.values()):
            while (found := self._next(line, now)) is not None:
                yield self._serve(line, *found, now)
        yield from self._take_refused()

    def next_expiry(self) -> float | None:
        """When `pump` is to be called at the latest."""
        while self._expiring and not self._expiring[0][2].waiting:
            heappop(self._expiring)
        return self._expiring[0][0] if self._expiring else None

    # What is open

    def is_open(self, worker: WorkerView) -> bool:
        return _has_room(worker, self.limits.backlog_chunks)

    def _is_nearly_open(self, worker: WorkerView) -> bool:
        """Has room for those who pass the line: as much again as for everybody, so there is an end to it."""
        return _has_room(worker, 2 * self.limits.backlog_chunks)

    def waiting_by_tenant(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for line in self._lines.values():
            for name, tenant in line.tenants.items():
                counts[name] = counts.get(name, 0) + len(tenant)
        return counts

    def retry_after_s(self) -> float:
        """When a queue as long as this one will have been served, at the rate of late."""
        return min(_LONGEST_RETRY_S, max(1.0, len(self) * self._interval_s))

    # Placing

    def _place(self, ticket: Ticket, workers: Sequence[WorkerView], now: float) -> Placed:
        self._check_deadline(ticket, workers, now)
        worker, decision = self._router.decide(ticket.request, workers)
        if not self._in_time(ticket, worker, now):
            in_time = [other for other in workers if self._in_time(ticket, other, now)]
            if in_time:
                worker, decision = self._router.decide(ticket.request, in_time)
        return Placed(ticket, worker, decision)

    def _pass_line(self, line: Line[Ticket], ticket: Ticket, workers: Sequence[WorkerView], now: float) -> Placed:
        placed = self._place(ticket, [worker for worker in workers if self._is_nearly_open(worker)], now)
        line.charge_absent(ticket.tenant, self._router.service_ms(ticket.request, placed.worker))
        ticket.ahead = True
        self._went_ahead[line.name] = now
        return placed

    def _serve(self, line: Line[Ticket], ticket: Ticket, workers: Sequence[WorkerView], now: float) -> Outcome:
        try:
            placed = self._place(ticket, workers, now)
        except HeadwaterError as error:
            self._remove(ticket)
            return Refused(ticket, error)
        ticket.ahead = ticket.may_pass and line.is_small(ticket.tenant)
        if ticket.ahead:
            self._went_ahead[line.name] = now
        elif now - self._went_ahead.get(line.name, -inf) < _EXPECT_AGAIN_S:
            ticket.step_tokens = self._router.short_step_tokens(placed.worker)
        line.charge(ticket.tenant, self._router.service_ms(ticket.request, placed.worker))
        self._remove(ticket)
        self._note_placed(now)
        return placed

    def _in_time(self, ticket: Ticket, worker: WorkerView, now: float) -> bool:
        if ticket.deadline is None:
            return True
        first_token_ms = self._router.first_token_ms(ticket.request, worker)
        return first_token_ms is None or now + first_token_ms / 1000 <= ticket.deadline

    def _check_deadline(self, ticket: Ticket, workers: Sequence[WorkerView], now: float) -> None:
        """Raises `DeadlineExceeded` if no worker could give a first token in time, were it free for this request."""
        if ticket.deadline is None:
            return
        least_ms = min(self._router.prefill_ms(ticket.request, worker) for worker in workers)
        left_ms = 1e3 * (ticket.deadline - now)
        if least_ms > left_ms:
            raise DeadlineExceeded(
                f"no worker can begin its answer within the {max(0.0, left_ms / 1e3):.1f} s left until the deadline: "
                f"the prompt alone takes {least_ms / 1e3:.1f} s",
                retry_after_s=self.retry_after_s(),
            )

    def _next(self, line: Line[Ticket], now: float) -> tuple[Ticket, Sequence[WorkerView]] | None:
        """The request whose turn it is, and the open workers it may go to."""
        if not len(line):
            return None
        workers = self._router.view.eligible(line.name)
        open_ids = {worker.worker_id for worker in workers if self.is_open(worker)}
        if not open_ids:
            return None
        most = max(2, min(16, _MOST_EXAMINED // len(workers)))
        for tenant in line.by_need():
            found = self._oldest(tenant, open_ids, now) if tenant.turn_of_oldest else None
            found = found or self._cheapest(tenant, open_ids, most, now)
            if found is not None:
                return found
        return None

    def _oldest(
        self, tenant: Tenant[Ticket], open_ids: Collection[str], now: float
    ) -> tuple[Ticket, Sequence[WorkerView]] | None:
        ticket = tenant.oldest
        if now - ticket.since < self.limits.max_wait_s / 2:
            return None
        workers, _ = self._offer(ticket, open_ids, now)
        return (ticket, workers) if workers else None

    def _cheapest(
        self, tenant: Tenant[Ticket], open_ids: Collection[str], most: int, now: float
    ) -> tuple[Ticket, Sequence[WorkerView]] | None:
        best: tuple[Ticket, Sequence[WorkerView]] | None = None
        least = float("inf")
        examined = 0
        for ticket in tenant:
            if best is not None and ticket.key[:2] != best[0].key[:2]:
                break
            if ticket.prefers is not None and ticket.prefers not in open_ids and now < ticket.recheck_at:
                continue
            workers, price = self._offer(ticket, open_ids, now)
            price += AGEING * 1e3 * ticket.since
            if workers and price < least:
                best, least = (ticket, workers), price
            examined += 1
            if examined >= most:
                break
        return best

    def _offer(self, ticket: Ticket, open_ids: Collection[str], now: float) -> tuple[Sequence[WorkerView], float]:
        """Open workers a request would go to now, and the price there; none when it rather waits."""
        request = ticket.request
        request.now = now
        try:
            workers = self._router.eligible(request, ticket.model, ticket.avoid)
        except NoWorkers:
            return (), 0.0
        except InvalidRequest:
            ticket.expires = now  # the worker it was to go to is gone: the next look refuses it
            heappush(self._expiring, (now, ticket.key[3], ticket))
            return (), 0.0
        open_workers = [worker for worker in workers if worker.worker_id in open_ids]
        if not open_workers or self._policy is None:
            return open_workers, 0.0
        self._router.look_up(request)
        prices = self._policy.prices(request, workers)
        cheapest_open = min(p for p, worker in zip(prices, workers, strict=True) if worker.worker_id in open_ids)
        cheapest, number = min(zip(prices, range(len(workers)), strict=True))
        waited_ms = 1e3 * (now - ticket.since)
        ticket.prefers = None
        if cheapest_open > 0 and cheapest + AGEING * waited_ms < WORTH_WAITING_FOR * cheapest_open:
            ticket.prefers, ticket.recheck_at = workers[number].worker_id, now + RECHECK_S
            return (), 0.0
        return open_workers, cheapest_open

    def _note_placed(self, now: float) -> None:
        if self._placed_at is not None:
            self._interval_s += 0.1 * (min(now - self._placed_at, _LONGEST_RETRY_S) - self._interval_s)
        self._placed_at = now if self._lines else None

    # Waiting

    def _enqueue(self, ticket: Ticket, workers: Sequence[WorkerView], now: float) -> None:
        self._numbers += 1
        price = min(self._policy.prices(ticket.request, workers)) if self._policy is not None else 0.0
        ticket.expires = now + self.limits.max_wait_s
        if ticket.deadline is not None:
            ticket.expires = min(ticket.expires, ticket.deadline)
        window = int(ticket.expires // _WINDOW_S)
        ticket.key = (-ticket.priority, window, price + AGEING * 1e3 * now, self._numbers)
        ticket.waiting = True
        name = ticket.request.fingerprint
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = Line(name, self.limits.tenant_weights)
        line.add(ticket)
        self._classes[ticket.priority_class] = self._classes.get(ticket.priority_class, 0) + 1
        heappush(self._expiring, (ticket.expires, self._numbers, ticket))

    def _remove(self, ticket: Ticket) -> None:
        ticket.waiting = False
        line = self._lines[ticket.request.fingerprint]
        line.remove(ticket)
        if not len(line):
            del self._lines[ticket.request.fingerprint]
        self._classes[ticket.priority_class] -= 1
        if len(self._expiring) > 2 * len(self) + 64:
            self._expiring = [entry for entry in self._expiring if entry[2].waiting]
            heapify(self._expiring)

    def _expire(self, now: float) -> Iterator[Refused]:
        while (at := self.next_expiry()) is not None and at <= now:
            _, _, ticket = heappop(self._expiring)
            self._remove(ticket)
            yield Refused(ticket, self._late(ticket, now))

    def _late(self, ticket: Ticket, now: float) -> HeadwaterError:
        waited = f"waited {now - ticket.since:.1f} s in line"
        if ticket.deadline is not None and now >= ticket.deadline:
            return DeadlineExceeded(f"{waited} until its deadline", retry_after_s=self.retry_after_s())
        if ticket.request.pinned_to is not None:
            return NoWorkers(f"{waited} for worker {ticket.request.pinned_to}", retry_after_s=self.retry_after_s())
        return Overloaded(f"{waited} and no worker had room", retry_after_s=self.retry_after_s())

    def _take_refused(self) -> Iterator[Refused]:
        refused, self._refused = self._refused, []
        yield from refused

    # Room

    def _make_room(self, ticket: Ticket) -> None:
        """Raises `RateLimited` or `Overloaded` when there is none for this request."""
        limits, kind = self.limits, ticket.priority_class
        limit = limits.class_limits.get(kind)
        if limit is not None and self._classes.get(kind, 0) >= limit:
            raise RateLimited(
                f"{limit} requests of {kind} priority wait, which is the limit", retry_after_s=self.retry_after_s()
            )
        if len(self) < limits.max_waiting:
            return
        victim = self._victim(ticket)
        message = f"{len(self)} requests wait for workers, which is the limit"
        if victim is None:
            raise Overloaded(message, retry_after_s=self.retry_after_s())
        self._remove(victim)
        error = RateLimited(f"{message}; most of them are this tenant's", retry_after_s=self.retry_after_s())
        self._refused.append(Refused(victim, error))

    def _victim(self, newcomer: Ticket) -> Ticket | None:
        """Who has to go for a newcomer: the last of whoever fills the queue most, if that is not the newcomer."""
        weights = self.limits.tenant_weights
        shares = {name: count / weights.get(name, 1.0) for name, count in self.waiting_by_tenant().items()}
        fullest = max(shares, key=lambda name: shares[name])
        own = shares.get(newcomer.tenant, 0.0) + 1 / weights.get(newcomer.tenant, 1.0)
        lines = [line for line in self._lines.values() if fullest in line.tenants]
        last = max((line.tenants[fullest].last for line in lines), key=lambda ticket: ticket.key)
        if fullest == newcomer.tenant or own >= shares[fullest]:
            return last if last.tenant == newcomer.tenant and last.priority < newcomer.priority else None
        return last


def _has_room(worker: WorkerView, most_chunks: float) -> bool:
    """A few prompts never close a worker, however long: it can share its steps, we cannot."""
    return worker.backlog_sequences <= most_chunks or worker.backlog_tokens <= most_chunks * worker.chunk_tokens
