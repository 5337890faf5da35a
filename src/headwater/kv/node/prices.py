"""What the node has learned about time: how fast each tier is, how long what is queued there will take, and what the
engines say that computing costs."""

from headwater.kv.block import Family
from headwater.kv.pricing import ComputeRate, TierSpeed
from headwater.types import Tier

_PRIORS: dict[Tier, tuple[float, float]] = {
    "host": (0.1, 4e9),
    "disk": (0.5, 1e9),
    "peer": (1.0, 1e9),
    "object": (30.0, 1e8),
}
"""Latency in ms and bytes per second, believed until measured."""
_SHAPE_TOKENS = 8192
"""Where attention costs as much as the rest, for engines that say nothing."""
_UNKNOWN = ComputeRate(1.0, 1.0 / _SHAPE_TOKENS, 16)
MAX_RATES = 256


class NodePrices:
    def __init__(self) -> None:
        self._speeds = {tier: TierSpeed(*belief) for tier, belief in _PRIORS.items()}
        self._queued: dict[Tier, int] = {}
        self._rates: dict[Family, ComputeRate] = {}

    def observe(self, tier: Tier, num_bytes: int, duration_ms: float) -> None:
        """A load that took so long, waiting in line not counted."""
        self._speeds[tier].observe(num_bytes, duration_ms)

    def queue(self, tier: Tier, num_bytes: int) -> None:
        """Negative when done."""
        self._queued[tier] = self._queued.get(tier, 0) + num_bytes

    def load_ms(self, tier: Tier, num_bytes: int) -> float:
        """Into the engine, behind what is queued now. What is not in the host tier passes through it."""
        copy_ms = self._speeds["host"].load_ms(num_bytes)
        if tier == "host":
            return copy_ms
        speed = self._speeds[tier]
        return speed.load_ms(self._queued.get(tier, 0)) + speed.load_ms(num_bytes) + copy_ms

    def describe(self, family: Family, rate: ComputeRate) -> None:
        if len(self._rates) < MAX_RATES or family in self._rates:
            self._rates[family] = rate

    def worth(self, family: Family, position: int) -> float:
        """Milliseconds of computing that a block saves, per byte it takes."""
        return self._rates.get(family, _UNKNOWN).block_ms(position) / (family.parts * family.payload_bytes)

    def pays(self, tier: Tier, family: Family, position: int, num_blocks: int) -> bool:
        """Whether a run of blocks that ends at this position would be loaded from the tier rather than computed."""
        rate = self._rates.get(family)
        if rate is None:
            return True
        num_bytes = num_blocks * family.parts * family.payload_bytes
        compute_ms = sum(rate.block_ms(position - back) for back in range(num_blocks))
        return self._speeds[tier].load_ms(num_bytes) < compute_ms
