"""`EngineCore`: what it asks of scheduler and executor, and what it tells."""

from collections.abc import Collection

import pytest
from kv_checking_executor import KvCheckingExecutor, expected_tokens, request

from headwater.clock import VirtualClock
from headwater.engines.core import EngineCore
from headwater.errors import EngineFailed, InternalError, InvalidRequest
from headwater.protocol.events import BlocksStored, LoadReport
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.plan import Sequence, StepPlan, StepResult
from headwater.scheduler.scheduler import Scheduler

LIMITS = SchedulerLimits(
    num_blocks=30,
    block_size=4,
    max_model_len=100,
    vocab_size=50,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    namespace=b"key",
)


class PickyExecutor(KvCheckingExecutor):
    """Refuses some streams, breaks on demand, and notes who it knows."""

    def __init__(self, refuses: Collection[int] = ()) -> None:
        super().__init__(LIMITS)
        self.refuses = refuses
        self.known: list[int] = []
        self.breaks: Exception | None = None
        self.closed = False

    def admit(self, sequence: Sequence) -> None:
        if self.breaks is not None:
            raise self.breaks
        if sequence.stream in self.refuses:
            raise InvalidRequest("this grammar cannot be compiled", param="response_format")
        self.known.append(sequence.stream)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.breaks is not None:
            raise self.breaks
        return super().execute(plan)

    def release(self, sequence: Sequence) -> None:
        if sequence.stream in self.known:
            self.known.remove(sequence.stream)

    def close(self) -> None:
        self.closed = True


def core_with(executor: PickyExecutor, clock: VirtualClock | None = None) -> EngineCore:
    return EngineCore(Scheduler(LIMITS), executor, clock or VirtualClock())


def test_steps_until_done_and_releases() -> None:
    executor = PickyExecutor()
    core = core_with(executor)
    one = request(1, [5, 6, 7, 8, 9], 4)
    assert core.submit([one]) == []
    tokens = []
    while core.has_work:
        tokens += [token for output in core.step().outputs for token in output.token_ids]
    assert tokens == expected_tokens(one, LIMITS)[0]
    assert executor.known == []
    core.check()
    core.close()
    assert executor.closed


def test_refusals_are_answered_at_once_and_leave_nothing() -> None:
    executor = PickyExecutor(refuses={2})
    core = core_with(executor)
    answers = core.submit([request(1, [5]), request(2, [6]), request(3, []), request(4, [7])])
    assert [(answer.stream, answer.finish_reason) for answer in answers] == [(2, "error"), (3, "error")]
    grammar, empty = answers[0].error, answers[1].error
    assert grammar is not None
    assert (grammar.code, grammar.param, grammar.http_status) == ("invalid_value", "response_format", 400)
    assert empty is not None
    assert empty.param == "prompt"
    assert executor.known == [1, 4]
    core.check()
    streams = set()
    while core.has_work:
        streams |= {output.stream for output in core.step().outputs}
    assert streams == {1, 4}


def test_abort_releases_and_is_reported_by_the_next_step() -> None:
    clock = VirtualClock()
    executor = PickyExecutor()
    core = core_with(executor, clock)
    core.submit([request(1, [5] * 30, 50), request(2, [6] * 5, 50)])
    for _ in range(3):
        core.step()
    assert not any(isinstance(event, LoadReport) for event in core.step().events)
    core.abort([1])
    assert executor.known == [2]
    (load,) = [event for event in core.step().events if isinstance(event, LoadReport)]
    assert load.num_running == 1


def test_reports_are_spaced_while_busy_and_immediate_when_idle() -> None:
    clock = VirtualClock()
    core = core_with(PickyExecutor(), clock)
    core.submit([request(1, [5] * 3, 12)])
    reports = []
    while core.has_work:
        reports += [event for event in core.step().events if isinstance(event, LoadReport)]
        clock.advance(0.005)
    assert [report.steps for report in reports] == [1, 5, 9, 12]
    assert [len(report.timings) for report in reports] == [1, 4, 4, 3]
    (idle,) = core.step().events
    assert isinstance(idle, LoadReport)
    assert (idle.num_running, idle.timings) == (0, [])


def test_stored_blocks_are_told_with_the_step_that_computed_them() -> None:
    core = core_with(PickyExecutor())
    core.submit([request(1, [5] * 20, 2)])
    assert core.begin_step() == 1.0
    first = core.finish_step()
    assert [len(event.block_ids) // 16 for event in first.events if isinstance(event, BlocksStored)] == [4]
    assert first.outputs == []
    second = core.step()
    assert [output.stream for output in second.outputs] == [1]


def test_nothing_to_run() -> None:
    core = core_with(PickyExecutor())
    assert core.begin_step() is None
    outcome = core.finish_step()
    assert outcome.outputs == []


@pytest.mark.parametrize("when", ["admit", "execute"])
def test_an_executor_that_breaks_takes_the_engine_down(when: str) -> None:
    executor = PickyExecutor()
    core = core_with(executor)
    if when == "execute":
        core.submit([request(1, [5])])
    executor.breaks = RuntimeError("out of memory")
    with pytest.raises(EngineFailed, match="out of memory") as caught:
        core.submit([request(2, [6])]) if when == "admit" else core.step()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_deadline_is_kept_on_the_epoch_clock() -> None:
    clock = VirtualClock(start=1000.0)
    core = core_with(PickyExecutor(), clock)
    core.submit([request(1, [5], 50, deadline=1001.0)])
    assert core.step().outputs[0].finish_reason is None
    clock.advance(1.0)
    (output,) = core.step().outputs
    assert output.error is not None
    assert output.error.code == "deadline_exceeded"
    assert not core.has_work


def test_lost_blocks_are_seen_when_idle() -> None:
    scheduler = Scheduler(LIMITS)
    core = EngineCore(scheduler, PickyExecutor(), VirtualClock())
    core.step()
    scheduler._roster.pool.allocate(3)
    with pytest.raises(InternalError, match="3 KV blocks are held by nobody"):
        core.step()
