"""The store of its node, as one worker uses it: made when its engine has started.

Blocks go between the store and the engine's memory by way of the engine's KV port. An engine that goes to the store by
itself is left to do so: here the cluster is told what the store has, and the store what tenants may fill.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from headwater.engines.base import Engine, EngineInfo, StoreUser
from headwater.errors import InternalError
from headwater.kv.block import Family
from headwater.kv.node.client import StoreClient
from headwater.kv.pricing import ComputeRate
from headwater.kv.resident import ResidentBlocks
from headwater.perf.model import StepModel, StepShape
from headwater.protocol.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    LoadReport,
    StoreCounts,
    WorkerEvent,
)
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.tiers.chains import Chains
from headwater.tiers.followed import Followed
from headwater.tiers.offload import Offloader
from headwater.tiers.onload import Onloader, Submit
from headwater.types import Tier

_log = logging.getLogger(__name__)

_DESCRIBE_S = 10.0
_MAX_DESCRIBED = 1024
_TIERS: tuple[Tier, ...] = ("host", "disk", "peer", "object")

TierEvent = BlocksStored | BlocksRemoved | BlocksCleared
Publish = Callable[[list[WorkerEvent]], None]


class KvTiers:
    """Lives on the event loop of the engine. `publish` is told what is resident in the tiers of the node."""

    def __init__(self, engine: Engine, path: Path, name: str, publish: Publish) -> None:
        self._engine, self._publish = engine, publish
        self._client = StoreClient(path, name, on_events=self._on_tier_events)
        self._resident: dict[Tier, ResidentBlocks] = {tier: ResidentBlocks() for tier in _TIERS}
        self._steps = StepModel()
        self._steps.assume()
        self._chunk_tokens = 1
        self._described: dict[Family, float] = {}
        self._limits: dict[str, float] = {}
        """By tenant, as the store was told them."""
        self._limits_told_to = 0
        self._describing: asyncio.Task[None] | None = None
        self._chains: Chains | None = None
        self._onloader: Onloader | None = None
        self._offloader: Offloader | None = None
        self._followed: Followed | None = None

    async def start(self, info: EngineInfo, submit: Submit, patience_s: float = 2.0) -> None:
        """Connect. Without a store, or with an engine that has nothing to give it, everything goes on as without.

        `submit`: where requests go that were looked at in vain. `patience_s`: for a store that is still starting. What
        is computed before it is there is not in it."""
        port = self._engine.kv
        usable = port is not None and port.blocks.view is not None
        if not usable and not info.store:
            _log.warning(
                "this worker does not use the KV store: its engine (%s) gives no access to its KV memory, and was not "
                "attached to the store by us",
                info.engine,
            )
            return
        await self._client.start(patience_s=patience_s)
        if self._client.problem:
            _log.warning("going on without a KV store until there is one: %s", self._client.problem)
        if port is None or info.store:
            price = self._engine.price if isinstance(self._engine, StoreUser) else None
            rate = partial(self._rate, info.card.block_size)
            self._followed = Followed(self._client, info.card, rate, info.num_ranks, price)
            self._followed.start()
            return
        self._chunk_tokens = max(1, info.max_num_batched_tokens)
        self._chains = Chains(info.card, port.blocks.block_bytes)
        self._onloader = Onloader(submit, port, self._client, self._prefill_ms)
        self._offloader = Offloader(port, self._client, self._describe)

    def take(self, request: EngineRequest) -> bool:
        """To be told of every request. Whether it goes to the engine from here; else it is to go there as it would."""
        if not self._client.problem:
            self._limit(request)
        port = self._engine.kv
        if port is None or self._chains is None or self._onloader is None or self._offloader is None:
            return False
        blocks = self._chains.of(request)
        self._offloader.opened(request.stream, blocks.chain)
        if self._client.problem:
            return False
        resident = port.num_resident(blocks.chain.ids)
        self._offloader.found(blocks.chain.part(0, resident))
        return self._onloader.take(request, blocks, resident)

    def abort(self, streams: Sequence[int]) -> None:
        if self._onloader is not None and self._offloader is not None:
            self._onloader.abort(streams)
            for stream in streams:
                self._offloader.closed(stream)

    def stepped(self, outputs: Sequence[SequenceOutput]) -> None:
        if self._offloader is not None:
            for output in outputs:
                if output.finish_reason is not None:
                    self._offloader.closed(output.stream)

    def observe(self, report: LoadReport) -> None:
        """Step times: what computing costs here."""
        for timing in report.timings:
            self._steps.observe(StepShape.of(timing), timing.duration_ms)

    def counts(self) -> StoreCounts | None:
        onloader, offloader = self._onloader, self._offloader
        if self._followed is not None:
            return self._followed.counts()
        if onloader is None or offloader is None:
            return None
        dropped = offloader.num_dropped + self._client.num_offers_dropped
        return StoreCounts(
            onloader.num_blocks, onloader.num_short, offloader.num_blocks, dropped, dict(onloader.token_times.ms)
        )

    def snapshot(self) -> list[WorkerEvent]:
        return [
            msgspec.structs.replace(event, tier=tier)
            for tier, resident in self._resident.items()
            for event in resident.snapshot()
        ]

    async def close(self) -> None:
        """To be called before the engine is closed: nothing touches its memory afterwards."""
        for part in (self._onloader, self._offloader, self._followed):
            if part is not None:
                await part.close()
        if self._describing is not None:
            self._describing.cancel()
        await self._client.close()

    def _prefill_ms(self, new_tokens: int, cached_tokens: int) -> float:
        return self._steps.prefill_ms(new_tokens, cached_tokens, chunk_tokens=self._chunk_tokens)

    def _limit(self, request: EngineRequest) -> None:
        """Tell the store what a tenant may fill, before it is offered any of that."""
        if self._limits_told_to != self._client.num_connections or len(self._limits) > _MAX_DESCRIBED:
            self._limits.clear()
            self._limits_told_to = self._client.num_connections
        if self._limits.get(request.tenant) != request.kv_share:
            self._limits[request.tenant] = request.kv_share
            self._client.limit(request.tenant, request.kv_share)

    def _describe(self, family: Family) -> None:
        """Tell the store what its blocks save, now and then."""
        now = asyncio.get_running_loop().time()
        if now - self._described.get(family, -_DESCRIBE_S) < _DESCRIBE_S or self._chains is None:
            return
        if len(self._described) > _MAX_DESCRIBED:
            self._described.clear()
        self._described[family] = now
        rate = self._rate(self._chains.block_tokens)
        self._describing = asyncio.create_task(self._client.describe(family, rate))

    def _rate(self, block_tokens: int) -> ComputeRate:
        _, _, token_ms, pair_ms, *_ = self._steps.coefficients
        return ComputeRate(token_ms, pair_ms, block_tokens)

    def _on_tier_events(self, events: Sequence[TierEvent]) -> None:
        self._publish(
            [
                self._applied(tier, event)
                for event in events
                for tier in (_TIERS if event.tier is None else (event.tier,))
            ]
        )

    def _applied(self, tier: Tier, event: TierEvent) -> TierEvent:
        """What the cluster is told of it: that nothing is known any more, if events do not add up."""
        try:
            self._resident[tier].apply(event)
        except InternalError as error:
            _log.error("events of the %s tier do not add up: %s", tier, error)
            event = BlocksCleared(tier)
            self._resident[tier].apply(event)
        return event
