"""The prefill worker's side: tells readers of blocks as they are computed, and keeps them until they are released.

What waits in line here is told so now and then, by the engine: silence means that this worker hangs, not that it is
busy.

A reader that releases its sequences knows that it reads no more. One that is gone may still read for a moment, so its
blocks stay that much longer. No reader keeps a block beyond the time that came with its request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headwater.engines.base import KvPort
from headwater.errors import InvalidRequest
from headwater.handoff.layout import check_layouts
from headwater.handoff.mover import Mover
from headwater.handoff.patience import MAX_HOLD_S
from headwater.handoff.wait import Line
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import LoadReport
from headwater.protocol.frames import BlocksReady, PrefillWaits
from headwater.protocol.request import EngineRequest
from headwater.scheduler.outside import BlocksExported, ExportWaits

GONE_S = 6.0
"""More than a live reader takes to notice that it was given up (`headwater.handoff.decode`)."""

SendToReader = Callable[[bytes, BlocksReady | PrefillWaits], None]
"""To a peer of the request plane."""


@dataclass(slots=True)
class _Export:
    """One sequence that a peer reads."""

    peer: bytes
    stream: int
    """As the peer calls it."""
    timer: asyncio.TimerHandle
    hears_waits: bool
    told: bool = False


class PrefillSide:
    """Implements `KvReader`. Streams are those of the engine, unless said otherwise."""

    def __init__(self, port: KvPort, mover: Mover, card: ModelCard, send: SendToReader) -> None:
        self.blocks_sent = 0
        self._port = port
        self._mover = mover
        self._card = card
        self._send = send
        self._line = Line()
        self._exports: dict[int, _Export] = {}
        self._by_peer: dict[bytes, dict[int, int]] = {}
        """Engine streams by the peer's own."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def drained(self) -> None:
        """Wait until nobody reads."""
        await self._idle.wait()

    def expect(self, peer: bytes, stream: int, request: EngineRequest) -> None:
        """A request, named for the engine already, is about to go there. Raises `TransferRefused`, `InvalidRequest`."""
        order = request.export
        if order is None or not 0 < order.hold_s <= MAX_HOLD_S or order.first_block < 0:
            raise InvalidRequest("an export needs a first block and a time of up to an hour", param="export")
        check_layouts(self._card, order)
        if stream in self._by_peer.get(peer, {}):
            raise InvalidRequest(f"the blocks of stream {stream} are not released yet", param="stream")
        timer = asyncio.get_running_loop().call_later(order.hold_s, self._forget, request.stream)
        self._exports[request.stream] = _Export(peer, stream, timer, order.hears_waits)
        self._by_peer.setdefault(peer, {})[stream] = request.stream
        self._idle.clear()
        self._port.read(request.stream, self)

    def release(self, peer: bytes, streams: list[int]) -> None:
        """The peer has read what it wanted of these, named as it calls them; unknown ones are ignored."""
        known = self._by_peer.get(peer, {})
        for handle in [known[stream] for stream in dict.fromkeys(streams) if stream in known]:
            self._forget(handle)
            self._port.release(handle)

    def gone(self, peer: bytes) -> None:
        for handle in list(self._by_peer.get(peer, {}).values()):
            self._forget(handle)
            self._port.release(handle, GONE_S)

    def close(self) -> None:
        for handle in list(self._exports):
            self._forget(handle)

    def observe(self, report: LoadReport) -> None:
        """Step times: what a place in line means here."""
        self._line.observe(report)

    def on_waiting(self, waits: ExportWaits) -> None:
        export = self._exports.get(waits.stream)
        if export is None or not export.hears_waits:
            return
        expected_ms = self._line.expected_ms(waits.tokens_ahead)
        self._send(export.peer, PrefillWaits(export.stream, waits.num_ahead, expected_ms, self._line.silence_ms))

    def on_exported(self, exported: BlocksExported) -> None:
        export = self._exports.get(exported.stream)
        if export is None:
            return
        card = b"" if export.told else self._mover.card()
        export.told = True
        num_blocks = len(exported.blocks)
        self.blocks_sent += num_blocks
        described = self._mover.describe(exported.blocks)
        self._send(export.peer, BlocksReady(export.stream, exported.first_block, num_blocks, described, card))

    def _forget(self, handle: int) -> None:
        """The engine itself lets go of the blocks when their time is up."""
        export = self._exports.pop(handle, None)
        if export is not None:
            export.timer.cancel()
            streams = self._by_peer[export.peer]
            del streams[export.stream]
            if not streams:
                del self._by_peer[export.peer]
            if not self._exports:
                self._idle.set()
