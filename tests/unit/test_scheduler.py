"""What the scheduler promises, one promise a test. The random walk over all of it is in test_scheduler_machine.py."""

import pytest
from kv_checking_executor import KvCheckingExecutor, expected_tokens, request

from headwater.errors import (
    ConfigError,
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    HeadwaterError,
    InternalError,
    InvalidRequest,
    Overloaded,
)
from headwater.kv.identity import chain_block_ids, namespace
from headwater.protocol.events import BlocksStored
from headwater.protocol.request import EngineRequest, SequenceOutput, StructuredSpec, TokenLogprobs
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.outside import Export, FirstToken
from headwater.scheduler.plan import StepPlan, StepResult
from headwater.scheduler.scheduler import Scheduler

KEY = namespace("model", "layout")


def limits(**changes: object) -> SchedulerLimits:
    sizes: dict[str, object] = {
        "num_blocks": 40,
        "block_size": 4,
        "max_model_len": 100,
        "vocab_size": 50,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "eos_token_ids": frozenset({2}),
        "namespace": KEY,
    }
    return SchedulerLimits(**(sizes | changes))  # type: ignore[arg-type]


class Run:
    """A scheduler with its executor, stepped by hand."""

    def __init__(self, **changes: object) -> None:
        self.limits = limits(**changes)
        self.scheduler = Scheduler(self.limits)
        self.executor = KvCheckingExecutor(self.limits)
        self.outputs: dict[int, list[SequenceOutput]] = {}

    def add(self, *requests: EngineRequest, now: float = 0.0) -> None:
        for one in requests:
            self.scheduler.add(one, now)

    def step(self, now: float = 0.0) -> StepPlan | None:
        plan = self.scheduler.schedule(now)
        if plan is None:
            outputs = self.scheduler.take_outputs()
        else:
            outputs = self.scheduler.commit(plan, self.executor.execute(plan), now)
        for output in outputs:
            self.outputs.setdefault(output.stream, []).append(output)
        self.scheduler.check()
        return plan

    def finish(self) -> None:
        for _ in range(1000):
            if self.step() is None:
                return
        raise AssertionError("no end in sight")

    def tokens(self, stream: int) -> list[int]:
        return [token for output in self.outputs[stream] for token in output.token_ids]

    def reason(self, stream: int) -> str | None:
        return self.outputs[stream][-1].finish_reason


def prompt_of(plan: StepPlan | None) -> dict[int, int]:
    """Tokens planned per stream."""
    assert plan is not None
    return {piece.sequence.stream: piece.num_tokens for piece in plan.slices}


def drain(run: Run) -> None:
    run.finish()
    assert run.scheduler.num_open == 0
    assert run.scheduler.num_free_blocks == run.limits.num_blocks


def test_runs_a_request_to_its_length() -> None:
    run = Run()
    one = request(1, [1, 2, 3, 4, 5], 3)
    run.add(one)
    drain(run)
    assert (run.tokens(1), run.reason(1)) == expected_tokens(one, run.limits)
    assert [output.num_cached_tokens for output in run.outputs[1]] == [0, None, None]


def test_decodes_go_first_and_prefill_fills_the_rest_in_chunks_of_whole_blocks() -> None:
    run = Run(max_num_seqs=4, max_num_batched_tokens=14)
    run.add(request(1, [1] * 3, 20))
    run.step()
    run.add(request(2, [3] * 30, 5), request(3, [4] * 20, 5))
    plan = run.step()
    assert plan is not None
    assert plan.num_decode == 1
    assert prompt_of(plan) == {1: 1, 2: 12}
    assert prompt_of(run.step()) == {1: 1, 2: 12}
    assert prompt_of(run.step()) == {1: 1, 2: 6, 3: 4}
    drain(run)


def test_a_prefix_in_the_cache_is_not_computed_again_but_its_last_token_is() -> None:
    run = Run()
    prompt = list(range(3, 11))
    run.add(request(1, prompt, 1))
    run.finish()
    before = run.executor.computed_tokens
    run.add(request(2, prompt, 1))
    run.finish()
    assert run.executor.computed_tokens - before == 4
    assert run.outputs[2][0].num_cached_tokens == 4
    load = run.scheduler.load()
    assert (load.cached_tokens, load.prompt_tokens) == (4, 16)


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    run = Run()
    run.add(request(1, [5, 6, 7], 10))
    run.finish()
    turn = [5, 6, 7, *run.tokens(1), 9]
    run.add(request(2, turn, 2))
    run.finish()
    assert run.outputs[2][0].num_cached_tokens == 12


