"""Streams whose worker is lost, hangs or leaves: they go on elsewhere, no token twice and none missing."""

import asyncio
import socket
from array import array
from dataclasses import replace

import msgspec
import pytest
from frontend_rig import Rig, Sink
from scripted_worker import ScriptedWorker, until

from headwater.errors import (
    EngineFailed,
    HeadwaterError,
    InvalidRequest,
    NoWorkers,
    StreamLost,
    WorkerLost,
    WorkerSilent,
)
from headwater.frontend.moves import MoveLimits
from headwater.frontend.vigil import VigilLimits
from headwater.protocol.events import LoadReport
from headwater.protocol.request import EngineRequest, ErrorInfo, SequenceOutput

QUICK = VigilLimits(hang_timeout_s=0.2, unknown_timeout_s=0.2, canary_interval_s=0.0, look_s=0.02)

REPORT = LoadReport(1, 0, 0, 100, 90)


def resumed(request: EngineRequest) -> list[int]:
    return array("I", request.resumed_tokens).tolist()


async def taken_over(rig: Rig, *without: ScriptedWorker) -> tuple[ScriptedWorker, EngineRequest]:
    """The worker that has got a request last, none of `without`."""
    others = [worker for worker in rig.workers if worker not in without]
    await until(lambda: any(worker.requests for worker in others))
    worker = next(worker for worker in others if worker.requests)
    return worker, worker.requests[-1]


async def begun(rig: Rig) -> tuple[ScriptedWorker, int, Sink]:
    """One of two workers, which has a stream and has sent its first token."""
    await rig.serving("w1", "w2")
    (stream,), (sink,) = rig.submit()
    worker = rig.by_id(rig.worker_of(stream))
    await until(lambda: bool(worker.requests))
    worker.step(SequenceOutput(stream, [1]))
    return worker, stream, sink


