"""Who waits for one model: requests in order within a tenant, tenants by what they have had.

Weighted fair queueing in virtual time: a tenant that is served is charged the worker time divided by its weight, and
the one charged least goes next. A tenant that comes back after a pause starts where the others are, so idling saves
nothing; one that left ahead of the others stays ahead. One that asks for less than its share need not stand in line
at all (`is_within_share`), which is charged to it all the same.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

Key = tuple[int, int, float, int]
"""Order within a tenant; the last part is unique."""

_OLDEST_EVERY = 8
_MAX_REMEMBERED = 1024
_SMALL_PART = 4


class Waiter(Protocol):
    @property
    def tenant(self) -> str: ...

    @property
    def key(self) -> Key: ...


WaiterT = TypeVar("WaiterT", bound=Waiter)


class Tenant(Generic[WaiterT]):
    """One tenant's requests, in order; not empty."""

    def __init__(self, weight: float, spent: float) -> None:
        self.weight = weight
        self.spent = spent
        """Virtual time."""
        self._turns = 0
        self._keys: list[Key] = []
        self._by_key: dict[Key, WaiterT] = {}
        """In order of arrival."""

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[WaiterT]:
        for key in self._keys:
            yield self._by_key[key]

    @property
    def oldest(self) -> WaiterT:
        return next(iter(self._by_key.values()))

    @property
    def last(self) -> WaiterT:
        return self._by_key[self._keys[-1]]

    @property
    def turn_of_oldest(self) -> bool:
        return self._turns % _OLDEST_EVERY == _OLDEST_EVERY - 1

    def add(self, waiter: WaiterT) -> None:
        insort(self._keys, waiter.key)
        self._by_key[waiter.key] = waiter

    def remove(self, waiter: WaiterT) -> None:
        del self._keys[bisect_left(self._keys, waiter.key)]
        del self._by_key[waiter.key]

    def charge(self, cost: float) -> None:
        self._turns += 1
        self.spent += cost / self.weight


class Line(Generic[WaiterT]):
    def __init__(self, name: str, weights: Mapping[str, float]) -> None:
        self.name = name
        self.tenants: dict[str, Tenant[WaiterT]] = {}
        """Those with requests."""
        self._weights = weights
        self._clock = 0.0
        """Virtual time of the last one served."""
        self._left_ahead: dict[str, float] = {}
        """Virtual time of those who had more than their share and have no request now."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, waiter: WaiterT) -> None:
        tenant = self.tenants.get(waiter.tenant)
        if tenant is None:
            spent = max(self._clock, self._left_ahead.pop(waiter.tenant, 0.0))
            tenant = self.tenants[waiter.tenant] = Tenant(self._weights.get(waiter.tenant, 1.0), spent)
        tenant.add(waiter)
        self._size += 1

    def remove(self, waiter: WaiterT) -> None:
        tenant = self.tenants[waiter.tenant]
        tenant.remove(waiter)
        self._size -= 1
        if not len(tenant):
            del self.tenants[waiter.tenant]
            if tenant.spent > self._clock:
                self._remember(waiter.tenant, tenant.spent)

    def by_need(self) -> list[Tenant[WaiterT]]:
        """Whoever has had least first."""
        return sorted(self.tenants.values(), key=lambda tenant: tenant.spent)

    def charge(self, name: str, cost: float) -> None:
        """A request of this tenant, which is still in line, is served."""
        tenant = self.tenants[name]
        self._clock = max(self._clock, tenant.spent)
        tenant.charge(cost)

    def is_within_share(self, name: str) -> bool:
        """Whether a tenant without requests here has had no more than the others."""
        return name not in self.tenants and self._left_ahead.get(name, 0.0) <= self._clock

    def is_small(self, name: str) -> bool:
        """Whether a tenant in line, beside others, has one request there or far less than its even part of all."""
        num_waiting, num_tenants = len(self.tenants[name]), len(self.tenants)
        return num_tenants > 1 and (num_waiting == 1 or _SMALL_PART * num_waiting * num_tenants <= self._size)

    def charge_absent(self, name: str, cost: float) -> None:
        """A request of a tenant that is not in line is served."""
        spent = max(self._clock, self._left_ahead.get(name, 0.0))
        self._remember(name, spent + cost / self._weights.get(name, 1.0))

    def _remember(self, name: str, spent: float) -> None:
        if len(self._left_ahead) >= _MAX_REMEMBERED:
            self._left_ahead = {name: spent for name, spent in self._left_ahead.items() if spent > self._clock}
        if len(self._left_ahead) < _MAX_REMEMBERED:
            self._left_ahead[name] = spent
