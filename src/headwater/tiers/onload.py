"""Requests that begin with blocks the store has: load those that come sooner than they are computed.

    take ──engine has all, or no store──> engine
         └─ match (bounded) ──nothing worth loading──> engine
                            └─> engine, blocks reserved ── on_load ── copy ──> the engine computes the rest

A request whose prompt is to be computed by another worker stays here instead, if what the store has leaves little of it
and that is computed sooner than the other worker would have all: what the store saves here, it does not save there.

A request never waits for the store longer than a small part of what computing would take, never fails because of it,
and is never sent twice. Other nodes and object stores are asked about what is not known here for as long as that is
short beside computing.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.engines.base import KvPort
from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import Piece
from headwater.kv.pricing import LoadPlan, PrefillMs, TierRun, TokenTimes
from headwater.protocol.request import EngineRequest, RemotePrefill
from headwater.scheduler.outside import LoadEnded, LoadStarted
from headwater.tiers.chains import RequestBlocks

_log = logging.getLogger(__name__)

_ANSWER_S = 0.05
"""For what the node's own store knows without asking anybody."""
_ASK_PART = 0.02
"""Of the time that computing would take: for asking others."""
_MAX_ASK_S = 0.25
_REST_S = 5.0
"""A store that did not answer in time is left alone for so long."""
_PATIENCE = 4.0
"""A load may take so many times what was predicted, but no longer than computing the same: a tier that has become slow
costs twice the time at most."""
_MIN_PATIENCE_S = 0.25
_ENGINE_SLACK_S = 2.0
"""The engine waits this much longer, should all else fail."""
_SMALL_PART = 0.25
"""Of what another worker would compute: more is not computed here, where others decode."""

Submit = Callable[[EngineRequest], None]
"""Lets a request go on as if there were no store."""


@dataclass(slots=True)
class _Load:
    request: EngineRequest
    chain: Piece
    """From the start of the request to the last block that is worth loading."""
    patience_s: float
    copying: "asyncio.Task[None] | None" = None
    wanted: bool = True


