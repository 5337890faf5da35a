"""KV tiers in virtual time: what lower tiers hold, how fast their links are, and whether a load pays.

The decision is the production one (`headwater.kv.pricing`), admission too; made up are only sizes and speeds. Loads of
a tier follow each other on its link, so a link that is asked too much grows slow, and the price says so. Writing down
costs nothing and is there at once. Host and disk belong to a node and its workers, the object tier to all.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headwater.config.units import parse_bytes, parse_seconds
from headwater.errors import ConfigError
from headwater.kv.admission import AdmitAll, SecondUse
from headwater.kv.identity import split_block_ids
from headwater.kv.pricing import PrefillMs, TierRun, TokenTimes, plan_load
from headwater.protocol.events import BlocksRemoved, BlocksStored, WorkerEvent
from headwater.scheduler.plan import StepPlan
from headwater.sim.timing import StepTimes
from headwater.types import Tier

_WRITTEN = re.compile(r"(host|disk|object):([^@+]+)@([^@+]+)/s(?:\+(.+))?")
_SHARED: tuple[Tier, ...] = ("object",)


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Written `host:512GiB@50GB/s` or `object:20TiB@5GB/s+30ms`: size, speed, and what a load takes at least."""

    tier: Tier
    num_bytes: int
    bytes_per_s: float
    latency_s: float = 0.0

    @classmethod
    def parse(cls, written: str) -> "TierSpec":
        """Raises `ConfigError`."""
        matched = _WRITTEN.fullmatch(written)
        if matched is None:
            raise ConfigError(
                f"no tier is written {written!r}", hint="for example host:512GiB@50GB/s or disk:8TiB@6GB/s+1ms"
            )
        tier, size, speed, latency = matched.groups()
        try:
            spec = cls(tier, parse_bytes(size), parse_bytes(speed), parse_seconds(latency or "0"))  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(f"tier {written!r}: {error}") from None
        if spec.num_bytes <= 0 or spec.bytes_per_s <= 0:
            raise ConfigError(f"tier {written!r}: size and speed are more than 0")
        return spec


@dataclass(frozen=True, slots=True)
class TierConfig:
    """`tiers`: the nearest first; none: engines have their own memory alone."""

    tiers: tuple[TierSpec, ...] = ()
    block_bytes: int = 0
    workers_per_node: int = 8


