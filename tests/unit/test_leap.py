"""Leaps and silent steps against the production scheduler: same outputs, times, block tables and events."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import InternalError
from headwater.kv.identity import chain_block_ids
from headwater.protocol.events import BlocksRemoved, BlocksStored
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.scheduler.leap import LeapingScheduler
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.outside import FirstToken, LoadEnded, LoadStarted
from headwater.scheduler.plan import StepPlan, StepResult
from headwater.scheduler.scheduler import Scheduler

TOKEN = 7
BLOCK = 16


@dataclass(frozen=True)
class Arrival:
    after_ms: float
    prompt_tokens: int
    prefix: int
    """Prompts with an equal one begin alike."""
    max_tokens: int
    ends: int = -1
    """The stream whose client leaves as this comes."""


arrivals = st.builds(
    Arrival,
    after_ms=st.sampled_from([0.0, 0.1, 0.5, 3.0, 17.0, 120.0]),
    prompt_tokens=st.integers(1, 90),
    prefix=st.integers(0, 2),
    max_tokens=st.integers(1, 120),
    ends=st.integers(-12, 11),
)


def limits(num_blocks: int, max_num_seqs: int) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_model_len=220,
        vocab_size=1 << 32,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + 40,
    )


def request(stream: int, arrival: Arrival) -> EngineRequest:
    tokens = bytes([arrival.prefix, 0, 0, 0]) * arrival.prompt_tokens
    return EngineRequest(
        stream=stream,
        request_id="",
        model="m",
        prompt=tokens,
        sampling=SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True),
        block_ids=chain_block_ids(b"", tokens, BLOCK),
    )


def duration_ms(plan: StepPlan) -> float:
    """Constant over a leap, as the times of the simulator are on average."""
    return 1.0 + 0.25 * plan.num_prefill_tokens + 0.5 * plan.num_decode


@dataclass
class Log:
    """What can be seen of a scheduler."""

    outputs: list[tuple[int, float, str | None, int | None]] = field(default_factory=list)
    """(stream, when, finish reason, cached tokens) of first and last outputs."""
    events: list[tuple[float, BlocksStored | BlocksRemoved]] = field(default_factory=list)
    tables: list[dict[int, list[int]]] = field(default_factory=list)
    """Whenever a request comes."""
    now: float = 0.0

    def take(self, scheduler: Scheduler, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if output.num_cached_tokens is not None or output.finish_reason is not None:
                self.outputs.append((output.stream, round(self.now, 6), output.finish_reason, output.num_cached_tokens))
        self.events += [(round(self.now, 6), event) for event in scheduler.drain_events()]
        scheduler.take_ended()

    def step(self, scheduler: Scheduler) -> bool:
        plan = scheduler.schedule(self.now)
        if plan is None:
            return False
        took = duration_ms(plan)
        self.now += took
        samples = sum(piece.samples for piece in plan.slices)
        self.take(scheduler, scheduler.commit(plan, StepResult([TOKEN] * samples, None, took), self.now))
        return True


def tables(scheduler: Scheduler) -> dict[int, list[int]]:
    return {stream: list(entry.block_table) for stream, entry in scheduler._roster.by_stream.items()}


def drive(scheduler: Scheduler, coming: list[tuple[float, EngineRequest, int]], *, leaping: bool) -> Log:
    """Run until all is done; a request that comes during a step is added at its end."""
    log = Log()
    for at_ms, one, ends in coming:
        while log.now < at_ms:
            if leaping and leap_towards(scheduler, log, at_ms):
                continue
            if not log.step(scheduler):
                log.now = at_ms
        scheduler.abort([ends])
        scheduler.add(one, log.now)
        log.tables.append(tables(scheduler))
    while (leaping and leap_towards(scheduler, log, float("inf"))) or log.step(scheduler):
        scheduler.check()
    return log


def leap_towards(scheduler: Scheduler, log: Log, until_ms: float) -> bool:
    """Leap as far as allowed, but not over a step that begins at or after `until_ms`."""
    assert isinstance(scheduler, LeapingScheduler)
    most = scheduler.leap_limit()
    if not most:
        return False
    took = duration_ms(scheduler.leap_plan(most))
    steps = 0
    while steps < most and log.now < until_ms:
        steps += 1
        log.now += took
    scheduler.leap(steps, took)
    return steps > 0


@given(
    coming=st.lists(arrivals, min_size=1, max_size=12), num_blocks=st.integers(15, 60), max_num_seqs=st.integers(1, 6)
)
@settings(max_examples=80, deadline=None)
def test_leaps_are_single_steps(coming: list[Arrival], num_blocks: int, max_num_seqs: int) -> None:
    at_ms, requests = 0.0, []
    for stream, arrival in enumerate(coming):
        at_ms += arrival.after_ms
        requests.append((at_ms, request(stream, arrival), arrival.ends))
    sizes = limits(num_blocks, max_num_seqs)
    plain, leaping = Scheduler(sizes), LeapingScheduler(sizes, TOKEN)
    expected = drive(plain, requests, leaping=False)
    found = drive(leaping, requests, leaping=True)
    assert found.outputs == expected.outputs
    assert found.events == expected.events
    assert found.tables == expected.tables
    assert found.now == pytest.approx(expected.now)
    assert {name: getattr(leaping.load(), name) for name in totals} == {
        name: getattr(plain.load(), name) for name in totals
    }


totals = ("steps", "preemptions", "cached_tokens", "prompt_tokens", "generated_tokens", "kv_blocks_free")


def test_long_answers_are_mostly_leapt_over() -> None:
    """The test above would pass if nothing ever leapt."""
    scheduler = LeapingScheduler(limits(200, 4), TOKEN)
    for stream in range(2):
        scheduler.add(request(stream, Arrival(0, 20 + stream, stream, 100)), 0.0)
    log, leaps, steps = Log(), 0, 0
    while True:
        if scheduler.leap_limit() > 1:
            leaps += 1
            assert leap_towards(scheduler, log, float("inf"))
        elif log.step(scheduler):
            steps += 1
        else:
            break
    assert leaps > 5
    assert steps + leaps < 0.4 * scheduler.load().steps


def test_answers_get_the_ids_they_were_foretold() -> None:
    """An answer of 60 tokens on a prompt of 20 fills four blocks; three ids are given, the fourth is worked out."""
    scheduler = LeapingScheduler(limits(50, 4), TOKEN)
    one = request(0, Arrival(0, 20, 0, 60))
    scheduler.add(one, 0.0)
    answer = bytes(range(48))
    scheduler.foretell(0, answer)
    log = Log()
    while leap_towards(scheduler, log, float("inf")) or log.step(scheduler):
        scheduler.check()
    stored = b"".join(event.block_ids for _, event in log.events if isinstance(event, BlocksStored))
    assert stored[: 4 * 16] == one.block_ids + answer
    assert len(stored) == 79 // BLOCK * 16
    assert scheduler._foretold == {}


def test_no_leap_beyond_the_limit_nor_in_mid_step() -> None:
    scheduler = LeapingScheduler(limits(50, 4), TOKEN)
    assert scheduler.leap_limit() == 0
    scheduler.add(request(0, Arrival(0, 9, 0, 20)), 0.0)
    assert scheduler.leap_limit() == 0, "it has to be prefilled"
    Log().step(scheduler)
    assert scheduler.leap_limit() == 6, "of 16 slots 9 are computed, and the step that fills the block is no leap"
    with pytest.raises(InternalError, match="a leap of 7 steps where 6 are possible"):
        scheduler.leap(7, 1.0)
    scheduler.schedule(0.0)
    assert scheduler.leap_limit() == 0


def drive_loads(scheduler: Scheduler, coming: list[tuple[float, EngineRequest, float | None]], leaping: bool) -> Log:
    """Run until all is done. A request with a time loads: so long after its admission it has come from elsewhere with
    its first token, as a rule in the middle of a step."""
    log, due = Log(), list[tuple[float, int]]()
    loads = {one.stream: after for _, one, after in coming}
    coming = list(coming)
    while coming or scheduler.num_open:
        while coming and coming[0][0] <= log.now:
            _, one, after = coming.pop(0)
            scheduler.add(one, log.now, load_s=None if after is None else 1e9)
        until = coming[0][0] if coming else float("inf")
        if leaping and leap_towards(scheduler, log, until):
            continue
        plan = scheduler.schedule(log.now)
        for news in scheduler.exchange.take_news():
            if isinstance(news, LoadStarted):
                due.append((log.now + (loads[news.stream] or 0.0), news.stream))
            elif isinstance(news, LoadEnded):
                due = [one for one in due if one[1] != news.stream]
                scheduler.exchange.stopped(news.stream)
        took = duration_ms(plan) if plan is not None else min([until, *[at for at, _ in due]]) - log.now
        log.now += max(0.0, took)
        for at_ms, stream in sorted(due):
            if at_ms <= log.now:
                due.remove((at_ms, stream))
                scheduler.prefilled(stream, FirstToken(TOKEN, None, 3))
        scheduler.check()
        if plan is None:
            log.take(scheduler, scheduler.take_outputs())
        else:
            samples = sum(piece.samples for piece in plan.slices)
            log.take(scheduler, scheduler.commit(plan, StepResult([TOKEN] * samples, None, took), log.now))
    return log


@given(
    coming=st.lists(
        st.tuples(arrivals, st.one_of(st.none(), st.sampled_from([0.0, 0.4, 7.0, 60.0]))), min_size=1, max_size=12
    ),
    num_blocks=st.integers(15, 60),
    max_num_seqs=st.integers(1, 6),
)
@settings(max_examples=80, deadline=None)
def test_what_comes_from_elsewhere_joins_after_the_step_under_way(
    coming: list[tuple[Arrival, float | None]], num_blocks: int, max_num_seqs: int
) -> None:
    at_ms, requests = 0.0, []
    for stream, (arrival, after_ms) in enumerate(coming):
        at_ms += arrival.after_ms
        requests.append((at_ms, request(stream, arrival), after_ms))
    sizes = limits(num_blocks, max_num_seqs)
    plain, leaping = Scheduler(sizes), LeapingScheduler(sizes, TOKEN)
    expected = drive_loads(plain, requests, leaping=False)
    found = drive_loads(leaping, requests, leaping=True)
    assert found.outputs == expected.outputs
    assert found.events == expected.events
    assert {name: getattr(leaping.load(), name) for name in totals} == {
        name: getattr(plain.load(), name) for name in totals
    }
