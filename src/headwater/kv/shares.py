"""Which part of a tier each tenant may count on, and which it may fill.

Guaranteed: what one leaves unused others may use, and when room is needed the block to go is one of whoever is furthest
over its share. A tenant within its share never loses a block to one that is not. What is not guaranteed to somebody is
divided, while there is not enough for all, between the tenants with a limit, by their limits, and all others together,
who count as 1: so a limit of 0.1 means a tenth of it at most, and less where others have limits too.

Blocks are charged to the group that their tenant belonged to when they came; whoever keeps them moves them when `limit`
says that this is another one now. Limits come from requests; so many tenants have one of their own at a time, and a
further one takes the place of one without blocks, or else is among the others.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

from headwater.errors import ConfigError
from headwater.kv.block import Label

OTHERS = 0
"""The group of all tenants without a share or limit of their own."""
MAX_GROUPS = 1024

Limits = dict[Label, Annotated[float, msgspec.Meta(gt=0, lt=1)]]
"""By tenant, as they are kept over restarts."""


class ShareUsage(msgspec.Struct, frozen=True):
    """What a group of tenants takes of a tier."""

    tenant: str
    """Empty: all without a share or limit of their own, together."""
    used_bytes: int
    guaranteed: float
    """Of the tier; 0 if nothing is."""
    limit: float
    """Of what is not guaranteed, beside the 1 of all others."""


class Shares:
    """`guaranteed`: tenant to fraction of the tier, together less than 1."""

    num_groups = MAX_GROUPS

    def __init__(self, guaranteed: Mapping[str, float] | None = None) -> None:
        named = dict(guaranteed or {})
        total = sum(named.values())
        if len(named) >= MAX_GROUPS or any(not 0 < share < 1 for share in named.values()) or total >= 1:
            raise ConfigError(
                f"tenant shares {named}: each must be between 0 and 1, all together less than 1, under {MAX_GROUPS}"
            )
        self._groups = {tenant: number for number, tenant in enumerate(named, start=1)}
        self._guaranteed = [0.0, *named.values()]
        self._divided = 1.0 - total
        self._limits: dict[int, float] = {OTHERS: 1.0}
        """By group; of those whose tenant has no limit any more too, until another one takes the group."""
        self._lifted: set[str] = set()
        """Tenants with a group that they are not in now: it is theirs again if they are limited again."""
        self.used_bytes: dict[int, int] = {}
        """By group, of those that have any."""

    def group_of(self, tenant: str) -> int:
        return OTHERS if tenant in self._lifted else self._groups.get(tenant, OTHERS)

    def limit(self, tenant: str, fraction: float) -> bool:
        """What a tenant without a guarantee may fill while others want room; 1: as much as anybody. Whether it belongs
        to another group now."""
        before = self.group_of(tenant)
        if not tenant or 0 < before < len(self._guaranteed):
            return False
        if fraction >= 1:
            self._lifted |= {tenant} & self._groups.keys()
        elif (group := self._groups.get(tenant, OTHERS) or self._free_group()) != OTHERS:
            self._lifted.discard(tenant)
            self._groups[tenant] = group
            self._limits[group] = fraction
        return self.group_of(tenant) != before

    def limits(self) -> Limits:
        """Those that hold now, by tenant."""
        first = len(self._guaranteed)
        return {
            tenant: self._limits[group]
            for tenant, group in self._groups.items()
            if group >= first and tenant not in self._lifted
        }

    def usage(self) -> list[ShareUsage]:
        """Of those with a share or a limit, and of all others."""
        named = [("", OTHERS), *self._groups.items()]
        return [
            ShareUsage(tenant, self.used_bytes.get(group, 0), self._part(group), self._limits.get(group, 1.0))
            for tenant, group in named
            if group in self.used_bytes or tenant not in self._lifted
        ]

    def charge(self, group: int, num_bytes: int) -> None:
        """Negative to give back."""
        used = self.used_bytes.get(group, 0) + num_bytes
        if used:
            self.used_bytes[group] = used
        else:
            self.used_bytes.pop(group, None)

    def payers(self, asking: int) -> Iterator[int]:
        """Groups in the order in which they should give up a block for `asking`: those over their share by most
        first. Groups within their share are left out, unless it is the asking one's own."""
        if len(self._limits) == len(self._guaranteed) == 1:
            yield OTHERS
            return
        over = self._over(asking)
        if over:
            # Mostly the first one will do; only then are the others put in order.
            yield max(over, key=lambda group: (over[group], group == asking))
            yield from sorted(over, key=lambda group: (-over[group], group != asking))[1:]
        if asking not in over:
            yield asking

    def _over(self, asking: int) -> dict[int, float]:
        """Groups over their share, and how much they press: bytes per part of the tier."""
        total = sum(self.used_bytes.values())
        dividing = {OTHERS, asking, *self.used_bytes} & self._limits.keys()
        divided = self._divided / sum(map(self._limits.__getitem__, dividing))
        over: dict[int, float] = {}
        for group, used in self.used_bytes.items():
            limit = self._limits.get(group)
            pressure = used / (self._guaranteed[group] if limit is None else divided * limit)
            if pressure > total:
                over[group] = pressure
        return over

    def _free_group(self) -> int:
        """One without blocks; its former tenant is among the others then."""
        first = len(self._guaranteed)
        if len(self._limits) + first <= MAX_GROUPS:
            return first + len(self._limits) - 1
        group = next((group for group in range(first, MAX_GROUPS) if group not in self.used_bytes), OTHERS)
        if group != OTHERS:
            self._groups = {tenant: number for tenant, number in self._groups.items() if number != group}
            self._lifted &= self._groups.keys()
        return group

    def _part(self, group: int) -> float:
        return self._guaranteed[group] if group < len(self._guaranteed) else 0.0
