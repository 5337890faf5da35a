"""Keeps the account of routing decisions: the record that is shown, and the numbers that are counted."""

from headwater.errors import HeadwaterError
from headwater.frontend.router_metrics import RouterMetrics
from headwater.router.decisions import DecisionLog, DecisionRecord, Detour, Outcome
from headwater.router.policy import Decision
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.worker import WorkerView


class DecisionJournal:
    def __init__(self, router: Router, metrics: RouterMetrics) -> None:
        self.log = DecisionLog()
        self._router = router
        self._metrics = metrics

    def begin(self, record: DecisionRecord) -> None:
        record.open_sequences = record.num_sequences
        self.log.add(record)

    def decided(self, record: DecisionRecord, request: RouteRequest, worker: WorkerView, decision: Decision) -> None:
        record.worker_id = worker.worker_id
        record.outcome = "running"
        record.predicted_ttft_ms = self._router.first_token_ms(request, worker)
        record.predicted_cached_tokens = decision.cached_tokens
        record.best_cached_tokens = max(decision.cached_tokens, self._most_cached(request))
        record.knowledge = self._router.view.residency.knowledge(worker.worker_id)
        self.log.decided(record, decision)
        self._metrics.decided(record, decision.policy)

    def placed(self, record: DecisionRecord, waited_s: float) -> None:
        """It had its turn, at once or after a wait."""
        record.queued_ms = waited_s * 1e3
        if waited_s > 0:
            self._metrics.queue_wait.observe(waited_s)

    def detour(self, record: DecisionRecord, worker_id: str, reason: str) -> None:
        record.detours.append(Detour(worker_id, reason))
        self._metrics.detours += 1

    def refused(self, record: DecisionRecord, error: HeadwaterError) -> None:
        record.outcome, record.error_code = "failed", error.code
        self._metrics.refuse(error.code)

    def first_token(self, record: DecisionRecord, sent: float, now: float, cached_tokens: int | None) -> None:
        """Of its first sequence."""
        record.ttft_ms = (now - sent) * 1e3
        record.cached_tokens = cached_tokens
        self._metrics.first_token(record)

    def ended(self, record: DecisionRecord, outcome: Outcome, num_tokens: int, e2e_s: float) -> None:
        """One sequence ended; the worst outcome stays."""
        record.output_tokens += num_tokens
        record.open_sequences -= 1
        if outcome != "finished" and record.outcome != "failed":
            record.outcome = outcome
        if record.open_sequences <= 0:
            record.e2e_ms = e2e_s * 1e3
            if record.outcome in ("running", "waiting"):
                record.outcome = "finished"

    def _most_cached(self, request: RouteRequest) -> int:
        """Of workers that could have had the request."""
        most = 0
        for worker_id, tokens in request.cached_tokens.items():
            if tokens > most:
                worker = self._router.view.worker(worker_id)
                if worker is not None and worker.eligible:
                    most = tokens
        return most
