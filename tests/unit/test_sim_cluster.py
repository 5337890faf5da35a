"""The simulated cluster: figures worked out by hand, and runs that repeat to the bit."""

from dataclasses import replace

import pytest

from headwater.bench.traces import TraceRow
from headwater.errors import ConfigError
from headwater.perf.prior import LinearSteps
from headwater.router.policies import BUILTIN, Delay, RoundRobin
from headwater.router.policy import Policy
from headwater.router.queue import QueueLimits
from headwater.scheduler.plan import StepPlan
from headwater.sim.cluster import PATIENT_QUEUE, SimCluster, SimConfig
from headwater.sim.conditions import Conditions
from headwater.sim.history import LoadHistory
from headwater.sim.mixes import Mix
from headwater.sim.records import SimResult
from headwater.sim.report import curves, mode_of, shared_lru_hit_rate, summarise
from headwater.sim.run import Routing
from headwater.sim.timing import Belief, DynamoPolynomial, PredictedTimes, Slowed, StepTimes
from headwater.sim.workload import SimRequest, from_trace

MIX = Mix("small", 60, 4.0, 3, 700, 3, 100, 30, 2.0, document_tokens=300)


class Plain:
    """1 ms per prefill token, 10 ms for a step that decodes."""

    def duration_ms(self, plan: StepPlan, used_share: float) -> float:
        return float(plan.num_prefill_tokens) + (10.0 if plan.num_decode else 0.0)


def trace(*rows: tuple[float, int, int, tuple[int, ...]]) -> list[SimRequest]:
    """Rows of (second, prompt tokens, output tokens, hash ids)."""
    return list(from_trace([TraceRow(*row) for row in rows], 64))


def serve(
    requests: list[SimRequest],
    *,
    policy: Policy | None = None,
    times: StepTimes | None = None,
    workers: int = 1,
    **sizes: object,
) -> SimResult:
    config = SimConfig(num_workers=workers, **sizes)  # type: ignore[arg-type]
    return SimCluster(config, [times or Plain()] * workers, policy or RoundRobin()).run(requests)


def test_one_request_alone_takes_its_prefill_and_its_steps() -> None:
    result = serve(trace((2.0, 1000, 5, (1, 2))))
    (record,) = result.records
    assert record.arrived_s == 2.0
    assert record.first_token_s == pytest.approx(3.0)
    assert record.finished_s == pytest.approx(3.04)
    assert (record.cached_tokens, record.predicted_cached_tokens) == (0, 0)
    assert result.duration_s == pytest.approx(3.04)
    assert result.busy_ms == [pytest.approx(1040.0)]
    assert result.prefill_tokens == [1000]
    assert result.num_steps == 5


def test_a_second_request_finds_the_common_prefix() -> None:
    result = serve(trace((0.0, 1000, 1, (1, 2)), (5.0, 1000, 1, (1, 3)), (10.0, 1024, 1, (1, 2))))
    first, second, third = result.records
    assert first.first_token_s == pytest.approx(1.0)
    assert second.cached_tokens == 512
    assert second.first_token_s == pytest.approx(5.488)
    assert third.cached_tokens == 960, "15 full blocks of the first prompt"
    assert third.first_token_s == pytest.approx(10.064)
    report = summarise(result, trace="t", policy="p", mode="x1", ceiling=0.5)
    assert report.hit_rate == pytest.approx((512 + 960) / 3024)
    assert report.ttft_ms_mean == pytest.approx((1000 + 488 + 64) / 3)
    assert report.ttft_ms_p50 == pytest.approx(488.0)
    assert report.output_tok_s == pytest.approx(3 / 10.064)
    assert report.utilisation == pytest.approx(1.552 / 10.064)


def test_a_next_turn_finds_the_answer_of_the_one_before() -> None:
    first = SimRequest(0.0, 100, 93, bytes(16), answer_ids=bytes([1]) * 16 + bytes([2]) * 16)
    again = SimRequest(9.0, 300, 1, first.block_ids + first.answer_ids + bytes([3]) * 16)
    assert [record.cached_tokens for record in serve([first, again]).records] == [0, 192]
    forgotten = replace(first, answer_ids=b"")
    assert [record.cached_tokens for record in serve([forgotten, again]).records] == [0, 64]


def test_an_arrival_during_a_leap_is_taken_in_after_the_step_under_way() -> None:
    """The first decodes alone in steps of 10 ms from 100 ms on; the second comes in mid-step."""
    result = serve(trace((0.0, 100, 51, ()), (0.234, 50, 2, ())))
    first, second = result.records
    assert second.first_token_s == pytest.approx(0.240 + 0.060), "50 tokens beside one decode"
    assert first.finished_s == pytest.approx(0.100 + 50 * 0.010 + 0.050)
    assert result.num_steps == 1 + 50


