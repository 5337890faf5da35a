"""Both sides of hand-offs at one worker, made when its engine has started.

Requests that name a prefill worker go through here to the engine, and those of other workers that want their blocks are
announced here; an engine without a KV port computes the former itself and refuses the latter. Engines that move KV by
themselves exchange tickets instead, or get their requests in pairs.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from headwater.engines.base import Engine, EngineInfo
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.handoff.decode import DecodeSide
from headwater.handoff.layout import check_layouts
from headwater.handoff.mover import make_mover
from headwater.handoff.paired import PairedSide
from headwater.handoff.peers import OpenLink
from headwater.handoff.prefill import PrefillSide, SendToReader
from headwater.handoff.tickets import TicketSide
from headwater.protocol.events import HandoffCounts, LoadReport
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.transfer.options import AgentOptions


class Handoffs:
    """Lives on the event loop of the engine."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        name: str,
        open_link: OpenLink,
        send: SendToReader,
        options: AgentOptions,
    ) -> None:
        self._decode: DecodeSide | None = None
        self._prefill: PrefillSide | None = None
        self._tickets: TicketSide | None = None
        self._paired: PairedSide | None = None
        self.on_failed: Callable[[int, HeadwaterError], None] = _ignore
        """Told of streams that cannot be handed over and have to end, here and at the engine."""
        self._card = card = info.card
        port = engine.kv
        if port is None and info.tickets:
            self._tickets = TicketSide(engine, card, open_link)
        if port is None and info.paired:
            self._paired = PairedSide(engine.submit, open_link, lambda stream, error: self.on_failed(stream, error))
        if port is not None:
            self._mover = make_mover(name, port.blocks, asyncio.get_running_loop(), options)
            self._decode = DecodeSide(port, self._mover, card, open_link)
            self._prefill = PrefillSide(port, self._mover, card, send)

    def load(self, request: EngineRequest) -> bool:
        """Take a request that another worker is to prefill; False: it is one like any other here."""
        taker = self._decode or self._tickets or self._paired
        if request.prefill is None or taker is None:
            return False
        taker.submit(request)
        return True

    def abort(self, streams: Sequence[int]) -> None:
        """To be told of all aborts that the engine is told of."""
        for side in (self._tickets, self._paired):
            if side is not None:
                side.abort(streams)

    def stepped(self, outputs: list[SequenceOutput]) -> None:
        """What the engine says, before it is passed on."""
        if self._paired is not None:
            self._paired.stepped(outputs)

    def export(self, peer: bytes, stream: int, request: EngineRequest) -> None:
        """A request whose blocks a peer reads, which calls it `stream`, is about to go to the engine.

        Raises `TransferRefused`, `InvalidRequest`.
        """
        if self._tickets is not None and request.export is not None:
            check_layouts(self._card, request.export)
            return
        if self._prefill is None:
            raise InvalidRequest("this worker's engine does not give out KV blocks", param="export")
        self._prefill.expect(peer, stream, request)

    def release(self, peer: bytes, streams: list[int]) -> None:
        if self._prefill is not None:
            self._prefill.release(peer, streams)

    def gone(self, peer: bytes) -> None:
        """A peer is not connected any more."""
        if self._prefill is not None:
            self._prefill.gone(peer)

    def observe(self, report: LoadReport) -> None:
        if self._prefill is not None:
            self._prefill.observe(report)

    def counts(self) -> HandoffCounts | None:
        """None: there was none yet."""
        counts = HandoffCounts(0, 0, 0, 0)
        if self._decode is not None and self._prefill is not None:
            decode = self._decode
            counts = HandoffCounts(decode.done, decode.fell_back, decode.blocks_moved, self._prefill.blocks_sent)
        elif self._tickets is not None:
            counts = HandoffCounts(self._tickets.done, self._tickets.fell_back, 0, 0)
        elif self._paired is not None:
            counts = HandoffCounts(self._paired.done, self._paired.failed, 0, 0)
        return counts if counts != HandoffCounts(0, 0, 0, 0) else None

    async def drain(self, timeout_s: float) -> None:
        """Wait for peers that still read."""
        if self._prefill is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._prefill.drained(), timeout_s)

    async def close(self) -> None:
        """To be called once the engine is closed: what still moves is broken off."""
        if self._tickets is not None:
            await self._tickets.close()
        if self._paired is not None:
            await self._paired.close()
        if self._decode is not None and self._prefill is not None:
            await self._decode.close()
            self._prefill.close()
            await asyncio.to_thread(self._mover.close)


def _ignore(_stream: int, _error: HeadwaterError) -> None:
    """Nobody listens."""
