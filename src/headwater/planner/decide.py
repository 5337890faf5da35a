"""The role plan, re-chosen every few seconds. Observations in, decisions out; time is passed in.

    arrived, ended  ->  decide(now, pool)  ->  Decision: the plan, what each candidate would give, why

1. The believed step times are corrected by what was measured (`headwater.planner.feedback`).
2. When traffic or the correction has changed, or after a while, every plan is tried by fast simulation on
   samples of the recent traffic, over at least twice the life of a request.
3. The plan in force stays unless another gains more than the hysteresis, twice in a row on samples of their own, and
   does not lose more than that on the mixture of the last minutes (unless the plan in force fails now).
4. A plan is left by single requests (loose) only if that promises more than 2 %.

Too little traffic, or times that no correction explains: the plan in force stays, which at first is all-aggregated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from statistics import fmean
from typing import Self

from headwater.perf.model import StepShape
from headwater.planner.evaluate import Sample, best_of, evaluate_each, means, screen
from headwater.planner.feedback import Correction, Held, corrected
from headwater.planner.objective import Objective, Score
from headwater.planner.plan import RolePlan, aggregated, candidates, loosened
from headwater.planner.pool import WorkerModel
from headwater.planner.traffic import Served, Summary, Traffic, resample, same, shifted, summary
from headwater.types import Role

_MAX_HELD = 64
_MAX_REPLAYED = 6000
_SIGNS = (-1, 1)
"""On which side of the measured rate a sample is."""
_MOST_DOUBT = 0.2
_TELLING = 8
"""Requests that can tell a change of traffic, or the end of a pause; a decision takes more."""
_CHANCE = 3.0
"""Times the standard deviation of a count is no change of traffic."""
_WHOLE = 0.9
"""A smaller part of the traffic cannot be replayed alone."""


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """When to decide and how sure to be."""

    objective: Objective = field(default_factory=Objective)
    interval_ms: float = 5_000.0
    window_ms: float = 20_000.0
    """Of recent traffic."""
    mixture_ms: float = 180_000.0
    """The last minutes."""
    min_requests: int = 24
    """In a window; fewer say nothing."""
    min_horizon_ms: float = 90_000.0
    max_horizon_ms: float = 400_000.0
    lives: float = 2.5
    """Of a request, that a sample lasts at least."""
    max_jobs: int = 1200
    """Of a sample."""
    min_jobs: int = 240
    hysteresis: float = 0.04
    """Gain in attainment, or in end-to-end time where no objective is missed, worth a change of roles."""
    time_hysteresis: float = 0.08
    tie: float = 0.005
    loose_gain: float = 0.02
    loss: float = 0.02
    """That a gain may cost in one sample, or on the mixture, by chance."""
    dwell_ms: float = 15_000.0
    """That a plan holds at least, unless it fails."""
    failing: float = 0.25
    """The plan in force fails when another secures so many more of the requests."""
    changed: float = 0.1
    """Traffic that differs by more is other traffic."""
    corrected: float = 0.05
    """Step times that differ by more are other times."""
    refresh_ms: float = 30_000.0
    """Look again after this time, whatever was seen."""
    max_error: float = 0.6
    """Of the replay: beyond it nothing is believed."""

    def every(self, interval_ms: float) -> Self:
        """The same, faster or slower in all that happens again and again."""
        pace = interval_ms / self.interval_ms
        return replace(
            self,
            interval_ms=interval_ms,
            window_ms=self.window_ms * pace,
            dwell_ms=self.dwell_ms * pace,
            refresh_ms=self.refresh_ms * pace,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to hold and why."""

    plan: RolePlan
    changed: bool
    reason: str
    scores: dict[RolePlan, Score] = field(default_factory=dict[RolePlan, Score])
    correction: Correction = field(default_factory=Correction)
    summary: Summary | None = None