def test_inter_token_latency_counts_gaps_and_time_per_output_token_requests() -> None:
    result = serve(trace((0.0, 100, 3, ()), (10.0, 100, 1, ()), (20.0, 100, 11, ())), times=Slowed(Plain(), 2.0))
    report = summarise(result, trace="t", policy="p", mode="x1", ceiling=0.0)
    assert report.itl_ms_mean == pytest.approx(20.0)
    assert report.tpot_ms_mean == pytest.approx(20.0)
    result.records[0].finished_s += 0.012
    report = summarise(result, trace="t", policy="p", mode="x1", ceiling=0.0)
    assert report.itl_ms_mean == pytest.approx(20 + 12 / 12)
    assert report.tpot_ms_mean == pytest.approx((26 + 20) / 2)


def test_the_steady_rate_leaves_out_filling_and_emptying() -> None:
    """Ten requests of 11 tokens, a second apart; the last takes a long prefill after all others."""
    rows = [(float(number), 100, 11, ()) for number in range(9)] + [(10.0, 90_000, 11, ())]
    report = summarise(serve(trace(*rows)), trace="t", policy="p", mode="x1", ceiling=0.0)
    assert report.steady_tok_s == pytest.approx(8 * 11 / 9.0)
    assert report.output_tok_s < 2.0


def test_round_robin_over_two_workers_and_imbalance() -> None:
    result = serve(trace((0.0, 300, 1, ()), (0.0, 100, 1, ()), (0.0, 300, 1, ())), workers=2)
    assert [record.worker for record in result.records] == [0, 1, 0]
    assert result.prefill_tokens == [600, 100]
    report = summarise(result, trace="t", policy="p", mode="x1", ceiling=0.0)
    assert report.imbalance == pytest.approx(600 / 350)
    assert report.prefill_imbalance == pytest.approx(600 / 350)


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    requests = trace(*[(1000.0, 100, 1, ())] * 6)
    result = serve(requests, workers=1, in_flight_per_worker=2, max_num_batched_tokens=600)
    arrived = [record.arrived_s for record in result.records]
    assert arrived[:2] == [0.0, 0.0]
    assert sorted(arrived) == arrived
    ends = sorted(record.finished_s for record in result.records)
    assert all(sum(a <= at < b for a, b in zip(arrived, ends, strict=True)) <= 2 for at in arrived)
    assert arrived[2] == ends[0]


def test_speed_brings_arrivals_together() -> None:
    requests = trace((0.0, 10, 1, ()), (60.0, 10, 1, ()))
    assert serve(requests, arrival_speed=4.0).records[1].arrived_s == 15.0


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("closed", [None, 6])
def test_equal_runs_give_equal_results(name: str, closed: int | None) -> None:
    requests = MIX.requests(64)
    first, second = (
        serve(
            requests,
            policy=BUILTIN[name](),
            times=DynamoPolynomial(),
            workers=3,
            num_blocks=300,
            in_flight_per_worker=closed,
            conditions=Conditions(event_delay_s=0.02),
        )
        for _ in range(2)
    )
    assert first == second
    assert len(first.records) == len(requests)
    assert all(record.finished_s >= record.first_token_s > record.arrived_s for record in first.records)
    assert sum(record.prompt_tokens - record.cached_tokens for record in first.records) <= sum(first.prefill_tokens)


def test_hit_rates_are_bounded_by_one_shared_cache_when_nothing_is_evicted() -> None:
    requests = MIX.requests(64)
    ceiling = shared_lru_hit_rate(requests, 1 << 30, 64)
    one = serve(requests, times=DynamoPolynomial(), num_blocks=100_000)
    report = summarise(one, trace="t", policy="p", mode="x1", ceiling=ceiling)
    assert report.hit_rate == pytest.approx(ceiling, abs=0.01), "one worker is one cache, but for blocks being computed"
    assert report.hit_rate <= ceiling
    assert report.predicted_hit_rate == 0.0, "round robin does not look"


def test_the_ceiling_falls_with_the_size_of_the_cache() -> None:
    requests = trace((0, 640, 1, (1, 2)), (1, 640, 1, (3, 4)), (2, 640, 1, (1, 2)))
    assert shared_lru_hit_rate(requests, 20, 64) == pytest.approx(639 / 1920)
    assert shared_lru_hit_rate(requests, 14, 64) == pytest.approx(4 * 64 / 1920), "the tail was evicted first"
    assert shared_lru_hit_rate(requests, 10, 64) == 0.0


def test_progress_is_told_and_requests_are_taken_one_at_a_time() -> None:
    taken = 0

    def coming():
        nonlocal taken
        for number in range(600):
            taken += 1
            yield SimRequest(float(number), 10, 1, b"")

    told: list[tuple[int, int]] = []
    cluster = SimCluster(SimConfig(1), [Plain()], RoundRobin())
    cluster.run(coming(), lambda ended: told.append((ended, taken)))
    assert told == [(256, 257), (512, 513)]


def test_load_history_is_bounded_and_covers_the_whole_run() -> None:
    history = LoadHistory()
    for number in range(100_000):
        if number / 10 >= history.due_s:
            history.note(number / 10, [number])
    assert 256 <= len(history.times_s) <= 512
    assert history.times_s[0] == 0.0
    assert history.times_s[-1] > 9_900
    assert [load for [load] in history.loads] == [round(at * 10) for at in history.times_s]


