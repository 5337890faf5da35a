"""The planner: what it decides for which traffic, when it stays, how it corrects itself. On simulated clusters."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from headwater.perf.curve import StepCurve
from headwater.planner.decide import Planner, PlannerSettings, gains
from headwater.planner.evaluate import Sample, evaluate
from headwater.planner.feedback import Correction, Held, corrected
from headwater.planner.objective import Objective, Score, score
from headwater.planner.plan import RolePlan, aggregated
from headwater.planner.pool import WorkerModel
from headwater.planner.traffic import Draws, Served, Traffic, resample, same
from headwater.planner.whatif import FastCluster, Job
from headwater.sim.adaptive import AdaptiveCluster

CURVE = StepCurve(((0.0, 10.0), (256.0, 10.0), (8192.0, 400.0)), 2.0, 0.005, 1e-6, 2.0, 0.02, 1e-5)
"""About a 70B model on two GPUs."""
POOL = [WorkerModel(CURVE, 500_000, 2048, 256, 300e6, 160e3, "w")] * 4
TIGHT_TPOT = Objective(ttft_ms=3000.0, tpot_ms=20.0)
SETTINGS = PlannerSettings(objective=TIGHT_TPOT, max_jobs=400, min_horizon_ms=40_000.0)


def arrivals(prompt: int, output: int, rate: float, seconds: float, start_s: float = 0.0) -> list[Job]:
    random = Random(f"{prompt}/{output}/{rate}/{start_s}")
    at_ms, jobs = start_s * 1000, []
    while True:
        at_ms += random.expovariate(rate) * 1000
        if at_ms > (start_s + seconds) * 1000:
            return jobs
        jobs.append(Job(at_ms, int(prompt * random.uniform(0.75, 1.25)), int(output * random.uniform(0.5, 1.5)) + 1))


def attained(cluster: FastCluster, jobs: Sequence[Job], since_s: float) -> float:
    outcomes = cluster.outcomes
    numbers = [number for number, job in enumerate(jobs) if job.at_ms >= since_s * 1000]
    met = [number for number in numbers if TIGHT_TPOT.met(outcomes.ttft_ms[number], outcomes.tpot_ms[number])]
    return len(met) / len(numbers)


def test_long_prompts_and_a_tight_pace_are_split() -> None:
    jobs = arrivals(3000, 150, 9.0, 60)
    run = AdaptiveCluster(POOL, SETTINGS)
    cluster = run.run(jobs)
    assert run.planner.plan.roles.count("prefill") in (2, 3)
    assert attained(cluster, jobs, 30) > 0.95
    fixed = FastCluster(POOL, aggregated(4), 150)
    fixed.run(jobs, jobs[-1].at_ms * 2)
    assert attained(fixed, jobs, 30) < 0.9


def test_chat_at_a_light_load_stays_as_it_is() -> None:
    run = AdaptiveCluster(POOL, SETTINGS)
    run.run(arrivals(300, 300, 2.0, 60))
    assert run.planner.plan == aggregated(4)
    assert run.num_changes == 0


def test_too_little_traffic_says_nothing() -> None:
    planner = Planner(4, SETTINGS)
    for number in range(5):
        planner.traffic.arrived(number * 100.0, 8000)
    decision = planner.decide(5000.0, POOL)
    assert not decision.changed
    assert "too few" in decision.reason
    assert planner.plan == aggregated(4)


def test_roles_follow_a_flip_of_the_mix() -> None:
    prefill_heavy = arrivals(6000, 60, 5.0, 60)
    decode_heavy = arrivals(300, 600, 32.0, 40, start_s=60)
    run = AdaptiveCluster(POOL, SETTINGS)
    run.run([*prefill_heavy, *decode_heavy])
    before = [decision.plan for now, decision in run.decisions if now < 60_000][-1]
    assert before.roles.count("prefill") > 1
    assert run.planner.plan.roles.count("prefill") < before.roles.count("prefill")


@pytest.mark.parametrize("error", [0.7, 1.3])
def test_a_wrong_decode_time_corrects_itself(error: float) -> None:
    believed = [replace(POOL[0], curve=CURVE.scaled(decode=error))] * 4
    run = AdaptiveCluster(POOL, SETTINGS, believed)
    run.run(arrivals(2000, 200, 7.0, 90))
    assert run.planner.correction.decode == pytest.approx(1 / error, rel=0.15)


def test_what_lived_through_a_change_of_roles_corrects_nothing() -> None:
    """However slow it was, when all that one plan has served took what was believed."""
    jobs = arrivals(500, 100, 6.0, 60)
    outcomes = FastCluster(POOL, aggregated(4), 100).run(jobs)
    measured = zip(jobs, outcomes.ttft_ms, outcomes.tpot_ms, strict=True)
    seen = [Served(job.at_ms, job.prompt_tokens, 0, job.output_tokens, 0, False, *times) for job, *times in measured]
    changed_ms = 50_000.0
    crossing = [one for one in seen if one.at_ms < changed_ms < one.at_ms + one.ttft_ms + 99 * one.tpot_ms]
    assert crossing
    held = [Held(0.0, aggregated(4)), Held(changed_ms, aggregated(4))]
    for slower, moves in ((crossing, False), (seen, True)):
        for one in slower:
            one.tpot_ms *= 20 if slower is crossing else 1.3
        correction = corrected(Correction(), POOL, held, seen, jobs, 100)
        assert (correction.decode > 1.03) == moves


def test_times_that_nothing_explains_are_not_believed() -> None:
    planner = Planner(4, SETTINGS)
    planner.correction = Correction(4.0, 4.0)
    for number in range(100):
        served = planner.traffic.arrived(number * 100.0, 500)
        served.ttft_ms, served.tpot_ms = 100.0, 900.0
        planner.traffic.ended(served, 50)
    decision = planner.decide(10_000.0, POOL)
    assert not decision.changed
    assert "nothing is believed" in decision.reason


def test_without_objectives_the_shortest_time_wins() -> None:
    run = AdaptiveCluster(POOL, replace(SETTINGS, objective=Objective()))
    run.run(arrivals(3000, 150, 9.0, 40))
    scores = run.decisions[-1][1].scores
    assert scores[run.planner.plan].e2e_ms <= 1.1 * min(one.e2e_ms for one in scores.values())


def test_a_plan_is_left_only_for_a_promise_of_more_than_two_percent() -> None:
    for rate in (6.0, 9.0, 11.0):
        run = AdaptiveCluster(POOL, SETTINGS)
        run.run(arrivals(2000, 200, rate, 30))
        for _, decision in run.decisions:
            if decision.changed and decision.plan.loose:
                strict = decision.scores[RolePlan(decision.plan.roles)]
                assert decision.scores[decision.plan].secured > strict.secured + SETTINGS.loose_gain


def test_a_gain_is_one_in_the_mean_and_no_loss_in_any_sample() -> None:
    def scores(*secured: float, attained: float = 0.9) -> list[Score]:
        return [Score(attained, share, 1000.0, 100.0, 10.0) for share in secured]

    overloaded_in_one = scores(0.6, 0.0)
    assert gains(SETTINGS, overloaded_in_one, scores(0.9, 0.0))
    assert gains(SETTINGS, scores(0.6, 0.99), scores(0.9, 0.98))
    assert not gains(SETTINGS, scores(0.6, 0.9), scores(0.9, 0.8))
    assert not gains(SETTINGS, scores(0.6, 0.6), scores(0.62, 0.62))
    assert not gains(SETTINGS, scores(0.6, 0.6), scores(0.7, 0.7, attained=0.85))


def test_workers_with_a_role_of_their_own_keep_it() -> None:
    planner = Planner(4, SETTINGS, ("prefill", None, None, None))
    for job in arrivals(3000, 150, 9.0, 20):
        served = planner.traffic.arrived(job.at_ms, job.prompt_tokens)
        served.ttft_ms, served.tpot_ms = 500.0, 15.0
        planner.traffic.ended(served, job.output_tokens)
    planner.decide(20_000.0, POOL)
    assert planner.plan.roles[0] == "prefill"


def test_a_pause_does_not_dilute_the_rate() -> None:
    planner = Planner(4, SETTINGS)
    for job in [*arrivals(3000, 150, 9.0, 10), *arrivals(3000, 150, 9.0, 6, start_s=100)]:
        served = planner.traffic.arrived(job.at_ms, job.prompt_tokens)
        served.ttft_ms, served.tpot_ms = 500.0, 15.0
        planner.traffic.ended(served, job.output_tokens)
    decision = planner.decide(106_000.0, POOL)
    assert decision.summary is not None
    assert decision.summary.requests_per_s == pytest.approx(9.0, rel=0.4)


# -- parts


def test_unfinished_answers_are_guessed_from_prompts_alike() -> None:
    traffic = Traffic()
    for number in range(20):
        traffic.ended(traffic.arrived(number, 100), 1000)
        traffic.ended(traffic.arrived(number, 9000), 10)
    waiting = [traffic.arrived(30.0, 110), traffic.arrived(31.0, 8800)]
    assert [job.output_tokens for job in traffic.jobs(waiting, 1)] == [1000, 10]
    waiting[1].generated = 500
    assert traffic.jobs(waiting, 1)[1].output_tokens > 500


def test_traffic_that_is_told_again_counts_once() -> None:
    traffic = Traffic()
    ended = [Served(float(number), 100, output_tokens=10, open=False) for number in range(3)]
    traffic.refill(ended)
    traffic.refill([*ended, Served(3.0, 100, output_tokens=90, open=False)])
    assert traffic.expected_output() == 30.0
    assert len(traffic) == 4


def test_what_has_begun_to_answer_is_open_with_the_rest_of_it() -> None:
    traffic = Traffic()
    for number in range(20):
        traffic.ended(traffic.arrived(number, 100), 50)
    answering, waiting = traffic.arrived(30.0, 100, 20), traffic.arrived(31.0, 100, 30)
    answering.generated = 40
    assert traffic.backlog(0) == [Job(0.0, 140, 10, 139), Job(0.0, 100, 50, 30)]
    traffic.ended(waiting, 50)
    assert len(traffic.backlog(0)) == 1


def test_what_was_open_before_a_sample_is_not_judged() -> None:
    """Of a sample of two the second is judged: it arrives after the long one has ended."""
    sample = Sample([Job(0.0, 10, 2), Job(60_000.0, 10, 2)], 2.0, backlog=[Job(0.0, 8000, 900)] * 3)
    times = evaluate(POOL[:1], aggregated(1), sample, TIGHT_TPOT)
    assert times.e2e_ms < 100
    assert times.attained == 1.0


def test_a_sample_has_the_rate_and_the_lengths_of_the_traffic() -> None:
    seen = arrivals(1000, 100, 5.0, 100)
    sample = resample(seen, 5.0, 1000, 3)
    assert len(sample) / sample[-1].at_ms * 1000 == pytest.approx(5.0, rel=0.01)
    assert {job.prompt_tokens for job in sample} <= {job.prompt_tokens for job in seen}
    assert resample(seen, 5.0, 50, 3) == resample(seen, 5.0, 50, 3)
    assert resample(seen, 5.0, 50, 3) != resample(seen, 5.0, 50, 4)


def test_traffic_is_the_same_within_chance() -> None:
    def window(prompt: int, rate: float, start_s: float) -> list[Served]:
        return [Served(job.at_ms, job.prompt_tokens) for job in arrivals(prompt, 100, rate, 20, start_s)]

    assert same(window(1000, 5.0, 0), 20_000, window(1000, 5.0, 20), 20_000)
    assert not same(window(1000, 5.0, 0), 20_000, window(4000, 5.0, 20), 20_000)
    assert not same(window(1000, 5.0, 0), 20_000, window(1000, 15.0, 20), 20_000)


def test_draws_depend_on_the_seed_alone_and_cover_the_range() -> None:
    draws, again = Draws(7), Draws(7)
    numbers = [draws.below(10) for _ in range(1000)]
    assert numbers == [again.below(10) for _ in range(1000)]
    assert set(numbers) == set(range(10))


def test_what_never_ended_meets_no_objective_and_costs_time() -> None:
    nan = float("nan")
    good = score(TIGHT_TPOT, [(100.0, 10.0, 1000.0)] * 2, 5000.0)
    half = score(TIGHT_TPOT, [(100.0, 10.0, 1000.0), (nan, nan, nan)], 5000.0)
    assert (good.attained, half.attained) == (1.0, 0.5)
    assert half.e2e_ms > good.e2e_ms
