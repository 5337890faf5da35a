"""The loops: when they step, what they do with slow, broken and stuck engines, and how they end."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from kv_checking_executor import KvCheckingExecutor, request

from headwater.clock import RealClock
from headwater.engines import loop as loop_module
from headwater.engines.base import EngineInfo, Progress, ProgressSink
from headwater.engines.core import EngineCore, StepOutcome
from headwater.engines.loop import InlineLoop, StepLoop, ThreadedLoop
from headwater.errors import EngineFailed, HeadwaterError, ModelError, Overloaded
from headwater.protocol.cluster import ModelCard
from headwater.runtime.conformance import eventually
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.plan import Sequence, StepPlan, StepResult
from headwater.scheduler.scheduler import Scheduler

LIMITS = SchedulerLimits(
    num_blocks=100,
    block_size=4,
    max_model_len=400,
    vocab_size=50,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    namespace=b"key",
)
INFO = EngineInfo("test", ModelCard("m", ["m"], "f", "a", "d", "l", 400, 4, 50), {}, 100, 4, 32, "none", True)


class Executor(KvCheckingExecutor):
    """Takes `duration_ms` by its own account; waits for `gate` when there is one."""

    def __init__(self, duration_ms: float = 1.0, gate: threading.Event | None = None) -> None:
        super().__init__(LIMITS)
        self.duration_ms = duration_ms
        self.gate = gate
        self.threads: set[int] = set()
        self.closed = 0

    def admit(self, sequence: Sequence) -> None:
        self.threads.add(threading.get_ident())

    def release(self, sequence: Sequence) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.get_ident())
        if self.gate is not None:
            self.gate.wait()
        result = super().execute(plan)
        result.duration_ms = self.duration_ms
        return result

    def close(self) -> None:
        self.closed += 1


class Owner:
    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []
        self.failures: list[HeadwaterError] = []
        self.progress: list[Progress] = []

    def on_outcome(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def on_failed(self, error: HeadwaterError) -> None:
        self.failures.append(error)

    def ended(self) -> set[int]:
        return {out.stream for outcome in self.outcomes for out in outcome.outputs if out.finish_reason}


def building(executor: Executor) -> Callable[[ProgressSink], tuple[EngineCore, EngineInfo]]:
    def build(progress: ProgressSink) -> tuple[EngineCore, EngineInfo]:
        progress(Progress("load", 1, 2))
        return EngineCore(Scheduler(LIMITS), executor, RealClock()), INFO

    return build


async def until(condition: Callable[[], bool]) -> None:
    await eventually(condition, "what the test waits for", 20.0)


LOOPS = [ThreadedLoop, InlineLoop, lambda: InlineLoop(0)]


@pytest.mark.parametrize("make", LOOPS)
def test_build_reports_progress_and_its_failure_is_raised(make: Callable[[], StepLoop]) -> None:
    def build(progress: ProgressSink) -> Any:
        progress(Progress("load"))
        raise ModelError("no such architecture")

    async def check() -> None:
        owner, loop = Owner(), make()
        with pytest.raises(ModelError, match="no such architecture"):
            await loop.start(build, owner.progress.append, owner)
        await until(lambda: owner.progress == [Progress("load")])
        await loop.close(5.0)
        assert (owner.outcomes, owner.failures) == ([], [])

    asyncio.run(check())


@pytest.mark.parametrize("make", LOOPS)
def test_a_loop_that_never_started_closes(make: Callable[[], StepLoop]) -> None:
    asyncio.run(make().close(1.0))


def test_the_threaded_loop_keeps_the_executor_on_one_thread() -> None:
    async def check() -> None:
        owner, loop, executor = Owner(), ThreadedLoop(), Executor()
        await loop.start(building(executor), owner.progress.append, owner)
        loop.submit([request(1, [5] * 9), request(2, [6])])
        await until(lambda: owner.ended() == {1, 2})
        await loop.close(5.0)
        assert executor.closed == 1
        assert len(executor.threads) == 1
        assert threading.get_ident() not in executor.threads

    asyncio.run(check())


def test_close_leaves_a_stuck_executor_behind(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    async def check() -> None:
        owner, loop, executor = Owner(), ThreadedLoop(), Executor(gate=gate)
        await loop.start(building(executor), owner.progress.append, owner)
        loop.submit([request(1, [5], 1)])
        await until(lambda: bool(executor.plans) or bool(executor.threads))
        await loop.close(0.05)
        await loop.close(0.05)
        assert "left behind after 0.1 s" in caplog.text
        gate.set()
        await loop.close(5.0)
        assert executor.closed == 1
        assert owner.ended() == set()

    asyncio.run(check())


def test_commands_to_a_busy_thread_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_MAX_COMMANDS", 3)
    gate = threading.Event()

    async def check() -> None:
        owner, loop, executor = Owner(), ThreadedLoop(), Executor(gate=gate)
        await loop.start(building(executor), owner.progress.append, owner)
        loop.submit([request(0, [5])])
        await until(lambda: bool(executor.threads) and loop._commands.qsize() == 0)
        for stream in (1, 2, 3):
            loop.submit([request(stream, [5])])
        with pytest.raises(Overloaded, match="more than 3 commands"):
            loop.submit([request(4, [5])])
        loop.abort([1])
        gate.set()
        await until(lambda: owner.ended() == {0, 2, 3})
        await loop.close(5.0)

    asyncio.run(check())


def test_the_thread_waits_for_an_event_loop_that_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_MAX_UNDELIVERED", 2)

    async def check() -> None:
        owner, loop, executor = Owner(), ThreadedLoop(), Executor()
        await loop.start(building(executor), owner.progress.append, owner)
        loop.submit([request(1, [5], 300)])
        threading.Event().wait(0.2)  # the event loop is blocked on purpose
        assert len(executor.plans) <= 4
        await until(lambda: owner.ended() == {1})
        await loop.close(5.0)

    asyncio.run(check())


def test_the_thread_ends_when_the_event_loop_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_HEARTBEAT_S", 0.05)
    executor = Executor()

    async def leave() -> ThreadedLoop:
        owner, loop = Owner(), ThreadedLoop()
        await loop.start(building(executor), owner.progress.append, owner)
        while loop._slots.acquire(blocking=False):  # the event loop owes the thread all it may owe
            pass
        loop.submit([request(1, [5], 300)])
        return loop

    loop = asyncio.run(leave())
    assert loop._thread is not None
    loop._thread.join(10.0)
    assert not loop._thread.is_alive()
    assert executor.closed == 1


@pytest.mark.parametrize("make", LOOPS)
def test_a_bug_in_the_listener_does_not_stop_the_engine(make: Callable[[], StepLoop]) -> None:
    class Clumsy(Owner):
        def on_outcome(self, outcome: StepOutcome) -> None:
            super().on_outcome(outcome)
            if len(self.outcomes) == 2:
                raise ZeroDivisionError

    async def check() -> None:
        owner, loop = Clumsy(), make()
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await loop.start(building(Executor()), owner.progress.append, owner)
        loop.submit([request(1, [5], 10)])
        await until(lambda: owner.ended() == {1})
        assert len(complaints) == 1
        assert owner.failures == []
        await loop.close(5.0)

    asyncio.run(check())


@pytest.mark.parametrize("make", LOOPS)
def test_an_unforeseen_error_becomes_a_failure_once_and_is_logged(
    make: Callable[[], StepLoop], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Executor):
        def execute(self, plan: StepPlan) -> StepResult:
            return StepResult([], None, 1.0)

    async def check() -> None:
        owner, loop, executor = Owner(), make(), Broken()
        await loop.start(building(executor), owner.progress.append, owner)
        loop.submit([request(1, [5]), request(2, [6])])
        await until(lambda: bool(owner.failures))
        assert isinstance(owner.failures[0], EngineFailed)
        await loop.close(5.0)
        assert len(owner.failures) == 1
        assert executor.closed == 1
        assert caplog.text.count("the engine failed") == 1

    asyncio.run(check())


def test_modelled_time_is_kept_on_average() -> None:
    async def check() -> None:
        owner, loop = Owner(), InlineLoop(speedup=10.0)
        await loop.start(building(Executor(duration_ms=3.0)), owner.progress.append, owner)
        begun = asyncio.get_running_loop().time()
        loop.submit([request(1, [5], 300, ignore_eos=True)])
        await until(lambda: owner.ended() == {1})
        assert asyncio.get_running_loop().time() - begun >= 300 * 0.0003
        await loop.close(5.0)

    asyncio.run(check())


def test_submits_in_every_turn_do_not_keep_the_step_from_coming() -> None:
    async def check() -> None:
        owner, loop = Owner(), InlineLoop(0)
        await loop.start(building(Executor()), owner.progress.append, owner)
        for stream in range(50):
            loop.submit([request(stream, [5], 1)])
            await asyncio.sleep(0)
        assert len(owner.ended()) > 25
        await loop.close(5.0)

    asyncio.run(check())


def test_io_goes_on_between_steps_at_infinite_speed() -> None:
    async def check() -> None:
        owner, loop = Owner(), InlineLoop(0)
        await loop.start(building(Executor()), owner.progress.append, owner)
        loop.submit([request(1, [5], 300)])
        turns = 0
        while owner.ended() != {1}:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 300
        await loop.close(5.0)

    asyncio.run(check())


def test_an_inline_loop_closed_while_it_starts_never_runs() -> None:
    executor = Executor()

    async def check() -> None:
        owner, loop = Owner(), InlineLoop()
        starting = asyncio.create_task(loop.start(building(executor), owner.progress.append, owner))
        await asyncio.sleep(0)
        await loop.close(1.0)
        with pytest.raises(EngineFailed, match="closed while it started"):
            await starting
        assert executor.closed == 1

    asyncio.run(check())
