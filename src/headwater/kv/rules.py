"""What an operator may say about the life of blocks in a tier, and what is counted of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """Fractions are of the tier's bytes."""

    write_s: float = 60.0
    """How long a writer may take from reserve to commit."""
    lease_s: float = 60.0
    ttl_s: float | None = None
    """Blocks older than this are not served."""
    max_pinned: float = 0.5
    max_reserved: float = 0.25
    """What all writers together may hold."""
    high_watermark: float = 0.98
    low_watermark: float = 0.95
    """Above the high one `trim` makes room down to the low one, so that a burst finds some."""


@dataclass(slots=True)
class Counters:
    num_stored: int = 0
    num_evicted: int = 0
    num_refused: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_damaged: int = 0
    num_expired: int = 0
    """Reservations and leases that ran out, and blocks past their time."""