def test_without_prefix_caching_nothing_is_shared_and_nothing_told() -> None:
    run = Run(prefix_caching=False)
    for stream in (1, 2):
        run.add(request(stream, [5] * 12, 6))
        drain(run)
        assert run.outputs[stream][0].num_cached_tokens == 0
    assert run.scheduler.drain_events() == []


def test_block_ids_of_the_frontend_are_used_and_continued() -> None:
    run = Run()
    other = namespace("model", "layout", salt="tenant")
    one = request(1, [5, 6, 7, 8, 9], 8, namespace=other)
    one.block_ids = chain_block_ids(other, one.prompt, 4)
    run.add(one)
    run.finish()
    stored = [event for event in run.scheduler.drain_events() if isinstance(event, BlocksStored)]
    tokens = request(0, [5, 6, 7, 8, 9, *run.tokens(1)]).prompt
    assert b"".join(event.block_ids for event in stored) == chain_block_ids(other, tokens[: 12 * 4], 4)
    assert [event.parent for event in stored] == [None, stored[0].block_ids, stored[1].block_ids]


def test_tenants_do_not_share() -> None:
    run = Run()
    run.add(request(1, [5] * 9, 1, namespace=namespace("model", "layout", salt="a")))
    run.finish()
    run.add(request(2, [5] * 9, 1, namespace=namespace("model", "layout", salt="b")))
    run.finish()
    assert run.outputs[2][0].num_cached_tokens == 0


def test_siblings_compute_their_prefix_once() -> None:
    run = Run(max_num_batched_tokens=64, max_num_seqs=16, num_blocks=400)
    prompt = [5] * 17 + [6]
    run.add(*[request(stream, prompt, 3) for stream in range(8)])
    assert prompt_of(run.step()) == {0: 18}
    assert prompt_of(run.step()) == {0: 1} | dict.fromkeys(range(1, 8), 2)
    drain(run)


def test_a_sibling_waits_only_for_what_it_shares() -> None:
    run = Run(max_num_batched_tokens=24, num_blocks=400)
    run.add(request(1, [5] * 8 + [6] * 80, 1), request(2, [5] * 8 + [7] * 4, 1))
    assert prompt_of(run.step()) == {1: 24}
    assert prompt_of(run.step()) == {1: 20, 2: 4}
    drain(run)


def test_a_sibling_does_not_wait_for_a_leader_that_stands_still() -> None:
    run = Run(max_num_batched_tokens=24, num_blocks=400)
    run.add(request(1, [4] * 40, 1), request(2, [5] * 20 + [6] * 20, 1))
    assert prompt_of(run.step()) == {1: 24}
    assert prompt_of(run.step()) == {1: 16, 2: 8}
    run.add(request(0, [9] * 60, 1, priority=1))
    assert prompt_of(run.step()) == {0: 24}
    run.add(request(3, [5] * 20 + [7], 1))
    assert prompt_of(run.step()) == {0: 12, 3: 12}
    drain(run)


def test_a_sibling_does_not_wait_for_a_leader_that_is_gone() -> None:
    run = Run(max_num_batched_tokens=16)
    run.add(request(1, [5] * 60, 1), request(2, [5] * 60, 1))
    run.step()
    run.scheduler.abort([1])
    assert prompt_of(run.step()) == {2: 16}
    drain(run)


def test_a_sibling_waits_for_the_rest_of_what_another_one_is_loading() -> None:
    run = Run()
    prompt = [5] * 17 + [6]
    run.scheduler.add(request(1, prompt, 3), 0.0, load_s=10.0)
    assert run.step() is None
    run.scheduler.exchange.arrived(1, 2)
    run.scheduler.add(request(2, prompt, 3), 0.0)
    assert run.step(1.0) is None
    run.scheduler.abort([2, 1])
    run.scheduler.exchange.stopped(1)
    drain(run)


