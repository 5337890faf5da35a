"""Which part of a tier each tenant may count on.

A share is a guarantee, not a fence: what one leaves unused others may use, and when room is needed the block to go is
one of whoever is furthest over its share. A tenant within its share never loses a block to one that is not. Tenants
without a share of their own form one group that has what the others leave.
"""

from collections.abc import Mapping, Sequence

from headwater.errors import ConfigError

OTHERS = 0
"""The group of all tenants without a share of their own."""
MAX_SHARES = 1024


class Shares:
    """`shares`: tenant to fraction of the tier, together less than 1."""

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        named = dict(shares or {})
        total = sum(named.values())
        if len(named) > MAX_SHARES or any(not 0 < share < 1 for share in named.values()) or total >= 1:
            raise ConfigError(
                f"tenant shares {named}: each must be between 0 and 1, all together less than 1, at most {MAX_SHARES}"
            )
        self._groups = {tenant: number for number, tenant in enumerate(named, start=1)}
        self._fractions = [1.0 - total, *named.values()]
        self._used = [0] * len(self._fractions)

    @property
    def num_groups(self) -> int:
        return len(self._fractions)

    def group_of(self, tenant: str) -> int:
        return self._groups.get(tenant, OTHERS)

    def charge(self, group: int, num_bytes: int) -> None:
        """Negative to give back."""
        self._used[group] += num_bytes

    def payers(self, asking: int) -> Sequence[int]:
        """Groups in the order in which they should give up a block for `asking`: those over their share by most
        first. Groups within their share are left out, unless it is the asking one's own."""
        if len(self._used) == 1:
            return (OTHERS,)
        total = sum(self._used)
        pressure = [used / fraction for used, fraction in zip(self._used, self._fractions, strict=True)]
        over = [group for group in range(len(pressure)) if pressure[group] > total]
        over.sort(key=lambda group: (-pressure[group], group != asking))
        return over if asking in over else [*over, asking]
