"""Why requests went where they went, and what came of it: a bounded memory of decisions.

A record begins when a request is submitted and is filled in until its last sequence has ended. The candidates are not
listed when a decision is made: it keeps what is needed to list them later (`Decision.explain`), and when all that is
kept grows too large the oldest decisions lose it and keep their summary.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, Literal

from headwater.router.disagg import PrefillChoice
from headwater.router.policy import Candidate, Decision
from headwater.router.residency import Knowledge

Outcome = Literal["waiting", "running", "finished", "aborted", "failed"]

_SHOWN_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Detour:
    """A worker that was tried first and refused."""

    worker_id: str
    reason: str


@dataclass(slots=True, eq=False)
class DecisionRecord:
    """One prompt's way to a worker."""

    request_id: str
    model: str
    asked: float
    """Epoch seconds."""
    prompt_tokens: int
    num_sequences: int
    tenant: str = ""
    session_id: str | None = None
    priority: int = 0
    decision: Decision | None = None
    prefill: PrefillChoice | None = None
    """Where the prompt is computed; None where only the worker itself could."""
    worker_id: str | None = None
    queued_ms: float = 0.0
    predicted_ttft_ms: float | None = None
    predicted_cached_tokens: int = 0
    best_cached_tokens: int = 0
    """Of the candidate that had most."""
    knowledge: Knowledge = "none"
    """How the worker's cached tokens are known."""
    detours: list[Detour] = field(default_factory=list[Detour])
    outcome: Outcome = "waiting"
    error_code: str | None = None
    ttft_ms: float | None = None
    """From being sent to the worker, as the prediction is."""
    cached_tokens: int | None = None
    output_tokens: int = 0
    e2e_ms: float | None = None
    """From being submitted."""
    open_sequences: int = 0

    def candidates(self) -> tuple[Candidate, ...]:
        return self.decision.explain() if self.decision is not None else ()

    def forget_candidates(self) -> None:
        if self.decision is not None:
            before = self.decision
            self.decision = Decision(before.policy, before.winner, before.num_candidates, before.cached_tokens)

    def describe(self, most_candidates: int = _SHOWN_CANDIDATES) -> dict[str, Any]:
        """As JSON shows it."""
        decision = self.decision
        return {
            "request_id": self.request_id,
            "model": self.model,
            "asked": self.asked,
            "prompt_tokens": self.prompt_tokens,
            "sequences": self.num_sequences,
            "tenant": self.tenant or None,
            "session_id": self.session_id,
            "priority": self.priority,
            "policy": decision.policy if decision is not None else None,
            "worker_id": self.worker_id,
            "prefill": self.prefill.describe() if self.prefill is not None else None,
            "queued_ms": round(self.queued_ms, 3),
            "num_candidates": decision.num_candidates if decision is not None else 0,
            "knowledge": self.knowledge,
            "predicted": {
                "ttft_ms": _rounded(self.predicted_ttft_ms),
                "cached_tokens": self.predicted_cached_tokens,
                "best_cached_tokens": self.best_cached_tokens,
            },
            "actual": {
                "outcome": self.outcome,
                "error": self.error_code,
                "ttft_ms": _rounded(self.ttft_ms),
                "cached_tokens": self.cached_tokens,
                "output_tokens": self.output_tokens,
                "e2e_ms": _rounded(self.e2e_ms),
            },
            "detours": [{"worker_id": detour.worker_id, "reason": detour.reason} for detour in self.detours],
            "candidates": self._listed(most_candidates),
        }

    def _listed(self, most: int) -> list[dict[str, Any]]:
        """The cheapest ones in order; the winner is always among them."""
        candidates = self.candidates()
        listed = nsmallest(most, candidates, key=lambda candidate: candidate.total)
        if self.decision is not None and all(c.worker_id != self.decision.winner for c in listed):
            listed += [candidate for candidate in candidates if candidate.worker_id == self.decision.winner]
        return [
            {
                "worker_id": candidate.worker_id,
                "total": _rounded(candidate.total),
                "parts": {name: _rounded(value) for name, value in candidate.parts.items()},
            }
            for candidate in listed
        ]


class DecisionLog:
    """The last decisions."""

    def __init__(self, max_decisions: int = 2048, max_candidates: int = 200_000) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=max_decisions)
        self._explained: deque[tuple[DecisionRecord, Decision]] = deque()
        self._max_candidates = max_candidates
        self._num_candidates = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[DecisionRecord]:
        """The newest first."""
        return reversed(self._records)

    @property
    def num_candidates(self) -> int:
        """Kept for explanations."""
        return self._num_candidates

    def add(self, record: DecisionRecord) -> None:
        self._records.append(record)

    def decided(self, record: DecisionRecord, decision: Decision) -> None:
        """A decision was made for a record (again, after a detour)."""
        record.decision = decision
        self._explained.append((record, decision))
        self._num_candidates += decision.num_candidates
        while len(self._explained) > 1 and self._too_much():
            oldest, forgotten = self._explained.popleft()
            self._num_candidates -= forgotten.num_candidates
            if oldest.decision is forgotten:
                oldest.forget_candidates()

    def find(self, request_id: str) -> list[DecisionRecord]:
        return [record for record in self._records if record.request_id == request_id]

    def _too_much(self) -> bool:
        return self._num_candidates > self._max_candidates or len(self._explained) > (self._records.maxlen or 0)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
