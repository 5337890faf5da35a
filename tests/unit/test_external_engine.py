"""What engines of others share: outputs of one turn of the loop made one, waiting and pausing."""

import asyncio
from array import array
from collections.abc import Sequence

import uvloop

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo, ProgressSink
from headwater.engines.external import ExternalEngine, OpenStream
from headwater.engines.gathered import Gathered
from headwater.engines.watched import Bench, Recorder
from headwater.errors import Unavailable
from headwater.protocol.cluster import ModelCard
from headwater.protocol.events import LoadReport
from headwater.protocol.request import ErrorInfo, SequenceOutput, TokenLogprobs
from headwater.runtime.conformance import eventually

CARD = ModelCard("m", ["m"], "fp", "none", "none", "none", 512, 16, 300)


class Silent(ExternalEngine):
    """Takes everything and answers nothing by itself."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(max_waiting=2))
        self.sent: list[int] = []
        self.cancelled: list[int] = []

    async def open_engine(self, progress: ProgressSink) -> EngineInfo:
        return EngineInfo("silent", CARD, {}, 48, 4, 64, "none", False)

    def send(self, stream: OpenStream, tokens: "array[int]") -> None:
        self.sent.append(stream.request.stream)

    def cancel(self, streams: Sequence[int]) -> None:
        self.cancelled += streams

    async def close_engine(self) -> None:
        return

    def load(self) -> LoadReport:
        return LoadReport(0, 0, 0, 48, 48)


async def started() -> tuple[Silent, Bench]:
    engine, recorder = Silent(), Recorder()
    info = await engine.start(recorder, lambda _: None)
    return engine, Bench(engine, info, recorder, [])


def test_outputs_of_one_turn_are_joined_per_sequence() -> None:
    async def scenario() -> None:
        steps: list[list[SequenceOutput]] = []
        gathered = Gathered(steps.append)
        gathered.take(SequenceOutput(1, [5], num_cached_tokens=3, logprobs=[TokenLogprobs(-1.0, 1)], relayed=b"a"))
        gathered.take(SequenceOutput(2, [7]))
        gathered.take(SequenceOutput(1, [6], "stop", 9, logprobs=[TokenLogprobs(-2.0, 1)], relayed=b"b"))
        gathered.take(SequenceOutput(1, [8], "length"))
        await asyncio.sleep(0)
        (step,) = steps
        first, second = step
        assert (first.token_ids, first.finish_reason, first.stop_token_id) == ([5, 6], "stop", 9)
        assert (first.num_cached_tokens, first.relayed, len(first.logprobs or [])) == (3, b"ab", 2)
        assert second.token_ids == [7]
        gathered.take(SequenceOutput(2, [], "error", error=ErrorInfo("worker_lost", "x")))
        await asyncio.sleep(0)
        assert steps[1][0].finish_reason == "error"

    uvloop.run(scenario())


def test_a_step_is_handed_on_when_all_have_brought_something_or_a_moment_later() -> None:
    async def scenario() -> None:
        steps: list[list[SequenceOutput]] = []
        gathered = Gathered(steps.append, lambda: 3)
        for stream in (1, 2, 1):
            gathered.take(SequenceOutput(stream, [stream]))
            await asyncio.sleep(0)
        assert steps == [], "the third is awaited"
        gathered.take(SequenceOutput(3, [3]))
        await asyncio.sleep(0)
        assert [(one.stream, one.token_ids) for one in steps[0]] == [(1, [1, 1]), (2, [2]), (3, [3])]
        gathered.take(SequenceOutput(2, [2]))
        await eventually(lambda: len(steps) == 2, "the others have nothing")
        await asyncio.sleep(0.005)
        assert [len(step) for step in steps] == [3, 1]

    uvloop.run(scenario())


def test_a_token_makes_room_in_the_line() -> None:
    async def scenario() -> None:
        engine, bench = await started()
        engine.submit([bench.request([5]) for _ in range(3)])
        await asyncio.sleep(0)
        assert bench.recorder.error(3).code == "overloaded"
        engine.deliver([SequenceOutput(1, [7])])
        engine.abort([2])
        engine.submit([bench.request([5]) for _ in range(3)])
        await asyncio.sleep(0)
        assert engine.sent == [1, 2, 4, 5]
        assert bench.recorder.error(6).code == "overloaded"
        assert engine.cancelled == [2]
        await engine.close()
        assert sorted(engine.cancelled) == [1, 2, 4, 5]

    uvloop.run(scenario())


def test_a_pause_ends_what_runs_and_refuses_until_it_is_over() -> None:
    async def scenario() -> None:
        engine, bench = await started()
        engine.submit([bench.request([5])])
        engine.pause(Unavailable("away"))
        engine.submit([bench.request([5])])
        await asyncio.sleep(0)
        assert [bench.recorder.error(stream).retryable for stream in (1, 2)] == [True, True]
        assert engine.paused
        engine.resume()
        engine.submit([bench.request([5])])
        assert engine.sent == [1, 3]
        engine.abort([3])
        assert await engine.drain(1.0)
        engine.pause(Unavailable("away"))
        engine.resume()
        engine.submit([bench.request([5])])
        await asyncio.sleep(0)
        assert bench.recorder.error(4).code == "draining", "a pause does not end a drain"
        await engine.close()

    uvloop.run(scenario())


def test_a_task_that_fails_ends_the_engine_and_the_others_end_with_it() -> None:
    async def scenario() -> None:
        engine, bench = await started()
        ended = asyncio.Event()

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def breaks() -> None:
            raise KeyError("x")

        bench.engine.submit([bench.request([3] * 20)])
        engine.spawn(waits())
        engine.spawn(breaks())
        await asyncio.sleep(0.01)
        assert bench.recorder.error(1).code == "engine_failed"
        assert len(bench.recorder.failures) == 1
        assert not ended.is_set()
        await engine.close()
        assert ended.is_set()

    uvloop.run(scenario())
