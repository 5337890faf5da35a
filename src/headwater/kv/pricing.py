"""Load a block or compute it? Compare the two times; both are learned.

The time to load is that of the tier's link (latency + bytes / bandwidth, from measured loads, behind what is queued
there), the time to compute is the engine's. Computing a token costs more the more come before it, loading it does not,
so the best prefix to load ends where a tier's run ends, or is empty.

A tier that is predicted too slow would never be measured again; `Curiosity` lets one in so many refused loads go ahead
beside the computation, so that a tier that has recovered is noticed at nobody's expense.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwater.types import Tier

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


class ComputeRate(NamedTuple):
    """What an engine says about the cost of computing a block of one family."""

    token_ms: float
    pair_ms: float
    """Per token and token before it."""
    block_tokens: int

    def block_ms(self, position: int) -> float:
        """Computing the block at this position, as part of a longer prompt."""
        return self.block_tokens * (self.token_ms + self.pair_ms * position * self.block_tokens)


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