def test_nothing_is_said_of_an_exported_sequence_once_it_is_released() -> None:
    run = Run()
    for stream in (1, 2):
        run.scheduler.add(request(stream, [stream] * 9, 5), 0.0, load_s=10.0, export=Export(0, 60.0))
    assert run.step() is None
    for stream in (1, 2):
        run.scheduler.prefilled(stream, FirstToken(7))
    run.scheduler.release(1)
    assert [output.stream for output in run.scheduler.take_outputs()] == [2]
    run.scheduler.release(2)
    drain(run)


def test_strangers_pass_those_who_wait_for_a_prefix() -> None:
    run = Run(max_num_batched_tokens=32)
    run.add(request(1, [5] * 20, 1), request(2, [5] * 20, 1), request(3, [6] * 3, 1))
    assert prompt_of(run.step()) == {1: 20, 3: 3}
    drain(run)


def test_priority_goes_first_then_arrival() -> None:
    run = Run(max_num_seqs=1, max_num_batched_tokens=8)
    run.add(request(1, [1], 1), request(2, [2], 1), request(3, [3], 1, priority=5), request(4, [4], 1, priority=5))
    order = [next(iter(prompt_of(run.step()))) for _ in range(4)]
    assert order == [3, 4, 1, 2]


def test_a_long_prompt_lends_half_of_the_step_to_short_ones() -> None:
    run = Run(max_num_seqs=6, max_num_batched_tokens=32, num_blocks=100)
    run.add(request(1, [3] * 90, 2), request(2, [4] * 50, 2), request(3, [5] * 10, 2), request(4, [6] * 7, 2))
    assert prompt_of(run.step()) == {1: 16, 3: 10, 4: 4}
    assert prompt_of(run.step()) == {3: 1, 1: 28, 4: 3}
    assert prompt_of(run.step()) == {4: 1, 1: 28}
    assert prompt_of(run.step()) == {1: 18, 2: 12}
    drain(run)


def test_a_prompt_of_half_the_length_borrows_over_several_steps_and_lends_on() -> None:
    run = Run(max_num_seqs=6, max_num_batched_tokens=32, num_blocks=100)
    run.add(request(1, [3] * 90, 1), request(2, [4] * 44, 1), request(3, [5] * 8, 1))
    assert prompt_of(run.step()) == {1: 16, 2: 8, 3: 8}
    assert prompt_of(run.step()) == {1: 16, 2: 16}
    drain(run)


def test_a_prompt_that_bounds_its_steps_gets_what_those_before_it_leave_of_the_bound() -> None:
    run = Run(max_num_seqs=6, max_num_batched_tokens=32, num_blocks=100)
    run.add(request(1, [3] * 60, 1, step_tokens=12), request(2, [4] * 24, 1, step_tokens=12))
    assert prompt_of(run.step()) == {1: 8, 2: 4}
    run.add(request(3, [5] * 8, 1, priority=1), request(4, [6] * 30, 1, priority=1))
    assert prompt_of(run.step()) == {3: 8, 4: 24}, "nothing is left of the bound for the others"
    assert prompt_of(run.step()) == {4: 6, 1: 4}
    assert sum(prompt_of(run.step()).values()) == 12
    drain(run)