def test_curves_are_quantiles() -> None:
    result = serve(trace(*[(10.0 * number, 100 * (number + 1), 2, ()) for number in range(5)]))
    curve = curves(result)
    assert len(curve.ttft_ms) == len(curve.itl_ms) == 101
    assert curve.ttft_ms[0] == pytest.approx(100)
    assert curve.ttft_ms[50] == pytest.approx(300)
    assert curve.ttft_ms[100] == pytest.approx(500)
    assert len(curve.times_s) == len(curve.loads)


def test_the_name_of_a_mode() -> None:
    config = SimConfig(4, arrival_speed=2.0)
    assert mode_of(config) == "x2"
    assert mode_of(replace(config, in_flight_per_worker=16)) == "closed16"


def test_fitted_times_are_the_seven_terms() -> None:
    times = PredictedTimes(LinearSteps((1.0, 2.0, 0.1, 1e-3, 4.0, 0.5, 0.01)))
    assert times.duration_ms(StepPlan((), 0, 10, 100, 0), 0.0) == pytest.approx(1 + 2 + 1 + 0.1)
    assert times.duration_ms(StepPlan((), 3, 0, 0, 200), 0.0) == pytest.approx(1 + 4 + 1.5 + 2)


@pytest.mark.parametrize(("prefill_error", "decode_error"), [(0.0, 0.0), (0.3, -0.3)])
def test_a_belief_is_the_truth_but_for_its_errors(prefill_error: float, decode_error: float) -> None:
    times = DynamoPolynomial()
    model = Belief(prefill_error, decode_error).model(times, 1_000_000, 8192)
    for tokens in (512, 2048, 8192):
        expected = times.duration_ms(StepPlan((), 0, tokens), 0.0) * (1 + prefill_error)
        assert model.prefill_ms(tokens) == pytest.approx(expected, rel=0.1)
    for share in (0.05, 0.3, 0.6):
        expected = times.duration_ms(StepPlan((), 16), share) * (1 + decode_error)
        assert model.decode_step_ms(16, share * 1_000_000) == pytest.approx(expected, rel=0.25)


def test_the_production_queue_holds_requests_back_and_loses_none() -> None:
    """Three long prompts keep one worker busy; with a queue of one chunk only one of them is sent to it at a time."""
    requests = trace(*[(0.0, 5000, 3, ()) for _ in range(3)])
    limits = replace(PATIENT_QUEUE, backlog_chunks=0.1)
    queued = serve(requests, policy=Delay(), queue=limits)
    direct = serve(requests, policy=Delay())
    assert len(queued.records) == 3
    assert queued.num_refused == 0
    assert queued.records[1].first_token_s == pytest.approx(10.01, abs=0.03)
    assert queued.duration_s == pytest.approx(direct.duration_s, rel=0.01)


def test_what_the_queue_refuses_counts_in_no_other_figure() -> None:
    requests = trace(*[(0.1 * number, 5000, 3, ()) for number in range(6)])
    limits = QueueLimits(backlog_chunks=0.1, max_waiting=2)
    result = serve(requests, policy=Delay(), queue=limits)
    assert result.num_refused == 3
    assert len(result.records) == 3
    report = summarise(result, trace="t", policy="p", mode="x1", ceiling=0.0)
    assert (report.requests, report.refused) == (3, 3)
    assert report.output_tok_s == pytest.approx(9 / result.duration_s)


def test_a_closed_loop_goes_on_after_a_refusal() -> None:
    requests = trace(*[(0.0, 5000, 3, ()) for _ in range(8)])
    result = serve(
        requests, policy=Delay(), queue=QueueLimits(backlog_chunks=0.1, max_waiting=1), in_flight_per_worker=4
    )
    assert result.num_refused + len(result.records) == 8
    assert result.num_refused > 0


def test_nothing_served_is_an_error_with_a_reason() -> None:
    with pytest.raises(ConfigError, match=r"t, p: no request was served \(0 were refused\)"):
        summarise(serve([]), trace="t", policy="p", mode="x1", ceiling=0.0)


def test_late_joiners_do_not_lengthen_a_run() -> None:
    conditions = Conditions(late_workers=1, join_at_s=1000.0)
    result = serve(trace((0.0, 100, 1, ())), workers=2, conditions=conditions)
    assert result.duration_s == pytest.approx(0.1)
    assert result.prefill_tokens == [100, 0]


@pytest.mark.parametrize("written", ["delay", "delay@0.3", "delay@0", "delay@1", "delay+queue", "delay@0.3+queue"])
def test_routings_are_written_as_they_are_read(written: str) -> None:
    routing = Routing.parse(written)
    assert str(routing) == written
    assert routing.policy == "delay"
    assert routing.queued == written.endswith("+queue")
    assert routing.settings.decode_share == (routing.decode_share if "@" in written else 1.0)


@pytest.mark.parametrize("written", ["", "delay@", "delay@2", "delay+", "delay+queue+queue", "a b"])
def test_other_routings_are_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="no policy is written"):
        Routing.parse(written)
