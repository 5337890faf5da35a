"""Hand-offs of engines that move KV by themselves: a prefill ends with a ticket, which the decode takes along.

The prefill worker's engine answers a request that has an export order with its first token and a ticket, opaque to us;
it keeps the blocks for as long as it is set to. The decode worker's engine gets the request together with the ticket,
and computes the prompt itself if what the ticket speaks of is gone. Without a ticket in time the request goes on
without. Lives on the event loop.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.engines.base import Engine
from headwater.errors import HeadwaterError, ProtocolError, TransferTimeout, WorkerError
from headwater.handoff.order import prefill_order
from headwater.handoff.patience import Paces, patience
from headwater.handoff.peers import OpenLink, PrefillPeers
from headwater.protocol.cluster import ModelCard
from headwater.protocol.frames import BlocksReady, PrefillWaits
from headwater.protocol.request import EngineRequest, RemotePrefill, SequenceOutput
from headwater.types import TOKEN_ID_BYTES

_log = logging.getLogger(__name__)

MAX_TICKET_BYTES = 1 << 20
_MAX_WAITING = 1024
"""Beyond that, prompts are computed here."""


@dataclass(slots=True)
class _Waiting:
    request: EngineRequest
    where: RemotePrefill
    asked: float
    """By the event loop's time."""
    num_tokens: int
    timer: asyncio.TimerHandle


class TicketSide:
    """The decode worker's side. Implements `PeerOwner`."""

    def __init__(self, engine: Engine, card: ModelCard, open_link: OpenLink) -> None:
        self.done = 0
        self.fell_back = 0
        self._engine = engine
        self._card = card
        self._loop = asyncio.get_running_loop()
        self._peers = PrefillPeers(open_link, self)
        self._paces = Paces()
        self._waiting: dict[int, _Waiting] = {}

    def submit(self, request: EngineRequest) -> None:
        """Take a request that names a prefill worker."""
        where, request.prefill = request.prefill, None
        num_tokens = (len(request.prompt) + len(request.resumed_tokens)) // TOKEN_ID_BYTES
        if where is None or len(self._waiting) >= _MAX_WAITING or num_tokens <= self._card.block_size:
            self._engine.submit([request])
            return
        limit = patience(self._paces.expected_ms(where, num_tokens), num_tokens)
        timer = self._loop.call_later(limit.total_s, self._late, request.stream, limit.total_s)
        self._waiting[request.stream] = _Waiting(request, where, self._loop.time(), num_tokens, timer)
        self._peers.ask(where, prefill_order(request, where, self._card, 0, limit.hold_s))

    def abort(self, streams: Sequence[int]) -> None:
        """Those that are not at the engine yet."""
        for stream in streams:
            if stream in self._waiting:
                self._leave(stream)

    async def close(self) -> None:
        self.abort(list(self._waiting))
        await self._peers.close()

    # ---- from prefill workers

    def on_waits(self, waits: PrefillWaits) -> None:
        """Its time goes on."""

    def on_ready(self, ready: BlocksReady) -> None:
        """Of workers that keep blocks for us to read: not of this kind."""

    def on_output(self, output: SequenceOutput) -> None:
        stream = output.stream
        if output.error is not None:
            self._go_on(stream, WorkerError(f"{output.error.code}: {output.error.message}"))
        elif not 0 < len(output.ticket) <= MAX_TICKET_BYTES:
            self._go_on(stream, ProtocolError(f"it ended with a ticket of {len(output.ticket)} bytes"))
        else:
            waiting = self._leave(stream)
            self.done += 1
            took_ms = (self._loop.time() - waiting.asked) * 1000
            self._paces.observe(waiting.where.worker_id, waiting.num_tokens, took_ms)
            waiting.request.ticket = output.ticket
            self._engine.submit([waiting.request])

    def on_lost(self, stream: int, error: HeadwaterError) -> None:
        self._go_on(stream, error)

    def on_left(self, worker_id: str) -> None:
        self._paces.forget(worker_id)

    # ---- inner life

    def _late(self, stream: int, total_s: float) -> None:
        self._go_on(stream, TransferTimeout(f"not done within {total_s:.1f} s"))

    def _go_on(self, stream: int, reason: HeadwaterError) -> None:
        """Without a ticket."""
        if stream not in self._waiting:
            return
        waiting = self._leave(stream)
        self.fell_back += 1
        _log.warning(
            "prefilling here: worker %s gave no ticket: %s",
            waiting.where.worker_id,
            str(reason),  # whoever keeps the record is not to keep what the error was raised in
            extra={"request_id": waiting.request.request_id},
        )
        self._engine.submit([waiting.request])

    def _leave(self, stream: int) -> _Waiting:
        waiting = self._waiting.pop(stream)
        waiting.timer.cancel()
        self._peers.release(stream)
        return waiting
