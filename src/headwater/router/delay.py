"""The default policy: the placement with the lowest predicted delay, suffered and inflicted (`headwater.router.price`).

Deterministic: no temperature, no random tie; equal prices go to the worker that was sent least. Where workers of one
class measure differently, prices closer than that disagreement count as equal, and the most cached prefix, then the
fewest tokens sent so far, decide: an error that differs between workers would otherwise draw all cold prompts to the
one that looks faster, and its cache would churn.
Workers that no step time is known of are priced with `UNKNOWN`: only ratios matter, so any sane figures will do.
"""

from collections.abc import Sequence
from typing import ClassVar

from headwater.router.home import HomeRing
from headwater.router.policy import Candidate, Decision, decide
from headwater.router.price import Placement, Price, Profile, StepCosts, prefill_pairs, price, profile
from headwater.router.request import RouteRequest
from headwater.router.view import WorkerView

UNKNOWN = StepCosts(
    prefill_step_ms=10.0,
    prefill_token_ms=0.02,
    prefill_pair_ms=1e-6,
    decode_step_ms=6.0,
    decode_sequence_ms=0.05,
    decode_context_token_ms=5e-5,
    chunk_tokens=2048,
)
"""About a 70B model on one server."""
_LEAST_SPREAD = 0.02
"""Disagreement below this is noise of the measurement."""


class Delay:
    """`decode_share`: how much the time after the first token matters, from 0 (first token only) to 1 (end to end)."""

    name: ClassVar[str] = "delay"
    uses_residency: ClassVar[bool] = True

    def __init__(self, decode_share: float = 1.0) -> None:
        self._weights: Profile = profile(decode_share)
        self._ring = HomeRing()

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        expected = min(request.expected_output_tokens, float(request.max_tokens))
        placement = Placement(request.num_prompt_tokens, request.num_sequences, expected, request.churn)
        home = self._ring.home(request.keys, request.block_size, [worker.worker_id for worker in workers])
        cached = request.cached_tokens.get
        prices = [
            price(worker.costs or UNKNOWN, self._weights, worker, placement, cached(worker.worker_id, 0))
            for worker in workers
        ]
        totals = [sum(parts) for parts in prices]
        discount = self._home_discount(workers[0].costs or UNKNOWN, request.num_prompt_tokens)
        if home is not None:
            totals[next(i for i, worker in enumerate(workers) if worker.worker_id == home)] -= discount
        winner = self._pick(request, workers, prices, totals)
        candidates = self._explain(workers, prices, home, discount) if request.explain else ()
        return decide(self.name, request, workers[winner], workers, candidates)

    def _home_discount(self, costs: StepCosts, prompt_tokens: int) -> float:
        cold_ms = costs.prefill_ms(prompt_tokens, prefill_pairs(prompt_tokens, 0))
        return min(self._weights.home_ms, self._weights.home_share * cold_ms)

    def _pick(
        self, request: RouteRequest, workers: Sequence[WorkerView], prices: list[Price], totals: list[float]
    ) -> int:
        best = min(range(len(totals)), key=lambda i: (totals[i], workers[i].sent_tokens))
        costs = workers[best].costs
        if costs is None or costs.spread < _LEAST_SPREAD:
            return best
        specific = prices[best].first_token + prices[best].stall + prices[best].worker_time
        limit = totals[best] + costs.spread * specific
        cached = request.cached_tokens.get
        equals = [i for i, total in enumerate(totals) if total <= limit]
        return min(equals, key=lambda i: (-cached(workers[i].worker_id, 0), workers[i].sent_tokens))

    def _explain(
        self, workers: Sequence[WorkerView], prices: list[Price], home: str | None, discount: float
    ) -> tuple[Candidate, ...]:
        explained: list[Candidate] = []
        for worker, parts in zip(workers, prices, strict=True):
            named = {f"{name}_ms": value for name, value in parts._asdict().items()}
            if worker.worker_id == home:
                named["home_ms"] = -discount
            explained.append(Candidate(worker.worker_id, sum(named.values()), named))
        return tuple(explained)