class Planner:
    """Keeps the plan of one pool of workers."""

    def __init__(
        self, num_workers: int, settings: PlannerSettings | None = None, fixed: Sequence[Role | None] = ()
    ) -> None:
        self.settings = settings or PlannerSettings()
        self.traffic = Traffic(keep_ms=self.settings.mixture_ms)
        self.fixed = tuple(fixed) or (None,) * num_workers
        """Roles of workers that do not change theirs."""
        self.share = 1.0
        """Of the pool's requests, the part that `traffic` shows."""
        self.plan = RolePlan(tuple(role or "both" for role in self.fixed)) if fixed else aggregated(num_workers)
        self.correction = Correction()
        self._held: list[Held] = [Held(-inf, self.plan)]
        self._evaluated: Summary | None = None
        self._evaluated_ms = -inf
        self._evaluated_pace: tuple[float, ...] = ()
        self._num_evaluated = 0
        self._wanted: RolePlan | None = None
        """Found better once: looked at again before roles change."""

    def adopt(self, plan: RolePlan, now_ms: float) -> None:
        """A plan holds from now on, whoever chose it: workers came or went, or somebody set roles."""
        self.plan = plan
        self._held = [*self._held[-_MAX_HELD:], Held(now_ms, plan)]

    def decide(self, now_ms: float, pool: Sequence[WorkerModel]) -> Decision:
        """What is to hold from now on."""
        settings = self.settings
        recent, length_ms = self._recent(now_ms)
        if len(recent) < settings.min_requests:
            return self._stay(f"{len(recent)} requests lately: too few to say anything")
        self._correct(now_ms, pool)
        if self.correction.error > settings.max_error:
            return self._stay(f"times are {self.correction.error:.0%} off what was measured: nothing is believed")
        jobs = self.traffic.jobs(recent, 0)
        seen = summary(jobs, max(1.0, length_ms) / 1000)
        believed = self.correction.applied(pool)
        pace = _pace(believed)
        if not self._due(now_ms, seen, len(recent), pace):
            return self._stay("nothing has changed", seen)
        decision = self._choose(now_ms, believed, seen, recent)
        self._evaluated, self._evaluated_ms, self._evaluated_pace = seen, now_ms, pace
        self._num_evaluated += 1
        if decision.changed:
            self.adopt(decision.plan, now_ms)
        return decision

    def _stay(self, reason: str, seen: Summary | None = None) -> Decision:
        return Decision(self.plan, False, reason, correction=self.correction, summary=seen)

    def _recent(self, now_ms: float) -> tuple[list[Served], float]:
        """The requests of the window and its length, longer as long as what was before is the same traffic."""
        settings = self.settings
        length_ms = settings.window_ms
        recent = self.traffic.since(now_ms - length_ms)
        while 2 * length_ms <= settings.mixture_ms:
            longer = self.traffic.since(now_ms - 2 * length_ms)
            before = longer[: len(longer) - len(recent)]
            if len(recent) >= _TELLING and not same(before, length_ms, recent, length_ms):
                break
            recent, length_ms = longer, 2 * length_ms
        since_ms = recent[0].at_ms if recent else now_ms
        return recent, min(length_ms, now_ms - since_ms)

    # -- feedback

    def _correct(self, now_ms: float, pool: Sequence[WorkerModel]) -> None:
        seen = self.traffic.since(now_ms - self.settings.mixture_ms)[-_MAX_REPLAYED:]
        if len(seen) < self.settings.min_requests or self.share < _WHOLE:
            return
        jobs = self.traffic.jobs(seen, 0)
        expected = self.traffic.expected_output()
        self.correction = corrected(self.correction, pool, self._held, seen, jobs, expected)

    def _due(self, now_ms: float, seen: Summary, num_recent: int, pace: tuple[float, ...]) -> bool:
        settings, before = self.settings, self._evaluated
        if before is None or len(pace) != len(self._evaluated_pace) or self._wanted is not None:
            return True
        if seen.differs(before, max(settings.changed, _CHANCE / sqrt(num_recent))):
            return True
        if now_ms - self._evaluated_ms >= settings.refresh_ms:
            return True
        pairs = zip(pace, self._evaluated_pace, strict=True)
        return any(abs(now / then - 1) > settings.corrected for now, then in pairs)

    # -- choice

    def _choose(self, now_ms: float, pool: Sequence[WorkerModel], seen: Summary, recent: Sequence[Served]) -> Decision:
        settings = self.settings
        plans = list(candidates([model.name for model in pool], self.fixed))
        backlog = self.traffic.backlog(self._num_evaluated) if self.share >= _WHOLE else []
        samples = [replace(sample, backlog=backlog) for sample in self._samples(recent, seen.requests_per_s, pool)]
        likely = screen(pool, plans, samples[0], settings.objective, (self.plan, *plans[:1]))
        wanted, self._wanted = self._wanted, None
        each = evaluate_each(pool, likely, samples, settings.objective)
        best = best_of(means(each), settings.objective, settings.tie)
        best = self._loose(pool, best, each, samples)
        scores = means(each)
        if best == self.plan or not gains(settings, each[self.plan], each[best]):
            return self._decision(self.plan, "no other plan gains enough", scores, seen)
        gain = scores[best].secured - scores[self.plan].secured
        failing = gain > settings.failing
        if not failing and now_ms - self._held[-1].since_ms < settings.dwell_ms:
            return self._decision(self.plan, "roles have only just changed", scores, seen)
        if not failing and self._loses_on_mixture(now_ms, pool, best, gain):
            return self._decision(self.plan, "the best plan for now loses on the last minutes", scores, seen)
        if not failing and best != wanted:
            self._wanted = best
            return self._decision(self.plan, "another plan gains; a second sample is to say so too", scores, seen)
        return self._decision(best, _gain(scores[self.plan], scores[best], settings.objective), scores, seen)

    def _decision(self, plan: RolePlan, reason: str, scores: dict[RolePlan, Score], seen: Summary) -> Decision:
        return Decision(plan, plan != self.plan, reason, scores, self.correction, seen)

    def _loose(
        self,
        pool: Sequence[WorkerModel],
        best: RolePlan,
        each: dict[RolePlan, list[Score]],
        samples: Sequence[Sample],
    ) -> RolePlan:
        """Let single requests leave the plan where that promises enough."""
        strict = RolePlan(best.roles)
        loose = loosened(strict)
        if loose is None:
            return best
        missing = [plan for plan in (strict, loose) if plan not in each]
        each |= evaluate_each(pool, missing, samples, self.settings.objective)
        kept, left = Score.mean(each[strict]), Score.mean(each[loose])
        gain = self.settings.loose_gain
        if self.settings.objective.given:
            return loose if left.secured > kept.secured + gain else strict
        return loose if left.e2e_ms < kept.e2e_ms * (1 - gain) else strict

    def _loses_on_mixture(self, now_ms: float, pool: Sequence[WorkerModel], best: RolePlan, gain: float) -> bool:
        """More than it gains now."""
        settings = self.settings
        mixture = self.traffic.since(now_ms - settings.mixture_ms)
        seconds = (now_ms - mixture[0].at_ms) / 1000
        if seconds * 1000 < 2 * settings.window_ms:
            return False
        samples = self._samples(mixture, len(mixture) / seconds, pool)
        scores = means(evaluate_each(pool, [self.plan, best], samples, settings.objective))
        current, other = scores[self.plan], scores[best]
        if settings.objective.given:
            return other.secured < current.secured - max(settings.loss, gain)
        return other.e2e_ms > current.e2e_ms * (1 + settings.loss)

    def _samples(self, served: Sequence[Served], requests_per_s: float, pool: Sequence[WorkerModel]) -> list[Sample]:
        settings = self.settings
        jobs = self.traffic.jobs(served, 0)
        expected = fmean([job.output_tokens for job in jobs])
        prompt = fmean([job.prompt_tokens for job in jobs])
        horizon_ms = max(settings.min_horizon_ms, settings.lives * _life_ms(pool, prompt, expected, settings.objective))
        wanted = max(settings.min_jobs, int(min(horizon_ms, settings.max_horizon_ms) / 1000 * requests_per_s))
        num = min(settings.max_jobs, wanted)
        # What the rate is known to, by so many arrivals: a plan is to be better within that, and for what really came.
        doubt = min(_MOST_DOUBT, 1 / sqrt(len(served)))
        rate = requests_per_s / self.share
        first = len(_SIGNS) * self._num_evaluated
        samples = [
            Sample(resample(jobs, rate * (1 + sign * doubt), num, first + number), expected)
            for number, sign in enumerate(_SIGNS)
        ]
        if len(jobs) >= settings.min_jobs and self.share >= _WHOLE:
            samples.append(Sample(shifted(jobs[-settings.max_jobs :]), expected))
        return samples


