"""What the registry says of this worker: one record under a lease, changed a field at a time.

A registry that does not answer changes nothing for what runs: changes after the start are tried for a bounded time and
logged when they fail; the lease's keeper writes the last record again when the registry is back.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time

import msgspec

from headwater.engines.base import EngineInfo
from headwater.errors import HeadwaterError
from headwater.protocol import PROTOCOL_VERSION
from headwater.protocol.cluster import CatalogueEntry, Instance, ModelCard
from headwater.runtime.registry.base import Lease, Registry

_log = logging.getLogger(__name__)

TIMEOUT_S = 3.0


class WorkerRecord:
    """`register`, then `ready`, any `change`, `release`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lease: Lease | None = None
        self._instance: Instance | None = None

    async def register(self, instance: Instance) -> None:
        """Raises what the registry raises."""
        self._instance = instance
        self._lease = await self._registry.register(instance)

    async def ready(self, info: EngineInfo) -> None:
        """The engine has loaded. Raises what the registry raises."""
        assert self._instance is not None
        assert self._lease is not None
        card = info.card if info.card.created else msgspec.structs.replace(info.card, created=int(time.time()))
        self._instance = msgspec.structs.replace(
            self._instance,
            state="ready",
            card=card,
            engine=info.engine,
            kv_blocks=info.kv_blocks,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            hardware=info.hardware,
            paired=info.paired,
            bootstrap=info.bootstrap,
            **({} if info.role is None else {"role": info.role, "adaptive": False}),
        )
        await self._registry.put_model(CatalogueEntry(card.name, card))
        await self._lease.update(self._instance)

    async def change(self, **fields: object) -> bool:
        """Whether the registry knows now."""
        if self._lease is None or self._instance is None:
            return False
        self._instance = msgspec.structs.replace(self._instance, **fields)
        try:
            await asyncio.wait_for(self._lease.update(self._instance), TIMEOUT_S)
        except (TimeoutError, HeadwaterError) as error:
            _log.warning("the registry could not be told of %s: %s", fields, error)
            return False
        return True

    async def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            with contextlib.suppress(TimeoutError, HeadwaterError):
                await asyncio.wait_for(lease.release(), TIMEOUT_S)


def starting(worker_id: str, model: str, request_address: str, event_address: str, **about: object) -> Instance:
    """The record before the engine has loaded: the card says little more than the name."""
    card = ModelCard(
        name=model,
        served_names=[model],
        fingerprint="",
        architecture="",
        dtype="",
        kv_layout="",
        max_model_len=0,
        block_size=0,
        vocab_size=0,
    )
    instance = Instance(
        worker_id=worker_id,
        role="both",
        state="starting",
        card=card,
        request_address=request_address,
        event_address=event_address,
        engine="",
        version=PROTOCOL_VERSION,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    return msgspec.structs.replace(instance, **about)