class SimTier:
    """One tier: least recently used blocks go first. The tail of a prefix goes before its head."""

    def __init__(self, spec: TierSpec, block_bytes: int) -> None:
        self.spec = spec
        self.num_loaded = 0
        self._block_bytes = block_bytes
        self._capacity = spec.num_bytes // block_bytes
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._admission = AdmitAll() if spec.tier == "host" else SecondUse()
        self._free_at = 0.0

    def __contains__(self, block_id: bytes) -> bool:
        return block_id in self._blocks

    def load_s(self, num_blocks: int, now: float) -> float:
        """How long a load would take that is asked for now."""
        waiting_s = max(0.0, self._free_at - now)
        return waiting_s + self.spec.latency_s + num_blocks * self._block_bytes / self.spec.bytes_per_s

    def load(self, num_blocks: int, now: float) -> float:
        """Load; when it is done."""
        self.num_loaded += num_blocks
        done_at = now + self.load_s(num_blocks, now)
        self._free_at = done_at - self.spec.latency_s
        return done_at

    def note(self, ids: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """These were computed or used: what is stored and what is evicted for that."""
        stored: list[bytes] = []
        for block_id in reversed(ids):
            if block_id in self._blocks:
                self._blocks.move_to_end(block_id)
            elif self._admission.admit(int.from_bytes(block_id[:8], "little")):
                self._blocks[block_id] = None
                stored.append(block_id)
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
        return stored[::-1], evicted


Runs = list[tuple[SimTier, int]]
"""Consecutive blocks, each from the nearest tier that has it."""


class Load(NamedTuple):
    """What was decided for one request."""

    num_blocks: int
    """Of the prompt, from its first on, that will be there."""
    done_at: float


@dataclass(slots=True)
class SimStore:
    """The tiers as one node sees them. `news` are events of its tiers, for each worker to tell."""

    tiers: list[SimTier]
    block_tokens: int
    news: list[list[WorkerEvent]] = field(default_factory=list)
    token_times: TokenTimes = field(default_factory=TokenTimes)

    def plan(self, ids: bytes, first_block: int, num_tokens: int, prefill_ms: PrefillMs, now: float) -> int:
        """How many blocks are worth loading, for a prompt whose first blocks are in the engine."""
        runs = self._runs(split_block_ids(ids)[first_block:])
        return self._plan(runs, first_block, num_tokens, prefill_ms, now)

    def load(self, ids: bytes, first_block: int, num_tokens: int, prefill_ms: PrefillMs, now: float) -> Load:
        """Begin to load what is worth it."""
        runs = self._runs(split_block_ids(ids)[first_block:])
        left = num_blocks = self._plan(runs, first_block, num_tokens, prefill_ms, now)
        done_at = now
        for tier, count in runs:
            if left <= 0:
                break
            done_at = tier.load(min(count, left), done_at)
            left -= count
        return Load(first_block + num_blocks, done_at)

    def _plan(self, runs: Runs, first_block: int, num_tokens: int, prefill_ms: PrefillMs, now: float) -> int:
        if not runs:
            return 0
        priced = [TierRun(tier.spec.tier, count, tier.load_s(count, now) * 1e3) for tier, count in runs]
        self.token_times.note(priced, self.block_tokens)
        return plan_load(
            priced,
            prefill_ms,
            num_tokens=num_tokens,
            cached_tokens=first_block * self.block_tokens,
            block_tokens=self.block_tokens,
        ).num_blocks

    def note(self, ids: bytes) -> None:
        """Blocks were committed in an engine of the node, computed or loaded."""
        split = split_block_ids(ids)
        for tier in self.tiers:
            stored, evicted = tier.note(split)
            for listener in self.news:
                if stored:
                    listener.append(BlocksStored(b"".join(stored), None, tier.spec.tier))
                if evicted:
                    listener.append(BlocksRemoved(b"".join(evicted), tier.spec.tier))

    def _runs(self, split: Sequence[bytes]) -> Runs:
        runs: Runs = []
        for block_id in split:
            tier = next((tier for tier in self.tiers if block_id in tier), None)
            if tier is None:
                break
            if runs and runs[-1][0] is tier:
                runs[-1] = tier, runs[-1][1] + 1
            else:
                runs.append((tier, 1))
        return runs


def make_stores(config: TierConfig, num_workers: int, block_tokens: int) -> list[SimStore | None]:
    """One per worker; those of a node have the same."""
    if not config.tiers:
        return [None] * num_workers
    shared = {spec: SimTier(spec, config.block_bytes) for spec in config.tiers if spec.tier in _SHARED}
    stores: list[SimStore | None] = []
    for number in range(num_workers):
        if number % config.workers_per_node == 0:
            tiers = [shared.get(spec) or SimTier(spec, config.block_bytes) for spec in config.tiers]
            store = SimStore(tiers, block_tokens)
        stores.append(store)
    return stores


def loaded_blocks(stores: Sequence[SimStore | None]) -> dict[Tier, int]:
    """By tier, over all nodes."""
    tiers = {id(tier): tier for store in stores if store is not None for tier in store.tiers}
    loaded: dict[Tier, int] = {}
    for tier in tiers.values():
        loaded[tier.spec.tier] = loaded.get(tier.spec.tier, 0) + tier.num_loaded
    return loaded


def prefill_times(times: StepTimes, chunk_tokens: int) -> PrefillMs:
    """What computing a prompt alone takes, in chunks of a step."""

    def prefill_ms(new_tokens: int, cached_tokens: int) -> float:
        total_ms, position, left = 0.0, cached_tokens, new_tokens
        while left > 0:
            tokens = min(left, chunk_tokens)
            pairs = int(tokens * (position + tokens / 2))
            total_ms += times.duration_ms(StepPlan((), 0, tokens, pairs, 0), 0.0)
            position, left = position + tokens, left - tokens
        return total_ms

    return prefill_ms
