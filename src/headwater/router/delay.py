"""The default policy: the placement with the lowest predicted delay, suffered and inflicted (`headwater.router.price`).

Deterministic: no temperature, no random tie; equal prices go to the worker that was sent least. Where workers of one
class measure differently, prices closer than that disagreement count as equal, and the most cached prefix, then the
fewest tokens sent so far, decide: an error that differs between workers would otherwise draw all cold prompts to the
one that looks faster, and its cache would churn.
The worker that the request is at home at (`RouteRequest.home`) gets a small discount.
"""

from collections.abc import Sequence
from typing import ClassVar, Self

from headwater.router.even import unevenness
from headwater.router.policy import Candidate, Decision, PolicySettings, decide
from headwater.router.price import Placement, Price, Profile, prefill_pairs, price, profile, totals
from headwater.router.request import RouteRequest
from headwater.router.worker import WorkerView

_LEAST_SPREAD = 0.02
"""Disagreement below this is noise of the measurement."""


class Delay:
    """`decode_share`: how much the time after the first token matters, from 0 (first token only) to 1 (end to end).
    `weights`: others than those that follow from it, for studies."""

    name: ClassVar[str] = "delay"
    uses_residency: ClassVar[bool] = True

    def __init__(self, decode_share: float = 1.0, weights: Profile | None = None) -> None:
        self._decode_share = decode_share
        self._weights = weights or profile(decode_share)

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:
        return cls(settings.decode_share)

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        quote = self._quote(request, workers)
        return decide(self.name, request, workers[quote.pick(workers)], workers, quote.candidates)

    def prices(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Sequence[float]:
        return self._quote(request, workers).totals

    def _quote(self, request: RouteRequest, workers: Sequence[WorkerView]) -> "_Quote":
        hurry = request.latency_sensitivity
        return _Quote(self._weights if hurry <= 1.0 else profile(self._decode_share / hurry), request, workers)


class _Quote:
    """The prices of one request, with all that is needed to explain them later."""

    __slots__ = ("_cached", "_discount", "_home", "_ids", "_occupied", "_placement", "_uneven", "_weights", "totals")

    def __init__(self, weights: Profile, request: RouteRequest, workers: Sequence[WorkerView]) -> None:
        expected = min(request.expected_output_tokens, float(request.max_tokens))
        self._weights = weights
        self._ids = [worker.worker_id for worker in workers]
        self._occupied = [worker.occupied or worker.occupy() for worker in workers]
        crowd = sorted([one.num_prefilling + one.num_decoding for one in self._occupied])[(len(workers) - 1) // 2]
        self._placement = Placement(request.num_prompt_tokens, request.num_sequences, expected, request.churn, crowd)
        cached = request.cached_tokens
        self._cached = [cached.get(worker_id, 0) for worker_id in self._ids] if cached else [0] * len(workers)
        self._uneven = unevenness(workers, min(1.0, weights.even_crowd * crowd))
        self.totals = totals(weights, self._occupied, self._placement, self._cached, self._uneven)
        self._home = self._ids.index(request.home) if request.home in self._ids else None
        if self._home is not None:
            self._discount = self._home_discount()
            self.totals[self._home] -= self._discount

    def pick(self, workers: Sequence[WorkerView]) -> int:
        """Where the winner stands."""
        least = min(self.totals)
        best = min([i for i, total in enumerate(self.totals) if total == least], key=lambda i: workers[i].sent_tokens)
        spread = self._occupied[best].costs.spread
        if spread < _LEAST_SPREAD:
            return best
        parts = self._price(best)
        limit = least + spread * (parts.first_token + parts.successors + parts.stall + parts.worker_time)
        equals = [i for i, total in enumerate(self.totals) if total <= limit]
        return min(equals, key=lambda i: (-self._cached[i], workers[i].sent_tokens))

    def candidates(self) -> tuple[Candidate, ...]:
        explained: list[Candidate] = []
        for number, worker_id in enumerate(self._ids):
            parts = {f"{name}_ms": value for name, value in self._price(number)._asdict().items()}
            if number == self._home:
                parts["home_ms"] = -self._discount
            explained.append(Candidate(worker_id, sum(parts.values()), parts))
        return tuple(explained)

    def _price(self, number: int) -> Price:
        occupied = self._occupied[number]
        uneven = self._uneven[number] if self._uneven is not None else 0.0
        return price(occupied.costs, self._weights, occupied, self._placement, self._cached[number], uneven)

    def _home_discount(self) -> float:
        prompt_tokens = self._placement.prompt_tokens
        cold_ms = self._occupied[0].costs.prefill_ms(prompt_tokens, prefill_pairs(prompt_tokens, 0))
        return min(self._weights.home_ms, self._weights.home_share * cold_ms)