def gains(settings: PlannerSettings, current: Sequence[Score], other: Sequence[Score]) -> bool:
    """Whether another plan is better enough to change roles for it: in the mean, and in no sample worse.

    Of samples in which all plans fail, or none does, neither speaks against a change.
    """
    mean, new = Score.mean(current), Score.mean(other)
    pairs = list(zip(current, other, strict=True))
    if settings.objective.given:
        if new.attained < mean.attained - settings.tie:
            return False
        if new.secured > mean.secured + settings.hysteresis:
            return all(after.secured >= before.secured - settings.loss for before, after in pairs)
        if new.secured < mean.secured - settings.tie:
            return False
    if new.e2e_ms >= mean.e2e_ms * (1 - settings.time_hysteresis):
        return False
    return all(after.e2e_ms < before.e2e_ms for before, after in pairs)


def _pace(pool: Sequence[WorkerModel]) -> tuple[float, ...]:
    """Times of a usual step of either kind, of each worker."""
    chunk, decodes = StepShape(1024, 1024 * 512), StepShape(0, 0, 32, 32 * 1024)
    known = {id(model): (model.curve.step_ms(chunk), model.curve.step_ms(decodes)) for model in pool}
    return tuple(duration for model in pool for duration in known[id(model)])


def _life_ms(pool: Sequence[WorkerModel], prompt: float, output: float, objective: Objective) -> float:
    """Of a request whose answer comes at the pace of the objective, or at that of a well-filled worker."""
    model = pool[0]
    sequences = min(64, model.max_num_seqs)
    context = min(model.kv_tokens, sequences * (prompt + output / 2))
    curve = model.curve
    step_ms = model.tables.shared[sequences] + curve.decode_ms + curve.decode_context_token_ms * context
    tpot_ms = max(step_ms, objective.tpot_ms) if objective.tpot_ms < inf else 1.5 * step_ms
    return output * tpot_ms + (objective.ttft_ms if objective.ttft_ms < inf else 1000.0)


def _gain(current: Score, other: Score, objective: Objective) -> str:
    if objective.given and other.secured > current.secured:
        return f"{other.attained:.0%} of requests would meet their objectives instead of {current.attained:.0%}"
    return f"requests would take {other.e2e_ms:.0f} ms instead of {current.e2e_ms:.0f} ms"
