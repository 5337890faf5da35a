"""Registry in a folder of one host: no service, no port. A held file lock is the lease.

The end of a process is noticed within milliseconds where inotify works and within about 0.3 s elsewhere (see
`keeper`). Not for file systems whose locks do not reach all hosts; use a networked registry there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from headwater.errors import ConfigError, Unavailable
from headwater.protocol.cluster import CatalogueEntry, Instance
from headwater.runtime.registry.base import RegistryEvent
from headwater.runtime.registry.feed import Feed
from headwater.runtime.registry.folder import Claim, Folder
from headwater.runtime.registry.keeper import Keeper
from headwater.runtime.registry.records import check_model_name, encode_instance

CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


class FileLease:
    """Ownership of one instance file."""

    def __init__(self, registry: "FileRegistry", claim: Claim) -> None:
        self._registry = registry
        self._claim = claim

    async def update(self, instance: Instance) -> None:
        if instance.worker_id != self._claim.worker_id:
            raise ConfigError(f"the lease of worker {self._claim.worker_id} cannot carry {instance.worker_id}")
        data = encode_instance(instance)
        await self._registry.run(lambda keeper: keeper.update(self._claim, data))

    async def release(self) -> None:
        if not self._registry.closed:
            await self._registry.run(lambda keeper: keeper.drop(self._claim))


class FileRegistry:
    """One handle. Its thread starts with the first use."""

    def __init__(self, path: Path) -> None:
        self._folder = Folder(path)
        self._feed = Feed()
        self._keeper: Keeper | None = None
        self.closed = False

    async def register(self, instance: Instance) -> FileLease:
        data = encode_instance(instance)
        claim = await self.run(lambda keeper: keeper.claim(instance.worker_id, data))
        return FileLease(self, claim)

    async def instances(self) -> list[Instance]:
        return await self.run(lambda keeper: keeper.instances())

    async def models(self) -> list[CatalogueEntry]:
        return await self.run(lambda keeper: keeper.models())

    async def put_model(self, entry: CatalogueEntry) -> None:
        check_model_name(entry.name)
        await self.run(lambda keeper: keeper.put_model(entry))

    async def remove_model(self, name: str) -> None:
        await self.run(lambda keeper: keeper.remove_model(name))

    def watch(self) -> AsyncIterator[RegistryEvent]:
        if not self.closed:
            keeper = self._started()
            keeper.call(keeper.watch)
        return self._feed.watch()

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._feed.end()
        if self._keeper is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(self._keeper.call(self._keeper.stop)), CLOSE_TIMEOUT_S)

    async def run(self, function: Callable[[Keeper], T]) -> T:
        """Do something on the keeper's thread. A store out of reach becomes `Unavailable`."""
        if self.closed:
            raise ConfigError(f"the registry handle on {self._folder.path} is closed")
        keeper = self._started()
        try:
            return await asyncio.wrap_future(keeper.call(lambda: function(keeper)))
        except OSError as error:
            raise Unavailable(f"registry {self._folder.path} cannot be reached: {error}") from error

    def _started(self) -> Keeper:
        if self._keeper is None:
            loop = asyncio.get_running_loop()

            def deliver(events: list[RegistryEvent]) -> None:
                with contextlib.suppress(RuntimeError):  # the loop ended before the handle was closed
                    loop.call_soon_threadsafe(self._feed.apply, events)

            self._keeper = Keeper(self._folder, deliver)
        return self._keeper
