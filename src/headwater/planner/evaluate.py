"""How good would a plan be for this traffic? Asked of the fast simulation, for one plan or for a field of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwater.planner.objective import Objective, Score, score
from headwater.planner.plan import RolePlan
from headwater.planner.pool import WorkerModel
from headwater.planner.whatif import FastCluster, Job

_JUDGED_FROM = 0.5
"""The part of a sample that only fills the cluster."""
_SCREENING_JOBS = 300
_SCREENED = 3
_PATIENCE = 1.0
"""How long after the last arrival a run goes on, in lengths of the sample: plans that pile up work are cut there."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests to try plans on."""

    jobs: Sequence[Job]
    expected_output_tokens: float
    backlog: Sequence[Job] = ()
    """Open when it begins; not judged."""

    @property
    def length_ms(self) -> float:
        return self.jobs[-1].at_ms if self.jobs else 0.0


def evaluate(pool: Sequence[WorkerModel], plan: RolePlan, sample: Sample, objective: Objective) -> Score:
    """Requests of the second half of the sample, under a plan that has held from its start."""
    cluster = FastCluster(pool, plan, sample.expected_output_tokens)
    until_ms = sample.length_ms * (1 + _PATIENCE)
    for job in sample.backlog:
        cluster.submit(job)
    outcomes = cluster.run(sample.jobs, until_ms)
    first = len(sample.backlog) + int(len(sample.jobs) * _JUDGED_FROM)
    times = list(zip(outcomes.ttft_ms[first:], outcomes.tpot_ms[first:], outcomes.e2e_ms[first:], strict=True))
    return score(objective, times, until_ms - sample.length_ms * _JUDGED_FROM)


def evaluate_each(
    pool: Sequence[WorkerModel], plans: Sequence[RolePlan], samples: Sequence[Sample], objective: Objective
) -> dict[RolePlan, list[Score]]:
    """One score per sample; samples are the same for all plans."""
    return {plan: [evaluate(pool, plan, sample, objective) for sample in samples] for plan in plans}


def means(scores: dict[RolePlan, list[Score]]) -> dict[RolePlan, Score]:
    return {plan: Score.mean(some) for plan, some in scores.items()}


def screen(
    pool: Sequence[WorkerModel],
    plans: Sequence[RolePlan],
    sample: Sample,
    objective: Objective,
    keep: Sequence[RolePlan] = (),
) -> list[RolePlan]:
    """The few plans worth a closer look, by one short sample, and those to keep whatever it says."""
    short = replace(sample, jobs=sample.jobs[:_SCREENING_JOBS])
    scores = means(evaluate_each(pool, plans, [short], objective))
    by_time = sorted(plans, key=lambda plan: scores[plan].e2e_ms)
    by_share = sorted(by_time, key=lambda plan: -scores[plan].secured) if objective.given else by_time
    return list(dict.fromkeys([*keep, *by_share[:_SCREENED], *by_time[:1]]))


def best_of(scores: dict[RolePlan, Score], objective: Objective, tie: float) -> RolePlan:
    """The most secured; among those within `tie` of it the shortest end-to-end time. Without objectives, that alone."""
    if not objective.given:
        return min(scores, key=lambda plan: scores[plan].e2e_ms)
    limit = max(one.secured for one in scores.values()) - tie
    close = [plan for plan in scores if scores[plan].secured >= limit]
    return min(close, key=lambda plan: scores[plan].e2e_ms)
