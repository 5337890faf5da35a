"""One tenant's limits: a bucket of tokens, a number of requests, a budget for the month. Pure: time comes with calls.

The bucket holds at most a minute's worth and fills evenly. A request takes what it is expected to need when it is
sent to a worker; when it ends, the difference to what it did need is settled, which may leave a debt that the next
ones wait for. So the rate holds over time exactly, and no single request is too large for it: one that needs more than
a full bucket goes when the bucket is full.
"""

from dataclasses import dataclass

from headwater.errors import RateLimited
from headwater.frontend.tenants.keyring import TenantSpec

_SECONDS_PER_MINUTE = 60.0
_CONCURRENCY_RETRY_S = 1.0
_LONGEST_RETRY_S = 24 * 3600.0


class QuotaExceeded(RateLimited):
    """`quota` is the name of the limit."""

    def __init__(self, quota: str, message: str, retry_after_s: float) -> None:
        super().__init__(f"{message} (quota {quota})", retry_after_s=min(_LONGEST_RETRY_S, max(1.0, retry_after_s)))
        self.quota = quota


class TokenBucket:
    def __init__(self, per_minute: int, now: float) -> None:
        self._capacity = float(per_minute)
        self._level = float(per_minute)
        self._at = now

    @property
    def per_minute(self) -> float:
        return self._capacity

    def level(self, now: float) -> float:
        """Tokens that may be taken; negative for a debt."""
        if now > self._at:
            filled = self._level + (now - self._at) * self._capacity / _SECONDS_PER_MINUTE
            self._level, self._at = min(self._capacity, filled), now
        return self._level

    def wait_s(self, num_tokens: float, now: float) -> float:
        """Until so many may be taken; 0 when they may be now."""
        wanted = min(max(num_tokens, 1.0), self._capacity)
        return max(0.0, wanted - self.level(now)) * _SECONDS_PER_MINUTE / self._capacity

    def take(self, num_tokens: float, now: float) -> None:
        """May leave a debt. Negative numbers give back."""
        self._level = min(self._capacity, self.level(now) - num_tokens)

    def resize(self, per_minute: int, now: float) -> None:
        """Another rate; what was taken stays taken."""
        taken = self._capacity - self.level(now)
        self._capacity = float(per_minute)
        self._level = self._capacity - taken


@dataclass(slots=True)
class Spent:
    """What others and we have taken of a tenant's quotas, as far as is known."""

    month_tokens: int = 0
    in_progress: int = 0


def check_concurrency(name: str, spec: TenantSpec, spent: Spent) -> None:
    """Raises `QuotaExceeded`."""
    limit = spec.max_concurrent
    if limit is not None and spent.in_progress >= limit:
        raise QuotaExceeded(
            "max_concurrent",
            f"tenant {name} has {spent.in_progress} requests in progress, its limit is {limit}",
            _CONCURRENCY_RETRY_S,
        )


def check_budget(name: str, spec: TenantSpec, spent: Spent, needed: int, month_ends_in_s: float) -> None:
    """Raises `QuotaExceeded`."""
    limit = spec.monthly_tokens
    if limit is not None and spent.month_tokens + max(needed, 1) > limit:
        raise QuotaExceeded(
            "monthly_tokens",
            f"tenant {name} has used {spent.month_tokens:,} tokens this month; with {needed:,} more it would be over "
            f"its budget of {limit:,}",
            month_ends_in_s,
        )


def check_rate(name: str, bucket: TokenBucket, needed: int, now: float) -> None:
    """Raises `QuotaExceeded`."""
    wait_s = bucket.wait_s(needed, now)
    if wait_s > 0:
        raise QuotaExceeded(
            "tokens_per_minute",
            f"tenant {name} may use {bucket.per_minute:,.0f} tokens per minute; the {needed:,} of this request are "
            f"free in {wait_s:.1f} s",
            wait_s,
        )