class Onloader:
    """Implements `KvLoader`. Lives on the event loop of the engine."""

    def __init__(self, submit: Submit, port: KvPort, client: StoreClient, prefill_ms: PrefillMs) -> None:
        self.num_blocks = 0
        """Loaded."""
        self.num_short = 0
        """Requests of which fewer blocks came than were expected."""
        self.token_times = TokenTimes()
        self._submit, self._port, self._client, self._prefill_ms = submit, port, client, prefill_ms
        self._loop = asyncio.get_running_loop()
        self._considering: dict[int, asyncio.Task[None]] = {}
        self._loads: dict[int, _Load] = {}
        self._rest_until = 0.0

    def take(self, request: EngineRequest, blocks: RequestBlocks, cached: int) -> bool:
        """Whether the request goes on from here, perhaps a moment later; else it is to go on now. `cached`: so many of
        its blocks, from the first on, are on the device."""
        if cached >= blocks.usable or self._loop.time() < self._rest_until:
            return False
        task = asyncio.create_task(self._consider(request, blocks, cached))
        self._considering[request.stream] = task
        task.add_done_callback(lambda _: self._considering.pop(request.stream, None))
        return True

    def abort(self, streams: Sequence[int]) -> None:
        """Those that are in the engine are ended through it."""
        for stream in streams:
            task = self._considering.pop(stream, None)
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Nothing is written to the engine's memory afterwards."""
        copying = [load.copying for load in self._loads.values() if load.copying is not None]
        tasks = [*self._considering.values(), *copying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- before the engine

    async def _consider(self, request: EngineRequest, blocks: RequestBlocks, cached: int) -> None:
        try:
            load = await self._plan(request, blocks, cached)
        except Exception:  # noqa: BLE001 - the task's boundary: a store in trouble must not lose a request
            _log.exception("looking for a prefix in the store failed", extra={"request_id": request.request_id})
            load = None
        if load is None:
            self._submit(request)
            return
        request.prefill = None
        self._loads[request.stream] = load
        self._port.submit_loading(request, self, load.patience_s + _ENGINE_SLACK_S)

    async def _plan(self, request: EngineRequest, blocks: RequestBlocks, cached: int) -> _Load | None:
        """None: nothing is worth loading."""
        tokens = blocks.block_tokens
        missing = blocks.chain.part(cached, blocks.usable)
        compute_ms = self._prefill_ms(blocks.num_tokens - cached * tokens, cached * tokens)
        runs = await self._match(missing, min(_MAX_ASK_S, _ASK_PART * compute_ms / 1e3))
        self.token_times.note(runs, tokens)
        plan = self._client.plan(
            missing,
            runs,
            self._prefill_ms,
            num_tokens=blocks.num_tokens,
            cached_tokens=cached * tokens,
            block_tokens=tokens,
        )
        if not plan.num_blocks or not self._worth_staying(request.prefill, blocks, cached + plan.num_blocks, plan):
            return None
        return _Load(request, blocks.chain.part(0, cached + plan.num_blocks), _patience_s(plan))

    def _worth_staying(
        self, elsewhere: RemotePrefill | None, blocks: RequestBlocks, num_blocks: int, plan: LoadPlan
    ) -> bool:
        """Whether loading up to that block and computing the rest here is better than having it computed elsewhere."""
        if elsewhere is None:
            return True
        have = num_blocks * blocks.block_tokens
        left = blocks.num_tokens - have
        if left > _SMALL_PART * (blocks.num_tokens - elsewhere.expected_cached_tokens):
            return False
        there_ms = elsewhere.expected_ms or self._prefill_ms(blocks.num_tokens, 0)
        return plan.load_ms + self._prefill_ms(left, have) < there_ms

    async def _match(self, chain: Piece, ask_s: float) -> list[TierRun]:
        try:
            async with asyncio.timeout(ask_s + _ANSWER_S):
                return await self._client.match(chain, timeout_s=ask_s)
        except TimeoutError:
            self._rest_until = self._loop.time() + _REST_S
            _log.warning("the KV store did not answer within %.0f ms; going without for a while", 1e3 * _ANSWER_S)
            return []

    # ---- from the engine

    def on_load(self, started: LoadStarted) -> None:
        stream = started.stream
        load = self._loads[stream]
        first, wanted = started.first_block, load.chain.num_blocks
        if first >= wanted:
            del self._loads[stream]
            self._port.loaded(stream, first)
            return
        load.copying = asyncio.create_task(self._copy(load, started))
        load.copying.add_done_callback(_report(load.request))

    def on_load_ended(self, ended: LoadEnded) -> None:
        load = self._loads.get(ended.stream)
        if load is None or load.copying is None:
            self._loads.pop(ended.stream, None)
            self._port.stopped(ended.stream)
        else:
            load.wanted = False
            load.copying.cancel()

    async def _copy(self, load: _Load, started: LoadStarted) -> None:
        """However it ends, the engine is told, once nothing writes to its blocks any more."""
        stream, first = started.stream, started.first_block
        part = load.chain.part(first, load.chain.num_blocks)
        memory = self._port.blocks
        views = [memory.block(number) for number in started.blocks[: part.num_blocks]]
        arrived = 0

        def on_arrived(num_blocks: int) -> None:
            nonlocal arrived
            arrived = num_blocks
            if load.wanted:
                self._port.arrived(stream, first + num_blocks)

        try:
            await self._client.load(part, views, timeout_s=load.patience_s, on_arrived=on_arrived)
        finally:
            del self._loads[stream]
            self.num_blocks += arrived
            self.num_short += arrived < part.num_blocks
            if load.wanted:
                self._port.loaded(stream, first + arrived)
            else:
                self._port.stopped(stream)


def _patience_s(plan: LoadPlan) -> float:
    computing_ms = plan.load_ms + plan.saved_ms
    return max(_MIN_PATIENCE_S, min(_PATIENCE * plan.load_ms, computing_ms) / 1e3)


def _report(request: EngineRequest) -> "Callable[[asyncio.Task[None]], None]":
    def done(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("loading a prefix failed", exc_info=error, extra={"request_id": request.request_id})

    return done