def test_a_bound_below_a_block_keeps_nobody_from_getting_on() -> None:
    run = Run()
    run.add(request(1, [3] * 20, 1, step_tokens=1))
    assert prompt_of(run.step()) == {1: 4}
    drain(run)


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    run = Run(num_blocks=80, max_num_seqs=4, max_num_batched_tokens=16)
    run.add(request(0, [9] * 8, 30))
    run.step()
    run.add(request(1, [3] * 80, 2))
    steps = 0
    while 1 not in run.outputs:
        steps += 1
        run.add(request(1 + steps, [4 + steps % 5, steps % 7], 4))
        run.step()
    assert steps <= 2 * -(-80 // 12)
    assert len(run.outputs) > 2


def test_who_lacks_blocks_is_not_overtaken() -> None:
    run = Run(num_blocks=30, max_num_seqs=8)
    run.add(request(1, [1] * 60, 20))
    run.step()
    run.add(request(2, [2] * 80, 2), request(3, [3] * 3, 2))
    while run.reason(1) is None if 1 in run.outputs else True:
        assert set(prompt_of(run.step())) == {1}
    assert 2 in prompt_of(run.step())
    drain(run)


def test_when_blocks_run_out_the_most_junior_is_preempted_and_its_output_stays_the_same() -> None:
    run = Run(num_blocks=10, max_num_seqs=4)
    requests = [request(stream, [stream] * 5, 25) for stream in range(1, 4)]
    run.add(*requests)
    drain(run)
    assert run.scheduler.load().preemptions > 0
    for one in requests:
        assert (run.tokens(one.stream), run.reason(one.stream)) == expected_tokens(one, run.limits)
    assert [run.outputs[stream][-1].finish_reason for stream in (1, 2, 3)] == ["length"] * 3


def test_a_junior_that_prefills_gives_way_to_a_senior_that_decodes() -> None:
    run = Run(num_blocks=20, max_num_seqs=2, max_num_batched_tokens=6)
    senior = run.scheduler.add(request(1, [1] * 4, 30), 0.0)
    run.step()
    junior = run.scheduler.add(request(2, [2] * 64, 1), 0.0)
    while not junior.num_preemptions:
        assert run.step() is not None
    assert (senior.num_preemptions, run.reason(1)) == (0, None)
    drain(run)


def test_the_most_senior_is_never_preempted() -> None:
    run = Run(num_blocks=10, max_num_seqs=4)
    entries = [run.scheduler.add(request(stream, [stream] * 5, 25, priority=stream), 0.0) for stream in (1, 2, 3)]
    drain(run)
    assert entries[2].num_preemptions == 0
    assert entries[0].num_preemptions > 0


def test_admission_keeps_a_reserve_for_those_that_run() -> None:
    run = Run(num_blocks=8, max_num_seqs=4)
    run.add(request(1, [1] * 15, 8), request(2, [2] * 15, 8))
    assert prompt_of(run.step()) == {1: 15}
    while 1 not in run.outputs or run.reason(1) is None:
        run.step()
    drain(run)
    assert run.scheduler.load().preemptions == 0


def test_a_sequence_alone_may_use_the_whole_pool() -> None:
    run = Run(num_blocks=5)
    run.add(request(1, [1] * 19, 50))
    drain(run)
    assert len(run.tokens(1)) == 1
    assert run.reason(1) == "length"


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding", "in flight"])
def test_abort_frees_the_blocks_at_once(stage: str) -> None:
    run = Run(max_num_batched_tokens=12, max_num_seqs=2)
    if stage == "waiting":
        run.add(request(8, [8] * 5, 40), request(9, [9] * 5, 40))
        run.step()
        run.step()
    free = run.scheduler.num_free_blocks
    run.add(request(1, [1] * 30, 40))
    run.step()
    if stage == "decoding":
        for _ in range(5):
            run.step()
        assert run.tokens(1)
    if stage == "in flight":
        plan = run.scheduler.schedule(0.0)
        assert plan is not None
        result = run.executor.execute(plan)
        run.scheduler.abort([1])
        assert run.scheduler.num_free_blocks == free
        run.add(request(1, [3] * 30, 1))
        assert run.scheduler.commit(plan, result, 0.0) == []
    if stage == "waiting":
        assert run.scheduler.load().num_waiting == 1
        free = run.scheduler.num_free_blocks
    run.scheduler.abort([1, 77])
    assert run.scheduler.num_free_blocks == free
    assert 1 in [sequence.stream for sequence in run.scheduler.take_ended()]
    run.scheduler.check()
    run.scheduler.abort([8, 9])
    assert run.step() is None
    assert run.scheduler.num_free_blocks == run.limits.num_blocks


def test_deadlines_end_waiting_and_running_sequences() -> None:
    run = Run(max_num_seqs=1, max_num_batched_tokens=8)
    run.add(request(1, [1], 50, deadline=10.0), request(2, [2], 50, deadline=5.0), request(3, [3], 1))
    run.step(now=1.0)
    run.step(now=6.0)
    assert run.reason(1) is None
    error = run.outputs[2][0].error
    assert error is not None
    assert (run.reason(2), error.code, error.http_status) == ("error", "deadline_exceeded", 504)
    run.step(now=10.0)
    assert run.reason(1) == "error"
    drain(run)


def test_a_request_past_its_deadline_is_not_taken() -> None:
    run = Run()
    with pytest.raises(DeadlineExceeded, match=r"passed 2\.500 s ago"):
        run.add(request(1, [1], deadline=7.5), now=10.0)


def test_waiting_is_bounded() -> None:
    run = Run(max_waiting=2, max_num_seqs=1, max_num_batched_tokens=8)
    run.add(request(1, [1], 5))
    run.step()
    run.add(request(2, [2]), request(3, [3]))
    with pytest.raises(Overloaded, match="2 sequences wait"):
        run.add(request(4, [4]))
    drain(run)
    assert set(run.outputs) == {1, 2, 3}


@pytest.mark.parametrize(
    ("one", "error", "words"),
    [
        (request(1, [1] * 100), ContextTooLong, "100 tokens, the model's context is 100: at most 99"),
        (request(1, [1] * 96, max_tokens=1), ContextTooLong, r"the worker holds 96 \(24 blocks of 4\): at most 95"),
        (request(1, []), InvalidRequest, "no tokens"),
        (request(1, [50]), InvalidRequest, "the token id 50, expected one from 0 to 49"),
        (request(1, [1], resumed=[77]), InvalidRequest, "token id 77"),
        (request(1, [1], 0), InvalidRequest, "max_tokens is 0"),
        (request(1, [1], 3, min_tokens=4), InvalidRequest, "min_tokens is 4"),
        (request(1, [1], namespace=b"x" * 65), InvalidRequest, "65 bytes, at most 64"),
        (request(1, [1] * 9, block_ids=b"x" * 16), InvalidRequest, "block_ids has 16 bytes for 9 prompt tokens"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_sum(
    one: EngineRequest, error: type[HeadwaterError], words: str
) -> None:
    run = Run(num_blocks=24)
    with pytest.raises(error, match=words):
        run.add(one)
    assert run.scheduler.num_open == 0


def test_bytes_that_are_no_token_ids_are_refused() -> None:
    one = request(1, [1])
    one.prompt += b"x"
    with pytest.raises(InvalidRequest, match="5 bytes"):
        Run().add(one)


def test_limits_that_leave_no_room_to_prefill_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 12"):
        limits(max_num_batched_tokens=11)
    with pytest.raises(ConfigError, match="positive"):
        limits(num_blocks=0)


def stop_case(**sampling: object) -> tuple[Run, EngineRequest, int]:
    """A run whose third drawn token is known beforehand."""
    run = Run()
    tokens, _ = expected_tokens(request(1, [1, 2, 3], 20), run.limits)
    first_seen_third = next(index for index, token in enumerate(tokens) if index > 1 and token not in tokens[:index])
    return run, request(1, [1, 2, 3], 20, **sampling), tokens[first_seen_third]


def test_a_stop_token_ends_the_sequence_and_is_told_apart() -> None:
    run, one, token = stop_case()
    one.sampling = request(1, [1], 20, stop_token_ids=[token]).sampling
    run.add(one)
    drain(run)
    assert token not in run.tokens(1)
    last = run.outputs[1][-1]
    assert (last.token_ids, last.finish_reason, last.stop_token_id) == ([], "stop", token)


def test_end_tokens_of_the_model_stop_unless_ignored() -> None:
    _, _, token = stop_case()
    for ignore, reason in ((False, "stop"), (True, "length")):
        run = Run(eos_token_ids=frozenset({token}))
        run.add(request(1, [1, 2, 3], 20, ignore_eos=ignore))
        drain(run)
        assert run.reason(1) == reason


def test_no_stop_before_min_tokens() -> None:
    run, _, token = stop_case()
    one = request(1, [1, 2, 3], 20, stop_token_ids=[token], min_tokens=12)
    run.add(one)
    drain(run)
    assert len(run.tokens(1)) >= 12
    assert token in run.tokens(1)[:12]
    assert (run.tokens(1), run.reason(1)) == expected_tokens(one, run.limits)


def test_resumed_tokens_count_as_output() -> None:
    run = Run()
    whole, _ = expected_tokens(request(1, [1, 2, 3], 10), run.limits)
    run.add(request(1, [1, 2, 3], 10, resumed=whole[:4]))
    drain(run)
    assert run.tokens(1) == whole[4:]


def test_a_resumed_sequence_that_is_complete_ends_at_once() -> None:
    run = Run()
    run.add(request(1, [1, 2, 3], 3, resumed=[4, 5, 6]))
    assert run.step() is None
    assert run.outputs[1] == [SequenceOutput(1, [], "length", num_cached_tokens=0)]
    assert [sequence.stream for sequence in run.scheduler.take_ended()] == [1]


def test_max_model_len_ends_a_sequence() -> None:
    run = Run(max_model_len=12)
    run.add(request(1, [1] * 9, 50))
    drain(run)
    assert len(run.tokens(1)) == 3
    assert run.reason(1) == "length"


def test_a_sequence_that_the_executor_gives_up_ends_with_an_error() -> None:
    run = Run()
    run.add(request(1, [1]), request(2, [2]))
    plan = run.scheduler.schedule(0.0)
    assert plan is not None
    result = run.executor.execute(plan)
    result.failures[1] = "the grammar has no way on"
    outputs = run.scheduler.commit(plan, result, 0.0)
    assert [(o.stream, o.finish_reason, len(o.token_ids)) for o in outputs] == [(1, "error", 0), (2, None, 1)]
    assert outputs[0].error is not None
    assert outputs[0].error.message == "the grammar has no way on"
    drain(run)


def test_logprobs_travel_with_their_tokens() -> None:
    run = Run()
    run.add(request(1, [1] * 40), request(2, [2]))
    run.step()
    plan = run.scheduler.schedule(0.0)
    assert plan is not None
    result = run.executor.execute(plan)
    marks = [TokenLogprobs(-float(token), 1) for token in result.token_ids]
    result.logprobs = [marks[0], None, *marks[2:]][: len(marks)]
    outputs = run.scheduler.commit(plan, result, 0.0)
    assert [output.logprobs for output in outputs] == [[marks[0]], None]


def test_an_executor_that_draws_too_few_tokens_is_broken() -> None:
    run = Run()
    run.add(request(1, [1]))
    plan = run.scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(EngineFailed, match="drew 0 tokens where 1 were planned"):
        run.scheduler.commit(plan, StepResult([], None, 1.0), 0.0)


def test_plans_and_commits_alternate() -> None:
    run = Run()
    run.add(request(1, [1]))
    plan = run.step()
    assert plan is not None
    with pytest.raises(InternalError, match="not the last one made"):
        run.scheduler.commit(plan, StepResult([1], None, 1.0), 0.0)
    run.scheduler.schedule(0.0)
    with pytest.raises(InternalError, match="not committed"):
        run.scheduler.schedule(0.0)


def test_a_stream_is_open_once() -> None:
    run = Run()
    run.add(request(1, [1]))
    with pytest.raises(InternalError, match="stream 1 is open already"):
        run.add(request(1, [2]))


def test_load_counts_what_is_left_to_do() -> None:
    run = Run(max_num_batched_tokens=16, max_num_seqs=2)
    run.add(request(1, [1] * 30, 3), request(2, [2] * 16, 3), request(3, [3] * 16, 3))
    assert run.scheduler.load().waiting_prefill_tokens == 62
    run.step()
    load = run.scheduler.load()
    assert (load.num_running, load.num_waiting, load.waiting_prefill_tokens) == (1, 2, 46)
    assert (load.kv_blocks_total, load.kv_blocks_free, load.steps) == (40, 32, 1)
    run.step()
    (first, second) = run.scheduler.report().timings
    assert (first.num_prefill_tokens, first.num_prefill_context_tokens, first.num_decode_sequences) == (16, 136, 0)
    assert second.num_prefill_tokens == 14
    assert run.scheduler.load().timings == []
    drain(run)
    assert run.scheduler.load().generated_tokens == 9


def test_structured_requests_are_the_executors_business() -> None:
    run = Run()
    run.add(request(1, [1], structured=StructuredSpec("json_object")))
    assert run.step() is not None
