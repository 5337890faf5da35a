"""The decode worker's side of tickets, before a prefill worker of the test's own: when it asks, and what it takes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from test_handoff_parts import card

from headwater.engines.base import EngineInfo
from headwater.errors import InvalidRequest, TransferRefused
from headwater.handoff import tickets
from headwater.handoff.order import prefill_order
from headwater.handoff.service import Handoffs
from headwater.protocol.events import HandoffCounts
from headwater.protocol.frames import ReleaseBlocks, StepFrame, Submit
from headwater.protocol.request import EngineRequest, RemotePrefill, SequenceOutput
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.requests.conformance import WorkerEnd, example_request
from headwater.transfer.options import AgentOptions

CARD = card()


class Engine:
    """Keeps what it is given."""

    kv = None

    def __init__(self) -> None:
        self.given: list[EngineRequest] = []

    def submit(self, requests: list[EngineRequest]) -> None:
        self.given += requests


class Stage:
    def __init__(self, planes: InprocPlanes, there: WorkerEnd, engine: Engine, *, gives_tickets: bool = True) -> None:
        self.there = there
        self.engine = engine
        info = EngineInfo("vllm", CARD, {}, 9, 9, 9, "", False, tickets=gives_tickets)
        self.side = Handoffs(
            engine,  # type: ignore[arg-type]
            info,
            "decode",
            lambda address: planes.link(address, "decode"),
            lambda peer, frame: None,
            AgentOptions(),
        )

    def submit(self, stream: int, tokens: int = 64, expected_ms: float = 0.0) -> EngineRequest:
        request = example_request(stream, tokens)
        request.prefill = RemotePrefill("p", self.there.address, expected_ms=expected_ms)
        assert self.side.load(request)
        return request

    async def asked(self, *streams: int) -> None:
        def asked() -> list[int]:
            orders = [frame.requests for _, frame in self.there.frames if isinstance(frame, Submit)]
            return [order.stream for some in orders for order in some]

        await eventually(lambda: asked() == list(streams), f"{streams} are asked for")

    @property
    def released(self) -> list[int]:
        return [n for _, frame in self.there.frames if isinstance(frame, ReleaseBlocks) for n in frame.streams]

    def say(self, output: SequenceOutput) -> None:
        self.there.listener.send(self.there.frames[0][0], StepFrame([output]))

    async def goes_on(self, request: EngineRequest, ticket: bytes) -> None:
        await eventually(lambda: request in self.engine.given, "it reaches the engine")
        assert (request.ticket, request.prefill) == (ticket, None)


@asynccontextmanager
async def stage(*, gives_tickets: bool = True) -> AsyncIterator[Stage]:
    planes = InprocPlanes()
    there = await WorkerEnd(planes.listener()).listen("p")
    playing = Stage(planes, there, Engine(), gives_tickets=gives_tickets)
    yield playing
    await playing.side.close()
    await there.listener.close()
    await planes.close()


@pytest.mark.parametrize(("num_bytes", "taken"), [(1, True), (1 << 20, True), (0, False), ((1 << 20) + 1, False)])
def test_a_ticket_is_taken_along_unless_there_is_none_or_it_is_absurd(num_bytes: int, taken: bool) -> None:
    ticket = b"t" * num_bytes

    async def check() -> None:
        async with stage() as play:
            request = play.submit(1)
            await play.asked(1)
            assert play.engine.given == []
            play.say(SequenceOutput(1, [5], "length", ticket=ticket))
            await play.goes_on(request, ticket if taken else b"")
            await eventually(lambda: play.released == [1], "nothing more is wanted")
            assert play.side.counts() == HandoffCounts(int(taken), int(not taken), 0, 0)

    run_leak_checked(check())


def test_what_is_not_worth_a_hand_off_or_too_much_of_it_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "_MAX_WAITING", 2)

    async def check() -> None:
        async with stage() as play:
            short = play.submit(1, CARD.block_size)
            await play.goes_on(short, b"")
            waiting = [play.submit(2), play.submit(3, CARD.block_size + 1)]
            await play.goes_on(play.submit(4), b"")
            await play.asked(2, 3)
            play.side.abort([2])
            play.submit(5)
            await play.asked(2, 3, 5)
            assert not any(request in play.engine.given for request in waiting)
            assert play.side.counts() is None, "nothing of that is a hand-off that failed"

    run_leak_checked(check())


def test_the_time_for_a_ticket_is_what_earlier_ones_took(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []
    known = tickets.patience
    monkeypatch.setattr(tickets, "patience", lambda *of: asked.append(of) or known(*of))

    async def check() -> None:
        async with stage() as play:
            first = play.submit(1)
            await play.asked(1)
            play.say(SequenceOutput(1, [5], "length", ticket=b"t"))
            await play.goes_on(first, b"t")
            play.submit(2, 128)
            play.submit(3, expected_ms=7.0)
            play.side.abort([2, 3])
            assert asked[0] == (0.0, 64)
            assert (asked[1][0] > 0, asked[1][1]) == (True, 128)
            assert asked[2] == (7.0, 64)

    run_leak_checked(check())


def test_what_waits_when_the_worker_ends_leaves_nothing_behind() -> None:
    async def check() -> None:
        async with stage() as play:
            play.submit(1)
            await play.asked(1)
        assert play.engine.given == []

    run_leak_checked(check())


def test_prefills_for_others_are_taken_where_blocks_fit_and_tickets_are_given() -> None:
    async def check() -> None:
        where = RemotePrefill("p", "address")
        fits = prefill_order(example_request(1), where, CARD, 0, 9.0)
        other = prefill_order(example_request(1), where, card(dtype="bfloat16"), 0, 9.0)
        async with stage() as play:
            play.side.export(b"peer", 1, fits)
            with pytest.raises(TransferRefused, match="KV type"):
                play.side.export(b"peer", 1, other)
        async with stage(gives_tickets=False) as play:
            with pytest.raises(InvalidRequest, match="does not give out"):
                play.side.export(b"peer", 1, fits)

    run_leak_checked(check())