def test_the_streams_of_a_lost_worker_go_on_from_the_tokens_delivered(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1", "w2")
        streams, sinks = rig.submit(n=2)
        loser = rig.by_id(rig.worker_of(streams[0]))
        await until(lambda: len(loser.requests) == 2)
        loser.step(SequenceOutput(streams[0], [5, 6], num_cached_tokens=16))
        loser.step(SequenceOutput(streams[0], [7]))
        await until(lambda: sinks[0].token_ids == [5, 6, 7])
        await loser.vanish()
        keeper = next(worker for worker in rig.workers if worker is not loser)
        await until(lambda: len(keeper.requests) == 2)
        first, second = sorted(keeper.requests, key=lambda request: -len(request.resumed_tokens))
        assert resumed(first) == [5, 6, 7]
        assert resumed(second) == []
        assert first.prompt == loser.requests[0].prompt
        assert {first.stream, second.stream}.isdisjoint(streams)
        keeper.step(SequenceOutput(first.stream, [8], num_cached_tokens=3), SequenceOutput(second.stream, [5]))
        keeper.step(SequenceOutput(first.stream, [9], "stop"), SequenceOutput(second.stream, [6], "stop"))
        await until(lambda: all(sink.finished for sink in sinks))
        assert [sink.token_ids for sink in sinks] == [[5, 6, 7, 8, 9], [5, 6]]
        told = [output.num_cached_tokens for output in sinks[0].outputs if output.num_cached_tokens is not None]
        assert told == [16], "what the second worker found in its cache is not the client's affair"
        assert all(sink.error is None for sink in sinks)
        assert rig.dispatcher.num_streams == 0
        assert rig.view.worker(keeper.worker_id).booked_sequences == 0
        assert rig.dispatcher.faults.moved == 2

    play(scenario)


def test_late_output_of_a_worker_that_was_given_up_is_dropped(play) -> None:
    async def scenario(rig: Rig) -> None:
        hung, stream, sink = await begun(rig)
        keeper, request = await taken_over(rig, hung)
        assert resumed(request) == [1]
        await until(lambda: hung.aborted == [stream])
        hung.step(SequenceOutput(stream, [2]))
        await asyncio.sleep(0.05)
        keeper.finish(request.stream, [3])
        await until(lambda: sink.finished is not None)
        assert sink.token_ids == [1, 3]
        assert rig.dispatcher.faults.quarantined == 1

    play(scenario, vigil=QUICK)


def test_a_worker_that_hangs_is_put_aside_and_comes_back_with_an_answer(play) -> None:
    async def scenario(rig: Rig) -> None:
        hung, other = await rig.serving("w1", "w2")
        other.on_submit = lambda request: other.finish(request.stream)
        while rig.worker_of(rig.submit()[0][0]) != "w1":
            pass
        await until(lambda: len(rig.view.eligible("f1")) == 1)
        hung.on_submit = lambda request: hung.finish(request.stream)
        await until(lambda: len(rig.view.eligible("f1")) == 2)
        assert hung.requests[-1].request_id == "canary"
        assert rig.dispatcher.faults.returned == 1

    play(scenario, vigil=QUICK)


def test_a_worker_that_gets_no_processor_is_left_alone_and_one_that_stands_still_is_not(play) -> None:
    async def scenario(rig: Rig) -> None:
        starved, other = await rig.serving("w1", "w2")
        other.on_submit = lambda request: other.finish(request.stream)
        starved.publish(REPORT)
        while rig.worker_of(rig.submit()[0][0]) != "w1":
            pass
        for held_up in range(10):
            starved.publish(msgspec.structs.replace(REPORT, starved_ms=100.0 * held_up))
            await asyncio.sleep(0.05)
        assert len(rig.view.eligible("f1")) == 2, "silent for half a second, which it could not help"
        await until(lambda: len(rig.view.eligible("f1")) == 1)

    play(scenario, vigil=QUICK)


def test_a_worker_whose_loop_turns_does_not_hang_but_one_that_repeats_itself_does(play) -> None:
    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        rig.submit()
        await until(lambda: bool(worker.requests))
        await rig.worker("w2")
        for turn in range(30):
            worker.publish(msgspec.structs.replace(REPORT, turns=turn))
            await asyncio.sleep(0.02)
        assert rig.eligible() == {"w1", "w2"}, "it computes a long prompt"
        for _ in range(100):
            worker.publish(msgspec.structs.replace(REPORT, turns=29))
            await asyncio.sleep(0.02)
            if rig.eligible() == {"w2"}:
                return
        raise AssertionError("a repeated report was taken for a sign of life")

    play(scenario, vigil=QUICK)


def test_an_idle_worker_that_does_not_answer_its_canary_gets_nothing(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1", "w2")
        other = rig.by_id("w2")
        other.on_submit = lambda request: other.finish(request.stream)
        await until(lambda: rig.eligible() == {"w2"})
        assert rig.by_id("w1").requests[0].request_id == "canary"

    play(scenario, vigil=VigilLimits(0.1, 0.1, canary_interval_s=0.05, look_s=0.02))


def test_the_last_worker_is_not_put_aside_soon_and_with_half_of_them_gone_the_next_is_given_longer(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1", "w2", "w3", "w4")
        began = asyncio.get_running_loop().time()
        for _ in range(8):
            rig.submit()
        await until(lambda: len(rig.eligible()) <= 2)
        await asyncio.sleep(0.3)
        assert len(rig.eligible()) == 2
        await until(lambda: len(rig.eligible()) == 1)
        assert asyncio.get_running_loop().time() - began >= 0.9
        await asyncio.sleep(1.2)
        assert len(rig.eligible()) == 1

    play(scenario, vigil=QUICK)


def test_nobody_waits_without_a_bound_for_the_last_worker(play) -> None:
    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        (stream,), (sink,) = rig.submit()
        await until(lambda: bool(worker.requests))
        worker.step(SequenceOutput(stream, [1]))
        await until(lambda: sink.error is not None)
        assert "w1 has not moved on for" in str(sink.error)
        assert sink.token_ids == [1]
        await until(lambda: worker.requests[-1].request_id == "canary")
        worker.finish(worker.requests[-1].stream)
        await until(lambda: rig.eligible() == {"w1"})

    play(scenario, vigil=replace(QUICK, last_timeout_s=0.4), moves=MoveLimits(max_wait_s=0.2))


def test_who_can_replace_a_worker_of_this_host_is_told_that_it_hangs_for_long(play) -> None:
    """Not of one that has never computed a token, nor of one elsewhere, nor of one that answers with a refusal."""

    async def scenario(rig: Rig) -> None:
        told: list[int] = []
        workers = await rig.serving("w1", "w2", "w3", "w4", "w5")
        for pid, worker in enumerate(workers, 1):
            connection = rig.cluster.connection(worker.worker_id)
            host = "elsewhere" if worker.worker_id == "w2" else socket.gethostname()
            connection.instance = msgspec.structs.replace(connection.instance, pid=pid, host=host)
            connection.refuses = worker.worker_id == "w5"
        rig.cluster.on_hung = lambda pid, silent_s: told.append(pid)
        answers = {
            "w1": lambda worker, stream: worker.step(SequenceOutput(stream, [1])),
            "w2": lambda worker, stream: worker.step(SequenceOutput(stream, [1])),
            "w3": lambda worker, stream: worker.refuse(stream, "invalid_request", "that is no token"),
            "w5": lambda worker, stream: worker.step(SequenceOutput(stream, [1])),
        }
        streams = [rig.submit()[0][0] for _ in workers]
        await until(lambda: all(worker.requests for worker in workers))
        for stream in streams:
            worker = rig.by_id(rig.worker_of(stream))
            answers.get(worker.worker_id, lambda worker, stream: None)(worker, stream)
        await until(lambda: not rig.eligible())
        told.clear()
        await until(lambda: told.count(1) == 3)  # all others have been silent for as long by then
        assert set(told) == {1}

    limits = replace(QUICK, last_timeout_s=0.4, hopeless_s=0.5, canary_interval_s=0.05)
    play(scenario, vigil=limits, moves=MoveLimits(max_wait_s=0.2))


def test_an_idle_worker_that_answers_its_canaries_stays(play) -> None:
    async def scenario(rig: Rig) -> None:
        worker = await rig.worker("w1")
        worker.on_submit = lambda request: worker.finish(request.stream)
        await until(lambda: len(worker.requests) >= 3)
        assert rig.view.eligible("f1")
        assert rig.dispatcher.faults.quarantined == 0

    play(scenario, vigil=VigilLimits(0.5, 0.5, canary_interval_s=0.05, look_s=0.02))


@pytest.mark.parametrize("code", ["draining", "engine_failed", "worker_lost"])
def test_a_stream_that_its_worker_ends_because_it_leaves_or_fails_goes_on(play, code: str) -> None:
    async def scenario(rig: Rig) -> None:
        leaver, stream, sink = await begun(rig)
        leaver.refuse(stream, code, "this worker was closed")
        keeper, request = await taken_over(rig, leaver)
        keeper.finish(request.stream, [2])
        await until(lambda: sink.finished is not None)
        assert sink.token_ids == [1, 2]

    play(scenario)


def test_a_stream_that_cannot_be_gone_on_with_ends_and_is_not_blamed(play) -> None:
    """As when an attached server dies in the middle of a relayed answer."""

    async def scenario(rig: Rig) -> None:
        leaver, stream, sink = await begun(rig)
        leaver.refuse(stream, "worker_lost", "the server broke off")
        keeper, request = await taken_over(rig, leaver)
        keeper.refuse(request.stream, "stream_lost", "that cannot be taken up")
        await until(lambda: sink.error is not None)
        assert isinstance(sink.error, StreamLost)
        assert sink.error.message == "that cannot be taken up"
        assert rig.dispatcher.faults.poisonous == 0

    play(scenario)


def test_one_worker_that_fails_twice_is_not_called_two(play) -> None:
    """As when the only attached server breaks off again at the same request."""

    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        worker.on_submit = lambda request: worker.refuse(request.stream, "worker_lost", "the server broke off")
        _, (sink,) = rig.submit()
        await until(lambda: sink.error is not None)
        assert isinstance(sink.error, EngineFailed)
        assert sink.error.message.startswith("2 times a worker failed as it worked on this request")

    play(scenario)


def test_a_request_at_fault_is_not_passed_on(play) -> None:
    async def scenario(rig: Rig) -> None:
        worker, stream, sink = await begun(rig)
        worker.refuse(stream, "invalid_value", "no such grammar")
        await until(lambda: sink.error is not None)
        assert isinstance(sink.error, InvalidRequest)
        assert sum(len(worker.requests) for worker in rig.workers) == 1

    play(scenario)


def test_a_stream_waits_for_a_worker_and_goes_on_when_one_comes(play) -> None:
    async def scenario(rig: Rig) -> None:
        (loser,) = await rig.serving("w1")
        streams, (sink,) = rig.submit()
        await until(lambda: bool(loser.requests))
        loser.step(SequenceOutput(streams[0], [1]))
        await until(lambda: sink.token_ids == [1])
        await loser.vanish()
        await until(lambda: not rig.view.eligible("f1"))
        keeper = await rig.worker("w2")
        await until(lambda: bool(keeper.requests))
        keeper.finish(keeper.requests[0].stream, [2])
        await until(lambda: sink.finished is not None)
        assert sink.token_ids == [1, 2]

    play(scenario)


def test_a_stream_waits_no_longer_than_it_may_and_says_why(play) -> None:
    async def scenario(rig: Rig) -> None:
        (loser,) = await rig.serving("w1")
        _, (sink,) = rig.submit()
        await until(lambda: bool(loser.requests))
        await loser.close()
        await until(lambda: sink.error is not None)
        assert isinstance(sink.error, NoWorkers)
        assert "worker w1 was lost while it worked on this request" in str(sink.error)
        assert "within 0.2 s" in str(sink.error)
        assert sink.error.retry_after_s > 0
        assert rig.dispatcher.num_streams == 0

    play(scenario, moves=MoveLimits(max_wait_s=0.2))


def test_a_stream_that_waits_can_be_aborted(play) -> None:
    async def scenario(rig: Rig) -> None:
        (loser,) = await rig.serving("w1")
        streams, (sink,) = rig.submit()
        await until(lambda: bool(loser.requests))
        await loser.vanish()
        await until(lambda: not rig.view.eligible("f1"))
        rig.dispatcher.abort(streams)
        keeper = await rig.worker("w2")
        await until(lambda: bool(rig.view.eligible("f1")))
        await asyncio.sleep(0.1)
        assert (keeper.requests, sink.outputs, sink.error) == ([], [], None)
        assert rig.dispatcher.faults.cancelled_by_stage["moving"] == 1

    play(scenario)


def test_an_abort_finds_a_stream_that_has_moved(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1", "w2")
        streams, _ = rig.submit()
        loser = rig.by_id(rig.worker_of(streams[0]))
        await until(lambda: bool(loser.requests))
        await loser.vanish()
        keeper, request = await taken_over(rig, loser)
        rig.dispatcher.abort(streams)
        await until(lambda: keeper.aborted == [request.stream])
        assert rig.view.worker(keeper.worker_id).booked_sequences == 0

    play(scenario)


class Choice(Sink):
    """Of an answer with several: when one fails, the others are not wanted any more."""

    def __init__(self, rig: Rig, streams: list[int]) -> None:
        super().__init__()
        self._rig = rig
        self._streams = streams

    def on_error(self, error: HeadwaterError) -> None:
        super().on_error(error)
        self._rig.dispatcher.abort(self._streams)


async def two_choices(rig: Rig) -> tuple[ScriptedWorker, list[int], list[Sink]]:
    streams: list[int] = []
    sinks: list[Sink] = [Choice(rig, streams) for _ in range(2)]
    streams += rig.submit(n=2, sinks=sinks)[0]
    worker = rig.by_id(rig.worker_of(streams[0]))
    await until(lambda: len(worker.requests) == 2)
    return worker, streams, sinks


async def end_once_each(rig: Rig, sinks: list[Sink]) -> None:
    trouble: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: trouble.append(context))
    await until(lambda: any(sink.error for sink in sinks))
    await asyncio.sleep(0.1)
    assert len([sink for sink in sinks if sink.error]) == 1, "the other one was aborted: it hears nothing more"
    assert (rig.dispatcher.num_streams, rig.dispatcher.faults.waiting()) == (0, 0)
    assert all(worker.booked_sequences == 0 for worker in rig.view.workers)
    assert not trouble


@pytest.mark.parametrize("code", ["invalid_value", "engine_failed", "overloaded"])
def test_two_choices_that_fail_in_one_step_end_once_each(play, code: str) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1")
        worker, streams, sinks = await two_choices(rig)
        failure = ErrorInfo(code, "no such grammar", 500, retryable=code == "overloaded")
        worker.step(*(SequenceOutput(stream, [], "error", error=failure) for stream in streams))
        await end_once_each(rig, sinks)

    play(scenario, moves=MoveLimits(max_moves=0))


def test_two_choices_that_wait_in_vain_end_once_each(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1")
        worker, _, sinks = await two_choices(rig)
        await worker.close()
        await end_once_each(rig, sinks)

    play(scenario, moves=MoveLimits(max_wait_s=0.2))


def test_a_choice_that_could_wait_longer_is_not_tried_again_when_the_other_has_waited_in_vain(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1")
        worker, streams, sinks = await two_choices(rig)
        await worker.set_state("draining")
        await until(lambda: not rig.eligible())
        for count, stream in enumerate(streams, 1):
            worker.refuse(stream, "draining", "leaving")
            await until(lambda count=count: rig.dispatcher.faults.waiting() == count)
            await asyncio.sleep(0.2)
        await end_once_each(rig, sinks)

    play(scenario, moves=MoveLimits(max_wait_s=0.5))


def test_two_choices_end_once_each_when_the_frontend_closes(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1")
        _, _, sinks = await two_choices(rig)
        rig.dispatcher.close()
        await end_once_each(rig, sinks)

    play(scenario)


def test_a_stream_moves_so_often_and_no_more(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1", "w2", "w3", "w4")
        streams, (sink,) = rig.submit()
        for token in range(3):
            worker = rig.by_id(rig.worker_of(streams[0]))
            await until(lambda worker=worker: bool(worker.requests))
            worker.step(SequenceOutput(worker.requests[-1].stream, [token]))
            await until(lambda token=token: len(sink.token_ids) == token + 1)
            await worker.close()
            await until(lambda worker=worker: rig.view.worker(worker.worker_id) is None)
        await until(lambda: sink.error is not None)
        assert isinstance(sink.error, WorkerLost)
        assert "had moved 2 times" in str(sink.error)

    play(scenario, moves=MoveLimits(max_moves=2))


@pytest.mark.parametrize("error", [WorkerLost("cut by the test"), WorkerSilent("not heard of")])
def test_workers_that_are_only_cut_off_convict_nobody(play, error: WorkerLost) -> None:
    async def scenario(rig: Rig) -> None:
        workers = await rig.serving("w1", "w2", "w3")
        (stream,), (sink,) = rig.submit()
        for breaks in range(5):
            await until(lambda breaks=breaks: sum(len(worker.requests) for worker in workers) == breaks + 1)
            connection = rig.cluster.connection(rig.worker_of(stream) or "")
            assert connection is not None
            connection._on_broken(error)
            await until(lambda: len(rig.view.eligible("f1")) == 3)
        await until(lambda: sum(len(worker.requests) for worker in workers) == 6)
        assert sink.error is None
        worker = rig.by_id(rig.worker_of(stream))
        worker.finish(worker.requests[-1].stream)
        await until(lambda: sink.finished is not None)

    play(scenario)


def test_workers_that_fall_silent_convict_later_than_those_that_die(play) -> None:
    """None of them comes back."""

    async def scenario(rig: Rig) -> None:
        await rig.serving("w1", "w2", "w3", "w4")
        (stream,), (sink,) = rig.submit()
        for silences in range(1, 4):
            await until(lambda: rig.worker_of(stream) is not None)
            worker = rig.by_id(rig.worker_of(stream))
            connection = rig.cluster.connection(worker.worker_id)
            assert connection is not None
            await worker.give_up_lease()
            connection._on_broken(WorkerSilent("not heard of"))
            assert (sink.error is None) == (silences < 3)
        assert isinstance(sink.error, EngineFailed)

    play(scenario)


def test_a_request_that_two_workers_died_of_is_refused_and_the_others_go_on(play) -> None:
    async def scenario(rig: Rig) -> None:
        def serve(worker: ScriptedWorker):
            def on_submit(request: EngineRequest) -> None:
                if request.sampling.max_tokens == 666:
                    asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(worker.close()))
                else:
                    worker.step(SequenceOutput(request.stream, [1]))

            return on_submit

        for worker in await rig.serving("w1", "w2", "w3", "w4"):
            worker.on_submit = serve(worker)
        good = [rig.submit()[1][0] for _ in range(8)]
        await until(lambda: all(sink.token_ids for sink in good))
        _, (sink,) = rig.submit(max_tokens=666)
        await until(lambda: sink.error is not None)
        assert isinstance(sink.error, EngineFailed)
        assert "2 workers died" in str(sink.error)
        assert not sink.error.retryable
        await until(lambda: len(rig.view.workers) == 2)
        assert all(sink.error is None for sink in good)
        assert rig.dispatcher.faults.poisonous == 1

    play(scenario)
