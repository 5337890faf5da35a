"""The picture one registry handle holds, and the watches that follow it.

A watch never holds more than one pending event per key: a slow reader sees the newest state of each instance and
model, not every step between, so its memory is bounded by the size of the cluster. Used on one event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

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

_Key = tuple[str, str]
_SYNCED: _Key = ("synced", "")
_OUTAGE: _Key = ("outage", "")


def _key(event: RegistryEvent) -> _Key:
    match event:
        case InstancePut(instance):
            return ("instance", instance.worker_id)
        case InstanceGone(worker_id):
            return ("instance", worker_id)
        case ModelPut(entry):
            return ("model", entry.name)
        case ModelGone(name):
            return ("model", name)
        case Outage():
            return _OUTAGE
        case Synced():
            return _SYNCED


class Watch(AsyncIterator[RegistryEvent]):
    """One reader of a feed."""

    def __init__(self, events: Iterable[RegistryEvent]) -> None:
        self._pending: dict[_Key, RegistryEvent] = {}
        self._told: set[_Key] = set()
        """Instances and models the reader knows of."""
        self._wake = asyncio.Event()
        self._ended = False
        for event in events:
            self.push(event)

    def push(self, event: RegistryEvent) -> None:
        key = _key(event)
        if isinstance(event, InstanceGone | ModelGone) and key not in self._told:
            self._pending.pop(key, None)
            return
        self._pending[key] = event
        self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    def __aiter__(self) -> "Watch":
        return self

    async def __anext__(self) -> RegistryEvent:
        while not self._pending:
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        key = next(iter(self._pending))
        event = self._pending.pop(key)
        if isinstance(event, InstancePut | ModelPut):
            self._told.add(key)
        elif isinstance(event, InstanceGone | ModelGone):
            self._told.discard(key)
        return event


class Feed:
    """Folds events into a picture and passes on those that changed it."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.models: dict[str, CatalogueEntry] = {}
        self._synced = False
        self._outage = Outage(reachable=True)
        self._watches: set[Watch] = set()
        self._ended = False

    def apply(self, events: Iterable[RegistryEvent]) -> None:
        for event in events:
            if self._fold(event):
                for watch in self._watches:
                    watch.push(event)

    def watch(self) -> Watch:
        """A reader that begins with the picture as it is; `Synced` follows once the picture is whole."""
        watch = Watch(self._picture())
        if self._ended:
            watch.end()
        else:
            self._watches.add(watch)
        return watch

    def drop(self, watch: Watch) -> None:
        self._watches.discard(watch)
        watch.end()

    def end(self) -> None:
        self._ended = True
        for watch in list(self._watches):
            self.drop(watch)

    def _picture(self) -> Iterable[RegistryEvent]:
        yield from (ModelPut(entry) for entry in self.models.values())
        yield from (InstancePut(instance) for instance in self.instances.values())
        if not self._outage.reachable:
            yield self._outage
        if self._synced:
            yield Synced()

    def _fold(self, event: RegistryEvent) -> bool:
        """Whether the event is news."""
        match event:
            case InstancePut(instance):
                changed = self.instances.get(instance.worker_id) != instance
                self.instances[instance.worker_id] = instance
            case InstanceGone(worker_id):
                changed = self.instances.pop(worker_id, None) is not None
            case ModelPut(entry):
                changed = self.models.get(entry.name) != entry
                self.models[entry.name] = entry
            case ModelGone(name):
                changed = self.models.pop(name, None) is not None
            case Synced():
                changed, self._synced = not self._synced, True
            case Outage(reachable):
                changed, self._outage = reachable != self._outage.reachable, event
        return changed
