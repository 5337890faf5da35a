"""The decode worker's side of pairs, before a prefill worker of the test's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headwater.errors import (
    ContextTooLong,
    EngineFailed,
    HandoffFailed,
    HeadwaterError,
    InvalidRequest,
    Overloaded,
    WorkerLost,
)
from headwater.handoff import paired
from headwater.handoff.paired import PairedSide
from headwater.protocol.frames import ReleaseBlocks, StepFrame, Submit
from headwater.protocol.request import EngineRequest, RemotePrefill, SequenceOutput
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.requests.conformance import WorkerEnd, example_request


class Stage:
    def __init__(self, planes: InprocPlanes, there: WorkerEnd) -> None:
        self.there = there
        self.engine: list[EngineRequest] = []
        self.failed: dict[int, HeadwaterError] = {}
        self.side = PairedSide(self.engine.extend, lambda address: planes.link(address, "decode"), self._fail)

    def _fail(self, stream: int, error: HeadwaterError) -> None:
        assert stream not in self.failed
        self.failed[stream] = error

    async def submit(self, stream: int, **where: object) -> EngineRequest:
        """Its half at the prefill worker."""
        request = example_request(stream)
        told = {"bootstrap": "gpu-1:8998", "frontend_id": "fe"} | where
        request.prefill = RemotePrefill("p", self.there.address, **told)  # type: ignore[arg-type]
        self.side.submit(request)
        await eventually(lambda: stream in [half.stream for half in self.halves], "the other half arrives")
        return next(half for half in self.halves if half.stream == stream)

    @property
    def halves(self) -> list[EngineRequest]:
        return [half for _, frame in self.there.frames if isinstance(frame, Submit) for half in frame.requests]

    @property
    def released(self) -> list[int]:
        return [n for _, frame in self.there.frames if isinstance(frame, ReleaseBlocks) for n in frame.streams]

    def say(self, output: SequenceOutput) -> None:
        """By the prefill worker."""
        self.there.listener.send(self.there.frames[0][0], StepFrame([output]))


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    planes = InprocPlanes()
    there = await WorkerEnd(planes.listener()).listen("p")
    playing = Stage(planes, there)
    yield playing
    await playing.side.close()
    await there.listener.close()
    await planes.close()


def test_both_halves_are_the_same_request_and_each_has_a_room_of_its_own() -> None:
    async def check() -> None:
        async with stage() as play:
            first, second = await play.submit(1), await play.submit(2)
            here = play.engine[0]
            assert first.pairing == here.pairing
            assert here.pairing is not None
            assert (here.pairing.host, here.pairing.port, here.pairing.frontend_id) == ("gpu-1", 8998, "fe")
            assert 0 <= here.pairing.room < 1 << 63
            assert second.pairing is not None
            assert second.pairing.room != here.pairing.room
            assert (first.prompt, first.sampling, first.prefill) == (here.prompt, here.sampling, None)

    run_leak_checked(check())


def test_a_prefill_that_is_done_and_a_first_token_that_came_are_the_end_of_it() -> None:
    async def check() -> None:
        async with stage() as play:
            await play.submit(1)
            play.say(SequenceOutput(1, [5], "length"))
            await eventually(lambda: play.released == [1], "nothing more is wanted")
            play.side.stepped([SequenceOutput(1, [5])])
            assert play.side.done == 1
            await play.submit(2)
            play.side.stepped([SequenceOutput(2, [5])])
            play.say(SequenceOutput.failed(2, WorkerLost("late")))
            await eventually(lambda: play.released == [1, 2], "nothing more is wanted")
            assert play.failed == {}, "what fails after the first token does not matter"
            assert (play.side.done, play.side.failed) == (2, 0)

    run_leak_checked(check())


def test_a_prefill_that_fails_ends_the_other_half() -> None:
    async def check() -> None:
        async with stage() as play:
            await play.submit(1)
            play.say(SequenceOutput.failed(1, Overloaded("full")))
            await eventually(lambda: 1 in play.failed, "it is told")
            assert isinstance(play.failed[1], HandoffFailed)
            assert "worker p" in str(play.failed[1])
            assert "full" in str(play.failed[1])
            await play.submit(2)
            await play.there.listener.close()
            await eventually(lambda: 2 in play.failed, "a broken connection too")
            assert play.side.failed == 2

    run_leak_checked(check())


def test_a_request_at_fault_is_not_begun_again() -> None:
    async def check() -> None:
        async with stage() as play:
            for stream, error in enumerate(
                (InvalidRequest("no grammar", param="regex"), ContextTooLong("too long")), 1
            ):
                await play.submit(stream)
                play.say(SequenceOutput.failed(stream, error))
                await eventually(lambda n=stream: n in play.failed, "it is told")  # type: ignore[misc]
                assert type(play.failed[stream]) is type(error)
                assert str(error) == str(play.failed[stream])
            assert isinstance(play.failed[1], InvalidRequest)
            assert play.failed[1].param == "regex"
            await play.submit(3)
            play.say(SequenceOutput.failed(3, EngineFailed("broken")))
            await eventually(lambda: 3 in play.failed, "it is told")
            assert isinstance(play.failed[3], HandoffFailed), "another worker may make more of it"

    run_leak_checked(check())


def test_what_the_engine_says_before_the_first_token_is_a_hand_off_that_failed() -> None:
    async def check() -> None:
        async with stage() as play:
            await play.submit(1)
            await play.submit(2)
            await play.submit(3)
            lost, refused = (
                SequenceOutput.failed(1, WorkerLost("KVTransferError")),
                SequenceOutput.failed(2, InvalidRequest("no")),
            )
            begun = SequenceOutput(3, [5])
            play.side.stepped([lost, refused, begun])
            later = SequenceOutput.failed(3, WorkerLost("gone"))
            play.side.stepped([later])
            codes = [output.error.code for output in (lost, refused, later) if output.error is not None]
            assert codes == ["handoff_failed", "invalid_value", "worker_lost"]
            await eventually(lambda: sorted(play.released) == [1, 2, 3], "the other halves end")
            assert play.failed == {}, "the engine has ended them itself"

    run_leak_checked(check())


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "_LEAST_PATIENCE_S", 0.05)

    async def check() -> None:
        async with stage() as play:
            await play.submit(1)
            await play.submit(2, expected_ms=60_000.0)
            await eventually(lambda: 1 in play.failed, "it is given up")
            assert "no first token" in str(play.failed[1])
            assert 2 not in play.failed
            await eventually(lambda: play.released == [1], "the prefill worker knows")

    run_leak_checked(check())


@pytest.mark.parametrize("expected_ms", [1e12, float("inf")])
def test_patience_is_bounded_whatever_was_expected(monkeypatch: pytest.MonkeyPatch, expected_ms: float) -> None:
    monkeypatch.setattr(paired, "MAX_HOLD_S", 0.05)

    async def check() -> None:
        async with stage() as play:
            await play.submit(1, expected_ms=expected_ms)
            await eventually(lambda: 1 in play.failed, "it is given up")

    run_leak_checked(check())


def test_an_abort_reaches_the_other_half_and_nothing_is_told() -> None:
    async def check() -> None:
        async with stage() as play:
            await play.submit(1)
            play.side.abort([1, 99])
            await eventually(lambda: play.released == [1], "the prefill worker knows")
            play.say(SequenceOutput.failed(1, WorkerLost("late")))
            await asyncio.sleep(0.02)
            assert play.failed == {}

    run_leak_checked(check())


@pytest.mark.parametrize("bootstrap", ["", "gpu-1", ":8998", "gpu-1:0", "gpu-1:70000", "gpu-1:x"])
def test_a_prefill_worker_that_does_not_say_where_it_listens_is_not_asked(bootstrap: str) -> None:
    async def check() -> None:
        async with stage() as play:
            request = example_request(1)
            request.prefill = RemotePrefill("p", play.there.address, bootstrap=bootstrap)
            play.side.submit(request)
            await eventually(lambda: 1 in play.failed, "it is told")
            assert play.engine == []
            assert play.halves == []
            assert play.side.failed == 1

    run_leak_checked(check())
