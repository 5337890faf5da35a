"""Quotas: rate, concurrency, budget; the ledger that keeps them over restarts and frontends."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.clock import VirtualClock
from headwater.errors import ConfigError, RateLimited
from headwater.frontend.tenants.keyring import TenantSpec
from headwater.frontend.tenants.ledger import Entry, Ledger, MemoryLedger, SqliteLedger, Usage
from headwater.frontend.tenants.meter import MAX_ACCOUNTS, Meter
from headwater.frontend.tenants.quota import QuotaExceeded, TokenBucket

NOVEMBER = datetime(2026, 11, 30, 23, 0, 0, tzinfo=UTC).timestamp()


def meter_of(clock: VirtualClock | None = None, frontend: str = "fe", **limits: object) -> Meter:
    spec = TenantSpec(**limits)
    return Meter(frontend, lambda name: spec, clock or VirtualClock(NOVEMBER))


def over(meter: Meter, tenant: str = "a") -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        meter.enter(tenant)
    return caught.value


def exchange(meter: Meter, ledger: Ledger) -> None:
    entry = meter.entry()
    meter.apply(entry, ledger.sync(entry))


def test_concurrency_is_limited_and_places_are_given_back() -> None:
    meter = meter_of(max_concurrent=2)
    first, _ = meter.enter("a"), meter.enter("a")
    error = over(meter)
    assert (error.quota, error.http_status, error.code) == ("max_concurrent", 429, "rate_limit_exceeded")
    assert "max_concurrent" in str(error)
    meter.enter("b")
    meter.leave(first, Usage())
    meter.leave(first, Usage())
    meter.enter("a")
    over(meter)
    assert meter.accounts["a"].refused == {"max_concurrent": 2}


def test_the_rate_holds_over_time_whatever_requests_need() -> None:
    """Requests ask for 10 output tokens and take 200 more of a prompt; what was not foreseen is paid afterwards."""
    clock = VirtualClock(NOVEMBER)
    meter = meter_of(clock, tokens_per_minute=6000)
    taken = 0
    for _ in range(40_000):
        try:
            visit = meter.enter("a")
            meter.reserve(visit, 190, 1, 10)
        except QuotaExceeded:
            pass
        else:
            meter.leave(visit, Usage(prompt_tokens=190, output_tokens=310, requests=1))
            taken += 500
        clock.advance(0.03)
    minutes = 40_000 * 0.03 / 60
    assert meter.accounts["a"].refused.keys() == {"tokens_per_minute"}
    assert taken == pytest.approx(6000 * (minutes + 1), rel=0.05)


def test_a_request_that_is_larger_than_the_bucket_goes_when_it_is_full() -> None:
    clock = VirtualClock(NOVEMBER)
    meter = meter_of(clock, tokens_per_minute=600)
    meter.reserve(meter.enter("a"), 100_000, 1, 1)
    error = over(meter)
    assert error.retry_after_s == pytest.approx(99_401 / 10, rel=0.02), "until the debt is paid"


def test_retry_after_is_when_it_fits() -> None:
    clock = VirtualClock(NOVEMBER)
    meter = meter_of(clock, tokens_per_minute=600)
    visit = meter.enter("a")
    meter.reserve(visit, 500, 1, 1)
    second = meter.enter("a")
    with pytest.raises(QuotaExceeded) as caught:
        meter.reserve(second, 300, 1, 1)
    clock.advance(caught.value.retry_after_s)
    meter.reserve(second, 300, 1, 1)


def test_the_budget_ends_and_begins_with_the_month() -> None:
    clock = VirtualClock(NOVEMBER)
    meter, ledger = meter_of(clock, monthly_tokens=1000), MemoryLedger()
    visit = meter.enter("a")
    meter.reserve(visit, 900, 1, 50)
    other = meter.enter("a")
    with pytest.raises(QuotaExceeded, match="monthly_tokens"):
        meter.reserve(other, 100, 1, 50)
    meter.leave(other, Usage())
    meter.leave(visit, Usage(prompt_tokens=900, output_tokens=100, requests=1))
    exchange(meter, ledger)
    error = over(meter)
    assert error.quota == "monthly_tokens"
    assert error.retry_after_s == pytest.approx(3600, abs=1), "until the month ends"
    clock.advance(3601)
    exchange(meter, ledger)
    meter.leave(meter.enter("a"), Usage(prompt_tokens=10, requests=1))
    exchange(meter, ledger)
    assert meter.accounts["a"].spent.month_tokens == 10


def test_a_budget_may_be_used_to_the_last_token() -> None:
    meter = meter_of(monthly_tokens=1000)
    meter.reserve(meter.enter("a"), 999, 1, 1)
    with pytest.raises(QuotaExceeded):
        meter.enter("a")


def test_another_rate_gives_nothing_back() -> None:
    clock = VirtualClock(NOVEMBER)
    limits = {"a": TenantSpec(tokens_per_minute=600)}
    meter = Meter("fe", limits.__getitem__, clock)
    meter.reserve(meter.enter("a"), 600, 1, 0)
    limits["a"] = TenantSpec(tokens_per_minute=1200)
    with pytest.raises(QuotaExceeded) as caught:
        meter.reserve(meter.enter("a"), 900, 1, 0)
    assert caught.value.retry_after_s == pytest.approx(15), "600 of 1,200 are taken, 300 more come in 15 s"


def test_what_ended_while_the_ledger_was_written_counts() -> None:
    meter, ledger = meter_of(monthly_tokens=1000), MemoryLedger()
    meter.leave(meter.enter("a"), Usage(prompt_tokens=400, requests=1))
    visit = meter.enter("a")
    entry = meter.entry()
    meter.leave(visit, Usage(prompt_tokens=300, requests=1))
    meter.apply(entry, ledger.sync(entry))
    assert meter.accounts["a"].spent.month_tokens == 700
    exchange(meter, ledger)
    assert meter.accounts["a"].spent.month_tokens == 700


@pytest.fixture(params=["memory", "sqlite"])
def open_ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Ledger]:
    memory = MemoryLedger()
    return (lambda: memory) if request.param == "memory" else (lambda: SqliteLedger(tmp_path / "ledger"))


def test_ledgers_add_up_and_keep_months_apart(open_ledger: Callable[[], Ledger]) -> None:
    first, second = open_ledger(), open_ledger()
    first.sync(Entry("fe-1", "2026-11", 100.0, {"a": Usage(10, 4, 5, 1.5, 1), "b": Usage(1)}, {"a": 2}))
    second.sync(Entry("fe-2", "2026-12", 100.5, {"a": Usage(7)}, {"a": 1, "b": 3}))
    standing = second.sync(Entry("fe-2", "2026-11", 101.0, {"a": Usage(10, 4, 5, 1.5, 1)}, {"a": 1}))
    assert standing.month == {"a": Usage(20, 8, 10, 3.0, 2), "b": Usage(1)}
    assert standing.others_in_progress == {"a": 2}
    standing = first.sync(Entry("fe-1", "2026-12", 101.5))
    assert standing.month == {"a": Usage(7)}
    assert standing.others_in_progress == {"a": 1}, "what a frontend last said of itself"
    assert first.sync(Entry("fe-1", "2026-12", 110.0)).others_in_progress == {}, "long silent"
    first.close()
    second.close()


def test_the_ledger_file_outlives_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    crashed = SqliteLedger(path)
    crashed.sync(Entry("fe-1", "2026-11", 1.0, {"a": Usage(10)}, {"a": 1}))
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("DROP TABLE presence")
    with pytest.raises(OSError, match="ledger"):
        crashed.sync(Entry("fe-1", "2026-11", 2.0, {"a": Usage(5)}))
    again = SqliteLedger(path)
    assert again.sync(Entry("fe-2", "2026-11", 3.0)).month == {"a": Usage(10)}
    assert again.totals() == {"2026-11": {"a": Usage(10)}}
    assert path.stat().st_mode & 0o077 == 0
    crashed.close()
    again.close()


def test_a_ledger_that_was_removed_is_begun_anew_by_all_frontends(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first, second = SqliteLedger(path), SqliteLedger(path)
    first.sync(Entry("f", "2026-11", 1.0, {"acme": Usage(prompt_tokens=5)}))
    second.sync(Entry("g", "2026-11", 1.0))
    path.unlink()
    assert first.sync(Entry("f", "2026-11", 2.0, {"acme": Usage(prompt_tokens=7)})).month["acme"].prompt_tokens == 7
    assert second.sync(Entry("g", "2026-11", 2.0, {"acme": Usage(prompt_tokens=1)})).month["acme"].prompt_tokens == 8
    later = SqliteLedger(path)
    assert later.totals()["2026-11"]["acme"].prompt_tokens == 8, "others read what is written"
    for ledger in (first, second, later):
        ledger.close()


def test_a_ledger_whose_folder_is_gone_comes_back_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    ledger = SqliteLedger(folder / "ledger")
    shutil.rmtree(folder)
    for _ in range(2):
        with pytest.raises(OSError, match=r"ledger"):
            ledger.sync(Entry("f", "2026-11", 1.0, {"acme": Usage(prompt_tokens=5)}))
    folder.mkdir()
    assert ledger.sync(Entry("f", "2026-11", 2.0, {"acme": Usage(prompt_tokens=5)})).month["acme"].prompt_tokens == 5
    ledger.close()


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b"not a database, and long enough to be sure" * 100)
    with pytest.raises(ConfigError, match="ledger"):
        SqliteLedger(path)
    with pytest.raises(ConfigError):
        SqliteLedger(tmp_path / "no" / "folder")


def test_a_restart_remembers_the_month_and_frontends_share_quotas(open_ledger: Callable[[], Ledger]) -> None:
    clock = VirtualClock(NOVEMBER)
    ledger = open_ledger()
    first = meter_of(clock, "fe-1", monthly_tokens=1000, max_concurrent=3)
    second = meter_of(clock, "fe-2", monthly_tokens=1000, max_concurrent=3)
    visits = [first.enter("a"), first.enter("a"), second.enter("a")]
    exchange(first, ledger)
    exchange(second, ledger)
    assert over(second).quota == "max_concurrent"
    first.leave(visits[0], Usage(prompt_tokens=1000, requests=1))
    exchange(first, ledger)
    exchange(second, ledger)
    assert over(second).quota == "monthly_tokens"
    restarted = meter_of(clock, "fe-3", monthly_tokens=1000)
    exchange(restarted, ledger)
    assert over(restarted).quota == "monthly_tokens"
    ledger.close()


def test_the_rate_is_shared_between_frontends(open_ledger: Callable[[], Ledger]) -> None:
    clock, ledger = VirtualClock(NOVEMBER), open_ledger()
    meters = [meter_of(clock, f"fe-{number}", tokens_per_minute=6000) for number in range(2)]
    taken = 0
    for step in range(6000):
        for meter in meters:
            try:
                visit = meter.enter("a")
                meter.reserve(visit, 90, 1, 10)
                meter.leave(visit, Usage(prompt_tokens=90, output_tokens=10, requests=1))
                taken += 100
            except QuotaExceeded:
                continue
        clock.advance(0.1)
        if step % 10 == 9:
            for meter in meters:
                exchange(meter, ledger)
    assert taken == pytest.approx(6000 * (10 + 1), rel=0.05), "ten minutes, and one full bucket"
    ledger.close()


def test_a_ledger_that_fails_loses_nothing() -> None:
    meter, ledger = meter_of(), MemoryLedger()
    meter.leave(meter.enter("a"), Usage(prompt_tokens=10, requests=1))
    meter.failed(meter.entry())
    meter.leave(meter.enter("a"), Usage(prompt_tokens=5, requests=1))
    exchange(meter, ledger)
    assert ledger.sync(Entry("x", "2026-11", NOVEMBER)).month["a"] == Usage(15, requests=2)


def test_names_made_up_by_a_gateway_do_not_fill_the_memory() -> None:
    meter, ledger = meter_of(), MemoryLedger()
    for number in range(2 * MAX_ACCOUNTS):
        meter.leave(meter.enter(f"t{number}"), Usage(1, requests=1))
    assert len(meter.accounts) <= MAX_ACCOUNTS + 1
    exchange(meter, ledger)
    exchange(meter, ledger)
    assert len(meter.accounts) == 0
    assert sum(usage.requests for usage in ledger.sync(Entry("x", "2026-11", NOVEMBER)).month.values()) == (
        2 * MAX_ACCOUNTS
    )


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20_000)), max_size=50),
)
def test_a_bucket_never_gives_more_than_its_rate(per_minute: int, asked: list[tuple[float, float]]) -> None:
    now, taken = 0.0, 0.0
    bucket = TokenBucket(per_minute, now)
    for pause_s, tokens in asked:
        now += pause_s
        wait_s = bucket.wait_s(tokens, now)
        now += wait_s
        assert bucket.wait_s(tokens, now) == pytest.approx(0, abs=1e-6)
        bucket.take(min(tokens, per_minute), now)
        taken += min(tokens, per_minute)
        assert taken <= per_minute * (1 + now / 60) * (1 + 1e-9) + 1


class MeterMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, the ledger and the accounts agree with what was done."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock(NOVEMBER)
        self.ledger = MemoryLedger()
        self.meters = [
            meter_of(self.clock, f"fe-{n}", tokens_per_minute=5000, max_concurrent=4, monthly_tokens=50_000)
            for n in range(2)
        ]
        self.open: list[tuple[int, object]] = []
        self.done = Usage()

    @rule(frontend=st.integers(0, 1), prompt=st.integers(1, 3000))
    def begin(self, frontend: int, prompt: int) -> None:
        try:
            visit = self.meters[frontend].enter("a")
        except RateLimited:
            return
        self.open.append((frontend, visit))
        try:
            self.meters[frontend].reserve(visit, prompt, 1, 100)
        except RateLimited:
            self.end(len(self.open) - 1, 0)

    @rule(number=st.integers(0, 10), tokens=st.integers(0, 3000))
    def end(self, number: int, tokens: int) -> None:
        if number < len(self.open):
            frontend, visit = self.open.pop(number)
            usage = Usage(prompt_tokens=tokens, requests=1)
            self.meters[frontend].leave(visit, usage)  # type: ignore[arg-type]
            self.done.add(usage)

    @rule(frontend=st.integers(0, 1), works=st.booleans())
    def talk(self, frontend: int, works: bool) -> None:
        meter = self.meters[frontend]
        if works:
            exchange(meter, self.ledger)
        else:
            meter.failed(meter.entry())

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        if self.clock.now() + seconds < NOVEMBER + 3000:
            self.clock.advance(seconds)

    @invariant()
    def accounts_agree(self) -> None:
        for number, meter in enumerate(self.meters):
            account = meter.accounts.get("a")
            if account is not None:
                visits = [visit for frontend, visit in self.open if frontend == number]
                assert account.own_in_progress == len(visits) <= 4
                assert account.reserved_tokens == sum(visit.reserved_tokens for visit in visits)  # type: ignore[attr-defined]
                assert account.bucket is None or account.bucket.level(self.clock.now()) <= 5000

    def teardown(self) -> None:
        for meter in self.meters:
            exchange(meter, self.ledger)
        kept = self.ledger.sync(Entry("x", "2026-11", NOVEMBER)).month.get("a", Usage())
        assert (kept.prompt_tokens, kept.requests) == (self.done.prompt_tokens, self.done.requests)


MeterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMeter = MeterMachine.TestCase


def test_sqlite_has_what_the_ledger_needs() -> None:
    assert sqlite3.sqlite_version_info >= (3, 24), "upserts"
