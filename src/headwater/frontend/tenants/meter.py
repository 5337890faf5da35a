"""The accounts of all tenants at one frontend: what they may still take, and what they took.

A request enters (its tenant has room for one more and owes nothing), reserves what it is expected to need when it goes
to a worker, and leaves with what it did need. Pure but for the clock: `entry` and `apply` are the two halves of an
exchange with the ledger, which somebody else carries out. Accounts are bounded in number: beyond that, names that a
gateway makes up share one account.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from headwater.clock import Clock
from headwater.frontend.tenants.keyring import TenantSpec
from headwater.frontend.tenants.ledger import Entry, Standing, Usage
from headwater.frontend.tenants.quota import (
    QuotaExceeded,
    Spent,
    TokenBucket,
    check_budget,
    check_concurrency,
    check_rate,
)

MAX_ACCOUNTS = 4096
OTHERS = "(others)"
_FIRST_GUESS_TOKENS = 128.0
_FORGETTING = 0.1

TenantOf = Callable[[str], TenantSpec]


@dataclass(slots=True)
class Account:
    """One tenant at this frontend."""

    spent: Spent = field(default_factory=Spent)
    """Of all frontends."""
    own_in_progress: int = 0
    bucket: TokenBucket | None = None
    since_start: Usage = field(default_factory=Usage)
    unsent: Usage = field(default_factory=Usage)
    """Not in the ledger yet."""
    reserved_tokens: int = 0
    sent_tokens: int = 0
    """Told to the ledger this month, ..."""
    others_tokens: int | None = None
    """... and what others told it; None: not known yet."""
    mean_output_tokens: float = _FIRST_GUESS_TOKENS
    refused: dict[str, int] = field(default_factory=dict[str, int])
    """Requests refused, by quota."""


@dataclass(slots=True)
class Visit:
    """One request's part of its tenant's account."""

    tenant: str
    account: Account
    reserved_tokens: int = 0
    left: bool = False


class Meter:
    def __init__(self, frontend_id: str, tenant_of: TenantOf, clock: Clock) -> None:
        self._frontend_id = frontend_id
        self._tenant_of = tenant_of
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._month = self._now_month()

    @property
    def accounts(self) -> dict[str, Account]:
        return self._accounts

    def enter(self, tenant: str) -> Visit:
        """Raises `QuotaExceeded`."""
        account, spec, now = self._account(tenant), self._tenant_of(tenant), self._clock.now()
        try:
            check_concurrency(tenant, spec, account.spent)
            check_budget(tenant, spec, account.spent, account.reserved_tokens + 1, self._month_ends_in_s())
            if (bucket := self._bucket(account, spec, now)) is not None:
                check_rate(tenant, bucket, 1, now)
        except QuotaExceeded as error:
            self._refused(account, error)
            raise
        account.own_in_progress += 1
        account.spent.in_progress += 1
        return Visit(tenant, account)

    def reserve(self, visit: Visit, prompt_tokens: int, num_sequences: int, max_tokens: int) -> None:
        """Before it goes to a worker; may be called again for another prompt of it. Raises `QuotaExceeded`."""
        account, spec, now = visit.account, self._tenant_of(visit.tenant), self._clock.now()
        needed = prompt_tokens + num_sequences * round(min(float(max_tokens), account.mean_output_tokens))
        bucket = self._bucket(account, spec, now)
        try:
            check_budget(visit.tenant, spec, account.spent, account.reserved_tokens + needed, self._month_ends_in_s())
            if bucket is not None:
                check_rate(visit.tenant, bucket, needed, now)
        except QuotaExceeded as error:
            self._refused(account, error)
            raise
        if bucket is not None:
            bucket.take(needed, now)
        account.reserved_tokens += needed
        visit.reserved_tokens += needed

    def leave(self, visit: Visit, usage: Usage, num_sequences: int = 1) -> None:
        """It is over, and this is what it took. Idempotent."""
        if visit.left:
            return
        visit.left = True
        account, spec, now = visit.account, self._tenant_of(visit.tenant), self._clock.now()
        account.own_in_progress -= 1
        account.spent.in_progress -= 1
        account.reserved_tokens -= visit.reserved_tokens
        account.spent.month_tokens += usage.tokens
        account.since_start.add(usage)
        account.unsent.add(usage)
        if usage.output_tokens:
            mean = usage.output_tokens / max(1, num_sequences)
            account.mean_output_tokens += _FORGETTING * (mean - account.mean_output_tokens)
        if (bucket := self._bucket(account, spec, now)) is not None:
            bucket.take(usage.tokens - visit.reserved_tokens, now)

    # The ledger

    def entry(self) -> Entry:
        """What is new since the last one. It must come back through `apply` or `failed`."""
        month = self._now_month()
        if month != self._month:
            self._begin_month(month)
        added: dict[str, Usage] = {}
        for name, account in self._accounts.items():
            if account.unsent != Usage():
                added[name], account.unsent = account.unsent, Usage()
        present = {name: account.own_in_progress for name, account in self._accounts.items() if account.own_in_progress}
        return Entry(self._frontend_id, month, self._clock.epoch(), added, present)

    def apply(self, entry: Entry, standing: Standing) -> None:
        """What all frontends together have."""
        if entry.month != self._month:
            return
        now = self._clock.now()
        for name, usage in entry.added.items():
            self._accounts[name].sent_tokens += usage.tokens
        for name in {*standing.month, *standing.others_in_progress, *self._accounts}:
            account = self._known_account(name)
            if account is None:
                continue
            month = standing.month.get(name, Usage()).tokens
            account.spent.month_tokens = month + account.unsent.tokens
            account.spent.in_progress = account.own_in_progress + standing.others_in_progress.get(name, 0)
            others = month - account.sent_tokens
            if account.bucket is not None and account.others_tokens is not None:
                account.bucket.take(max(0, others - account.others_tokens), now)
            account.others_tokens = others
        self._forget_idle()

    def failed(self, entry: Entry) -> None:
        """The ledger did not take it: it is told again the next time."""
        for name, usage in entry.added.items():
            self._accounts[name].unsent.add(usage)

    # Accounts

    def _account(self, name: str) -> Account:
        account = self._accounts.get(name)
        if account is None:
            name = name if len(self._accounts) < MAX_ACCOUNTS else OTHERS
            account = self._accounts.setdefault(name, Account())
        return account

    def _known_account(self, name: str) -> Account | None:
        """Those with limits are followed even when they ask elsewhere."""
        return self._accounts.get(name) or (self._account(name) if self._tenant_of(name).has_quotas else None)

    def _bucket(self, account: Account, spec: TenantSpec, now: float) -> TokenBucket | None:
        limit = spec.tokens_per_minute
        if limit is None:
            account.bucket = None
        elif account.bucket is None:
            account.bucket = TokenBucket(limit, now)
        elif account.bucket.per_minute != limit:
            account.bucket.resize(limit, now)
        return account.bucket

    def _refused(self, account: Account, error: QuotaExceeded) -> None:
        account.refused[error.quota] = account.refused.get(error.quota, 0) + 1

    def _forget_idle(self) -> None:
        """Only when names are many: those without limits, with nothing open and nothing to tell."""
        if len(self._accounts) < MAX_ACCOUNTS // 2:
            return
        for name, account in list(self._accounts.items()):
            idle = not account.own_in_progress and account.unsent == Usage()
            if idle and not self._tenant_of(name).has_quotas:
                del self._accounts[name]

    # Months

    def _now_month(self) -> str:
        return datetime.fromtimestamp(self._clock.epoch(), UTC).strftime("%Y-%m")

    def _begin_month(self, month: str) -> None:
        self._month = month
        for account in self._accounts.values():
            account.spent.month_tokens = account.unsent.tokens
            account.sent_tokens, account.others_tokens = 0, 0

    def _month_ends_in_s(self) -> float:
        now = datetime.fromtimestamp(self._clock.epoch(), UTC)
        first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        return ((first + timedelta(days=32)).replace(day=1) - now).total_seconds()
