"""The registry contract: leases with a watch, and the model catalogue.

An instance exists exactly as long as its lease. A registry outage is not news about workers: watchers keep the last
picture and say so (`Outage`), leases re-register by themselves when the store is back, also when it was wiped.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from headwater.protocol.cluster import CatalogueEntry, Instance


@dataclass(frozen=True, slots=True)
class InstancePut:
    """New, or changed."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class InstanceGone:
    worker_id: str


@dataclass(frozen=True, slots=True)
class ModelPut:
    entry: CatalogueEntry


@dataclass(frozen=True, slots=True)
class ModelGone:
    name: str


@dataclass(frozen=True, slots=True)
class Synced:
    """Everything that existed when the watch began has been delivered."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The store cannot be reached (`reachable` False) or is back (True)."""

    reachable: bool
    reason: str = ""


RegistryEvent = InstancePut | InstanceGone | ModelPut | ModelGone | Synced | Outage


class Lease(Protocol):
    """Ownership of one instance record. It dies with the process, with `release`, or when it cannot be renewed."""

    async def update(self, instance: Instance) -> None: ...

    async def release(self) -> None:
        """Idempotent."""
        ...


class Registry(Protocol):
    async def register(self, instance: Instance) -> Lease:
        """Publish an instance. Raises `ConfigError` if the worker id is already held by a live owner."""
        ...

    async def instances(self) -> list[Instance]: ...

    async def models(self) -> list[CatalogueEntry]: ...

    async def put_model(self, entry: CatalogueEntry) -> None: ...

    async def remove_model(self, name: str) -> None: ...

    def watch(self) -> AsyncIterator[RegistryEvent]:
        """All that exists, then `Synced`, then changes in order. Ends when the registry is closed."""
        ...

    async def close(self) -> None: ...
