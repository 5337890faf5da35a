"""Records of decisions: bounded, found again, and told in words."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cli.explain import in_words, look
from headwater.frontend.journal import DecisionJournal
from headwater.frontend.router_metrics import RouterMetrics
from headwater.router.decisions import DecisionLog, DecisionRecord
from headwater.router.policy import Candidate, Decision


def candidates(number: int) -> tuple[Candidate, ...]:
    return tuple(Candidate(f"w{i}", 10.0 * i, {"first_token_ms": 10.0 * i}) for i in range(number))


def decision(number: int, winner: str = "w0") -> Decision:
    return Decision("delay", winner, number, 64, lambda: candidates(number))


def record(request_id: str = "r") -> DecisionRecord:
    return DecisionRecord(request_id, "m", 1.0, 100, 1)


def test_the_oldest_decisions_go_first_and_lose_their_candidates_before() -> None:
    log = DecisionLog(max_decisions=10, max_candidates=12)
    for number in range(15):
        made = record(f"r{number}")
        log.add(made)
        log.decided(made, decision(4))
    assert [kept.request_id for kept in log] == [f"r{number}" for number in range(14, 4, -1)]
    assert [len(kept.candidates()) for kept in log] == [4, 4, 4] + [0] * 7
    assert log.num_candidates == 12
    assert log.find("r14")[0].describe()["candidates"][0]["worker_id"] == "w0"
    assert log.find("r5")[0].describe()["num_candidates"] == 4
    assert log.find("r1") == []


def test_a_decision_with_very_many_candidates_is_kept_all_the_same() -> None:
    log = DecisionLog(max_candidates=100)
    made = record()
    log.add(made)
    log.decided(made, decision(1000))
    assert len(made.candidates()) == 1000


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=60))
def test_what_is_kept_stays_bounded_with_detours_too(made: Sequence[tuple[int, int]]) -> None:
    log = DecisionLog(max_decisions=5, max_candidates=60)
    records = [record(f"r{number}") for number in range(6)]
    for each in records:
        log.add(each)
    latest: dict[int, Decision] = {}
    for which, number in made:
        latest[which] = decision(number)
        log.decided(records[which], latest[which])
        assert len(records[which].candidates()) == number, "the newest can always be explained"
        assert log.num_candidates <= max(60, number)
    for which, last in latest.items():
        kept = records[which].decision
        assert kept is last or records[which].candidates() == ()


def test_only_the_cheapest_are_listed_and_the_winner_always() -> None:
    made = record()
    made.decision = decision(30, "w25")
    listed = made.describe(3)["candidates"]
    assert [candidate["worker_id"] for candidate in listed] == ["w0", "w1", "w2", "w25"]


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        (["finished", "finished"], "finished"),
        (["finished", "aborted"], "aborted"),
        (["failed", "aborted"], "failed"),
        (["aborted", "failed"], "failed"),
    ],
)
def test_the_worst_end_of_a_requests_sequences_is_its_outcome(ends: list[str], outcome: str) -> None:
    journal = DecisionJournal(None, RouterMetrics())  # type: ignore[arg-type]  # asked nothing here
    made = DecisionRecord("r", "m", 1.0, 100, 2)
    journal.begin(made)
    for end in ends:
        assert made.e2e_ms is None
        journal.ended(made, end, 7, 0.5)
    assert (made.outcome, made.output_tokens, made.e2e_ms) == (outcome, 14, 500.0)


def test_a_decision_in_words() -> None:
    made = record("req-1")
    made.decision = decision(3)
    made.worker_id = "w0"
    made.predicted_ttft_ms, made.predicted_cached_tokens, made.best_cached_tokens = 12.5, 64, 96
    made.queued_ms, made.tenant = 20.0, "key-1"
    made.outcome, made.ttft_ms, made.cached_tokens, made.output_tokens, made.e2e_ms = "finished", 14.0, 64, 5, 99.0
    text = "\n".join(in_words(made.describe()))
    assert "req-1 (m, 100 prompt tokens) went to w0, one of 3, chosen by delay" in text
    assert "waited 20.0 ms in line (priority 0, tenant key-1)" in text
    assert "expected: first token after 12.5 ms, 64 of 100 tokens cached (32 fewer than another worker has)" in text
    assert "happened: first token after 14.0 ms, 64 of 100 tokens cached; 5 tokens generated, finished" in text
    assert "w1 would have cost 10.0 more, most of it first token ms" in text


def test_a_request_that_reached_no_worker_in_words() -> None:
    made = record("req-1")
    made.outcome, made.error_code = "failed", "overloaded"
    text = "\n".join(in_words(made.describe()))
    assert "was sent to no worker" in text
    assert "happened: failed (overloaded)" in text


class SharedPort:
    """Several frontends behind one address; whoever answers is whoever's turn it is."""

    def __init__(self, *frontends: dict[str, list[dict[str, Any]]]) -> None:
        self.frontends = frontends
        self.asked = 0

    def get_json(self, path: str) -> Any:
        assert path.startswith("/debug/decisions?request_id=a%2Fb&")
        number = self.asked % len(self.frontends)
        self.asked += 1
        return {"frontend_id": f"fe-{number}", "decisions": self.frontends[number].get("a/b", [])}


def test_explain_asks_until_the_frontend_that_knows_has_answered() -> None:
    knows = SharedPort({}, {}, {}, {"a/b": [{"request_id": "a/b"}]})
    assert look(knows, "a/b", 5) == [{"request_id": "a/b"}]  # type: ignore[arg-type]
    nobody = SharedPort({}, {})
    assert look(nobody, "a/b", 5) == []  # type: ignore[arg-type]
    assert 10 <= nobody.asked <= 48
