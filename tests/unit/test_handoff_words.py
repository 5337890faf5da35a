"""Words about the line of a prefill worker: how often they come, to whom they go, and what they change."""

import asyncio

import pytest
from kv_checking_executor import request
from test_handoff_parts import card
from test_scheduler import Run

from headwater.handoff import decode as decode_module
from headwater.handoff.decode import DecodeSide
from headwater.handoff.mover import Move, OnMoved, ReadOrder
from headwater.handoff.order import prefill_order
from headwater.handoff.patience import Patience
from headwater.handoff.prefill import PrefillSide
from headwater.protocol.events import LoadReport, StepTiming
from headwater.protocol.frames import BlocksReady, PrefillWaits
from headwater.protocol.request import ExportOrder, RemotePrefill
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.requests.conformance import WorkerEnd
from headwater.scheduler.exchange import WORD_S
from headwater.scheduler.outside import Export, ExportWaits, LoadStarted

CARD = card()


class Port:
    """Keeps what it is told of streams."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> object:
        return lambda stream, *rest, **how: self.told.append((name, getattr(stream, "stream", stream)))


class Mover:
    """Blocks are here as soon as they are asked for."""

    def read(self, order: ReadOrder, on_moved: OnMoved) -> Move | None:
        on_moved(None)
        return None

    def forget(self, peer: str) -> None:
        """Nothing is kept."""


def test_readers_hear_of_the_line_now_and_then() -> None:
    run = Run(max_num_batched_tokens=16, max_num_seqs=1)
    run.add(request(1, [1] * 40))
    for stream in (2, 3):
        run.scheduler.add(request(stream, [stream] * 12), 0.0, export=Export(0, 99.0))
    heard = []
    for now in (100.0, 100.0 + WORD_S / 2, 100.0 + WORD_S):
        run.step(now)
        heard.append(run.scheduler.exchange.take_news())
    assert heard == [
        [ExportWaits(2, 1, 52), ExportWaits(3, 2, 64)],
        [],
        [ExportWaits(2, 1, 20), ExportWaits(3, 2, 32)],
    ]


def test_a_peer_hears_what_a_place_in_line_means_if_it_asked_for_it() -> None:
    sent: list[tuple[bytes, BlocksReady | PrefillWaits]] = []

    async def check() -> None:
        side = PrefillSide(Port(), Mover(), CARD, lambda peer, frame: sent.append((peer, frame)))  # type: ignore[arg-type]
        for stream, hears in ((1, True), (2, False)):
            order = ExportOrder(
                0, 9.0, CARD.fingerprint, CARD.kv_layout, CARD.dtype, CARD.block_size, hears_waits=hears
            )
            side.expect(b"peer", 10 * stream, request(stream, [1] * 64, export=order))
        side.observe(
            LoadReport(1, 0, 0, 9, 9, timings=[StepTiming(100, 0, 0, 0, 250.0), StepTiming(0, 0, 3, 90, 50.0)])
        )
        for stream in (1, 2, 3):
            side.on_waiting(ExportWaits(stream, 4, 1000))
        side.close()

    run_leak_checked(check())
    assert sent == [(b"peer", PrefillWaits(10, 4, 2500.0, 1000 * 2 * WORD_S + 3 * 250.0))]


def test_silence_after_the_line_is_not_borne_as_long_as_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "patience", lambda *_: Patience(60.0, 0.3, longest_s=60.0))

    async def check() -> None:
        planes, port = InprocPlanes(), Port()
        there = await WorkerEnd(planes.listener()).listen("p")
        side = DecodeSide(port, Mover(), CARD, lambda address: planes.link(address, "decode"))  # type: ignore[arg-type]
        for stream in (1, 2):
            side.submit(request(stream, [1] * 64, prefill=RemotePrefill("p", there.address)))
            side.on_load(LoadStarted(stream, 0, (0, 1, 2, 3), 64))
        await eventually(lambda: len(there.frames) == 2, "both are asked for")
        peer, _ = there.frames[0]
        for stream in (1, 2):
            there.listener.send(peer, PrefillWaits(stream, 4, 0.0, 50_000.0))
        await asyncio.sleep(0.7)
        assert ("loaded", 1) not in port.told, "it is in line"
        there.listener.send(peer, BlocksReady(1, 0, 2, b"", b"card"))
        await eventually(lambda: ("loaded", 1) in port.told, "it is given up")
        assert ("arrived", 1) in port.told
        assert ("loaded", 2) not in port.told, "it is in line still"
        await side.close()
        await there.listener.close()
        await planes.close()

    run_leak_checked(check())


def test_a_prefill_ends_with_the_first_token_beyond_what_was_resumed() -> None:
    where = RemotePrefill("p", "address", expected_cached_tokens=32, frontend_id="fe")
    asked = request(1, [1] * 64, 100, resumed=[5, 6], min_tokens=50, prefill=where)
    order = prefill_order(asked, where, CARD, 2, 7.0)
    assert (order.sampling.max_tokens, order.sampling.min_tokens) == (3, 3)
    assert (order.prompt, order.resumed_tokens) == (asked.prompt, asked.resumed_tokens)
    assert (order.prefill, order.expected_cached_tokens) == (None, 32)
    assert asked.sampling.max_tokens == 100
    export = order.export
    assert export is not None
    assert (export.first_block, export.hold_s, export.frontend_id, export.hears_waits) == (2, 7.0, "fe", True)
