"""Load a block or compute it? Compare the two times; both are learned.

The time to load is that of the tier's link (latency + bytes / bandwidth, from measured loads, behind what is queued
there), the time to compute is the engine's. Computing a token costs more the more come before it, loading it does not,
so the best prefix to load ends where a tier's run ends, or is empty.

A tier that is predicted too slow would never be measured again; `Curiosity` lets one in so many refused loads go ahead
beside the computation, so that a tier that has recovered is noticed at nobody's expense.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwater.types import Tier

_MEMORY = 0.1
"""What a new load counts for, once there are many."""

PrefillMs = Callable[[int, int], float]
"""Milliseconds to compute so many new tokens after so many cached ones."""


class TierRun(NamedTuple):
    """Consecutive blocks that would come from one tier."""

    tier: Tier
    num_blocks: int
    load_ms: float
    """From asking to having them in the engine, after the runs before."""


class LoadPlan(NamedTuple):
    num_blocks: int
    """How many of the offered blocks to load, from the first on."""
    load_ms: float
    saved_ms: float
    """Against computing everything."""


def plan_load(
    runs: Sequence[TierRun], prefill_ms: PrefillMs, *, num_tokens: int, cached_tokens: int, block_tokens: int
) -> LoadPlan:
    """How much of what the store has is worth loading, for a prompt of `num_tokens` of which the engine has the first
    `cached_tokens`. `runs` follow on those."""
    compute_ms = prefill_ms(num_tokens - cached_tokens, cached_tokens)
    best = LoadPlan(0, 0.0, 0.0)
    num_blocks, load_ms = 0, 0.0
    for run in runs:
        num_blocks += run.num_blocks
        load_ms += run.load_ms
        have = min(num_tokens, cached_tokens + num_blocks * block_tokens)
        saved_ms = compute_ms - load_ms - prefill_ms(num_tokens - have, have)
        if saved_ms > best.saved_ms:
            best = LoadPlan(num_blocks, load_ms, saved_ms)
    return best


class TierSpeed:
    """How long loads from one tier take: a belief (latency, bandwidth), times what was learned by size of load.

    Learned as the running mean of log(measured / believed), so that a tier that is a hundred times slower than believed
    is known as such after a handful of loads, and one that has recovered as well. (A least-squares fit relative to the
    duration, as fits engine steps, would hold on to the belief: a slow sample counts for next to nothing in it.)
    """

    def __init__(self, latency_ms: float, bytes_per_s: float) -> None:
        self._latency_ms, self._ms_per_byte = latency_ms, 1e3 / bytes_per_s
        self._overall = _LogRatio()
        self._by_size: dict[int, _LogRatio] = {}

    def observe(self, num_bytes: int, duration_ms: float) -> None:
        if num_bytes <= 0 or not 0 < duration_ms < math.inf:
            return
        log_ratio = math.log(duration_ms / self._believed_ms(num_bytes))
        self._overall.observe(log_ratio)
        self._by_size.setdefault(num_bytes.bit_length(), _LogRatio()).observe(log_ratio)

    def load_ms(self, num_bytes: int) -> float:
        if num_bytes <= 0:
            return 0.0
        learned = self._by_size.get(num_bytes.bit_length(), self._overall)
        return self._believed_ms(num_bytes) * math.exp(learned.mean)

    def _believed_ms(self, num_bytes: int) -> float:
        return self._latency_ms + num_bytes * self._ms_per_byte


class _LogRatio:
    """A running mean: exact at first, then forgetting."""

    __slots__ = ("_count", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    def observe(self, value: float) -> None:
        self._count += 1
        self.mean += max(_MEMORY, 1 / (self._count + 1)) * (value - self.mean)


class TokenTimes:
    """What a token of a prompt takes to load, by tier: a running mean over the runs that were offered, queues included.
    What a worker tells routers, which know nothing of bytes and links."""

    def __init__(self) -> None:
        self.ms: dict[Tier, float] = {}

    def note(self, runs: Sequence[TierRun], block_tokens: int) -> None:
        for run in runs:
            if run.num_blocks > 0 and 0 <= run.load_ms < math.inf:
                token_ms = run.load_ms / (run.num_blocks * block_tokens)
                known_ms = self.ms.get(run.tier, token_ms)
                self.ms[run.tier] = known_ms + _MEMORY * (token_ms - known_ms)


class ComputeRate(NamedTuple):
    """What an engine says about the cost of computing a block of one family."""

    token_ms: float
    pair_ms: float
    """Per token and token before it."""
    block_tokens: int

    def block_ms(self, position: int) -> float:
        """Computing the block at this position, as part of a longer prompt."""
        return self.block_tokens * (self.token_ms + self.pair_ms * position * self.block_tokens)

    def prefill_ms(self, new_tokens: int, cached_tokens: int) -> float:
        """As `PrefillMs`."""
        return new_tokens * (self.token_ms + self.pair_ms * (cached_tokens + new_tokens / 2))


class Curiosity:
    """Counts refusals per tier; every `interval`-th is worth a try in the background."""

    def __init__(self, interval: int = 32) -> None:
        self._interval = interval
        self._refused: dict[Tier, int] = {}

    def refused(self, tier: Tier) -> bool:
        """Whether to try this time."""
        count = self._refused.get(tier, 0) + 1
        self._refused[tier] = count % self._interval
        return count == self._interval
