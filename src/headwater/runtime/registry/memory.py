"""Registry in the memory of one process, for one command, tests and simulations.

All handles on one `MemoryStore` see each other; closing a handle ends its leases, as the death of a process would.
`MemoryStore.interrupt` and `resume` play an outage.
"""

import weakref
from collections.abc import AsyncIterator

from headwater.errors import ConfigError, Unavailable
from headwater.protocol.cluster import CatalogueEntry, Instance
from headwater.runtime.registry.base import (
    InstanceGone,
    InstancePut,
    ModelGone,
    ModelPut,
    Outage,
    RegistryEvent,
    Synced,
)
from headwater.runtime.registry.feed import Feed, Watch
from headwater.runtime.registry.records import check_model_name, check_worker_id, encode_instance


class MemoryStore:
    """What several handles share."""

    def __init__(self) -> None:
        self.feed = Feed()
        self.feed.apply([Synced()])
        self._outage: str | None = None

    def interrupt(self, reason: str = "interrupted") -> None:
        """Nothing can be written until `resume`; readers keep the last picture."""
        self._outage = reason
        self.feed.apply([Outage(reachable=False, reason=reason)])

    def resume(self) -> None:
        self._outage = None
        self.feed.apply([Outage(reachable=True)])

    def write(self, event: RegistryEvent) -> None:
        if self._outage is not None:
            raise Unavailable(f"the registry cannot be reached: {self._outage}")
        self.feed.apply([event])


class MemoryLease:
    """Ownership of one instance in a `MemoryStore`."""

    def __init__(self, store: MemoryStore, worker_id: str) -> None:
        self._store = store
        self._worker_id = worker_id
        self._released = False

    async def update(self, instance: Instance) -> None:
        if self._released:
            raise ConfigError(f"the lease of worker {self._worker_id} was released")
        if instance.worker_id != self._worker_id:
            raise ConfigError(f"the lease of worker {self._worker_id} cannot carry {instance.worker_id}")
        encode_instance(instance)
        self._store.write(InstancePut(instance))

    async def release(self) -> None:
        self.expire()

    def expire(self) -> None:
        """The end of the owner, polite or not."""
        if not self._released:
            self._released = True
            self._store.feed.apply([InstanceGone(self._worker_id)])


class MemoryRegistry:
    """One handle."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._leases: list[MemoryLease] = []
        self._watches: list[Watch] = []

    async def register(self, instance: Instance) -> MemoryLease:
        encode_instance(instance)
        check_worker_id(instance.worker_id)
        if instance.worker_id in self._store.feed.instances:
            raise ConfigError(f"worker id {instance.worker_id!r} is already held by a live worker")
        self._store.write(InstancePut(instance))
        lease = MemoryLease(self._store, instance.worker_id)
        self._leases.append(lease)
        return lease

    async def instances(self) -> list[Instance]:
        return list(self._store.feed.instances.values())

    async def models(self) -> list[CatalogueEntry]:
        return list(self._store.feed.models.values())

    async def put_model(self, entry: CatalogueEntry) -> None:
        check_model_name(entry.name)
        self._store.write(ModelPut(entry))

    async def remove_model(self, name: str) -> None:
        self._store.write(ModelGone(name))

    def watch(self) -> AsyncIterator[RegistryEvent]:
        watch = self._store.feed.watch()
        self._watches.append(watch)
        return watch

    async def close(self) -> None:
        for lease in self._leases:
            lease.expire()
        for watch in self._watches:
            self._store.feed.drop(watch)
        self._leases.clear()
        self._watches.clear()


_stores: weakref.WeakValueDictionary[str, MemoryStore] = weakref.WeakValueDictionary()
"""Stores by name: the address space that `memory://name` speaks of. A store lives as long as a handle on it."""


def open_memory(name: str) -> MemoryRegistry:
    """A handle on the store of that name."""
    store = _stores.get(name)
    if store is None:
        store = _stores[name] = MemoryStore()
    return MemoryRegistry(store)
