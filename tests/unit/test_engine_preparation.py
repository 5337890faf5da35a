"""Costly grammars: done beside the steps, refused, aborted, bounded, and never reported late."""

import asyncio
import threading

import pytest
from kv_checking_executor import KvCheckingExecutor, request

from headwater.config.schema import EngineConfig
from headwater.engines import preparation as preparation_module
from headwater.engines.base import EngineInfo, ProgressSink
from headwater.engines.core import BuiltEngine
from headwater.engines.engine import CoreEngine
from headwater.engines.loop import ThreadedLoop
from headwater.engines.watched import Recorder
from headwater.errors import InvalidRequest
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest, StructuredSpec
from headwater.runtime.conformance import eventually
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.plan import Sequence

LIMITS = SchedulerLimits(
    num_blocks=100, block_size=4, max_model_len=400, vocab_size=50, max_num_seqs=4, max_num_batched_tokens=32
)
INFO = EngineInfo("test", ModelCard("m", ["m"], "f", "a", "d", "l", 400, 4, 50), {}, 100, 4, 32, "none", True)


class Executor(KvCheckingExecutor):
    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.prepared: list[int] = []
        self.admitted: list[int] = []
        self.gate = threading.Event()

    def prepare(self, request: EngineRequest) -> None:
        self.prepared.append(request.stream)
        assert self.gate.wait(20)
        spec = request.sampling.structured
        assert spec is not None
        if spec.spec == "bad":
            raise InvalidRequest("regex: bad", param="guided_regex")
        if spec.spec == "bug":
            raise ZeroDivisionError

    def admit(self, sequence: Sequence) -> None:
        self.admitted.append(sequence.stream)

    def release(self, sequence: Sequence) -> None: ...

    def close(self) -> None: ...


def structured(stream: int, spec: str = "fine") -> EngineRequest:
    return request(stream, [1, 2, 3], structured=StructuredSpec("regex", spec))


async def started(executor: Executor) -> tuple[CoreEngine, Recorder]:
    def build(_: ProgressSink) -> BuiltEngine:
        return BuiltEngine(executor, INFO, executor.prepare)

    engine, recorder = CoreEngine(EngineConfig(block_size=4), build, ThreadedLoop()), Recorder()
    await engine.start(recorder, lambda _: None)
    return engine, recorder


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    async def main() -> None:
        executor = Executor()
        engine, recorder = await started(executor)
        engine.submit([structured(1), request(2, [4, 5])])
        await eventually(lambda: recorder.ended(2), "the plain one ends")
        assert executor.prepared == [1]
        assert 1 not in recorder.outputs
        executor.gate.set()
        await eventually(lambda: recorder.ended(1), "the other follows")
        assert len(recorder.tokens(1)) == 4
        await engine.close()

    asyncio.run(main())


def test_a_bad_grammar_and_a_bug_are_told_to_their_own_request(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        executor = Executor()
        executor.gate.set()
        engine, recorder = await started(executor)
        engine.submit([structured(1, "bad"), structured(2, "bug"), structured(3)])
        await eventually(lambda: recorder.ended(1, 2, 3), "all end")
        assert (recorder.error(1).code, recorder.error(1).message) == ("invalid_value", "regex: bad")
        assert recorder.error(2).code == "internal_error"
        assert len(recorder.tokens(3)) == 4
        assert executor.admitted == [3]
        await engine.close()

    asyncio.run(main())
    assert "ZeroDivisionError" in caplog.text


def test_aborted_meanwhile_it_is_neither_admitted_nor_told() -> None:
    async def main() -> None:
        executor = Executor()
        engine, recorder = await started(executor)
        engine.submit([structured(1), structured(2), structured(3)])
        await eventually(lambda: executor.prepared == [1], "the first is under way")
        engine.abort([1, 2])
        for _ in range(3):
            await asyncio.sleep(0)  # a cancellation reaches the thread's queue in a later turn of the loop
        executor.gate.set()
        await eventually(lambda: recorder.ended(3), "the third ends")
        assert executor.prepared == [1, 3]
        assert executor.admitted == [3]
        assert recorder.outputs.keys() == {3}
        await engine.close()

    asyncio.run(main())


def test_a_drain_waits_for_it_and_a_close_ends_it() -> None:
    async def main() -> None:
        executor = Executor()
        engine, recorder = await started(executor)
        engine.submit([structured(1), structured(2)])
        assert not await engine.drain(0.01)
        closing = asyncio.create_task(engine.close())
        await eventually(lambda: recorder.ended(1, 2), "both are ended")
        executor.gate.set()
        await closing
        assert recorder.error(1).code == recorder.error(2).code == "draining"
        assert executor.admitted == []

    asyncio.run(main())


def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation_module, "_MAX_PENDING", 2)

    async def main() -> None:
        executor = Executor()
        engine, recorder = await started(executor)
        engine.submit([structured(1), structured(2)])
        engine.submit([structured(3)])
        await eventually(lambda: recorder.ended(3), "the third is refused")
        assert recorder.error(3).code == "overloaded"
        executor.gate.set()
        await eventually(lambda: recorder.ended(1, 2), "the others are served")
        assert len(recorder.tokens(2)) == 4
        await engine.close()

    asyncio.run(main())
