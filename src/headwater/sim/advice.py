"""How a model is best served on some GPUs: every layout and every split of roles, tried on a workload in simulation.

A figure is of the requests in the middle of a run: the first ones find an empty cluster, the last ones leave one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan
from random import Random
from statistics import fmean

from headwater.planner.decide import PlannerSettings
from headwater.planner.objective import Objective
from headwater.planner.pool import WorkerModel
from headwater.planner.whatif import FastCluster, Job
from headwater.sim.adaptive import AdaptiveCluster
from headwater.sim.options import Option

_EDGE = 0.25
"""Of a run, at its beginning, and in a closed loop at its end, that is not judged."""
_PATIENCE = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and how they come."""

    jobs: Sequence[Job]
    concurrency: int | None = None
    """A closed loop of so many; None: at their times."""

    @property
    def name(self) -> str:
        return f"{self.concurrency} at a time" if self.concurrency is not None else f"{self.rate:.3g}/s"

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.jobs) / max(1e-9, self.jobs[-1].at_ms) * 1000

    def at_rate(self, requests_per_s: float) -> "Load":
        """The same requests, faster or slower."""
        stretch = self.rate / requests_per_s
        return Load([replace(job, at_ms=job.at_ms * stretch) for job in self.jobs])


@dataclass(frozen=True, slots=True)
class Times:
    """Where the milliseconds of the mean request go."""

    queued_ms: float
    """Before its prefill begins."""
    prefill_ms: float
    handoff_ms: float
    decode_ms: float
    """All tokens after the first, without the next."""
    stalled_ms: float
    """Standing still for the prefills of others."""

    @property
    def e2e_ms(self) -> float:
        return self.queued_ms + self.prefill_ms + self.handoff_ms + self.decode_ms + self.stalled_ms


@dataclass(frozen=True, slots=True)
class Figures:
    """One option under one load."""

    name: str
    kind: str
    """`aggregated`, `split` or `adaptive`."""
    load: str
    attained: float
    """Share of requests within the objectives; of those that end, when there are none."""
    goodput_per_s: float
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    e2e_ms: float
    output_tokens_per_s_per_gpu: float
    times: Times
    prefill_busy: float
    """Of the workers that prefill only, the share of the time they compute; 0 if there are none."""
    decode_busy: float
    keeps_up: bool
    """Whether it serves requests as fast as they come."""

    @property
    def tokens_per_s_per_user(self) -> float:
        return 1000 / self.tpot_ms if self.tpot_ms > 0 and isfinite(self.tpot_ms) else 0.0


def synthetic(prompt_tokens: int, output_tokens: int, num: int, seed: int = 0) -> Load:
    """Poisson arrivals, one a second, prompts +-25 %, answers +-50 %."""
    random = Random(f"advice/{seed}")
    at_ms = 0.0
    jobs: list[Job] = []
    for _ in range(num):
        at_ms += random.expovariate(1.0) * 1000
        prompt = max(1, round(prompt_tokens * random.uniform(0.75, 1.25)))
        jobs.append(Job(at_ms, prompt, max(1, round(output_tokens * random.uniform(0.5, 1.5)))))
    return Load(jobs)


def capacity(pools: Iterable[tuple[Option, Sequence[WorkerModel]]], load: Load) -> float:
    """Requests a second of the option that is through first when all come at once."""
    jobs = [replace(job, at_ms=0.0) for job in load.jobs]
    expected = fmean([job.output_tokens for job in jobs])
    return max(len(jobs) / FastCluster(pool, option.plan, expected).run(jobs).ended_ms * 1000 for option, pool in pools)


def try_option(option: Option, pool: Sequence[WorkerModel], load: Load, objective: Objective) -> Figures:
    cluster = FastCluster(pool, option.plan, fmean([job.output_tokens for job in load.jobs]))
    if load.concurrency is not None:
        cluster.run_closed(load.jobs, load.concurrency)
    else:
        cluster.run(load.jobs, load.jobs[-1].at_ms * (1 + _PATIENCE))
    kind = "aggregated" if option.aggregated else "split"
    return _figures(cluster, option.plan.roles, load, objective, (str(option), kind))


def try_adaptive(layout: str, pool: Sequence[WorkerModel], load: Load, objective: Objective) -> Figures:
    """Arrivals at their times only: the planner needs to see traffic before it can plan, which is not judged."""
    settings = PlannerSettings(objective=objective)
    run = AdaptiveCluster(pool, settings)
    run.run(load.jobs)
    names = (f"adaptive {layout}", "adaptive")
    return _figures(run.cluster, run.planner.plan.roles, load, objective, names)


def front(figures: Iterable[Figures]) -> list[Figures]:
    """Those that keep up and that nobody beats in both tokens/s per user and per GPU, the fastest for a user first."""
    best = -inf
    found: list[Figures] = []
    for one in sorted(
        (one for one in figures if one.keeps_up),
        key=lambda one: (-one.tokens_per_s_per_user, -one.output_tokens_per_s_per_gpu),
    ):
        if one.output_tokens_per_s_per_gpu > best and one.tokens_per_s_per_user > 0:
            best = one.output_tokens_per_s_per_gpu
            found.append(one)
    return found


@dataclass(frozen=True, slots=True)
class Ranking:
    """Which figures are better: those that keep up, by goodput, then by end-to-end time."""

    objective: Objective

    def __call__(self, one: Figures) -> tuple[float, ...]:
        """A key: the least is best. Attainment within half a percent counts as equal."""
        attained = round(one.attained * 200) if self.objective.given else 0
        return (-attained, float(not one.keeps_up), one.e2e_ms)


def _figures(
    cluster: FastCluster, roles: Sequence[str], load: Load, objective: Objective, names: tuple[str, str]
) -> Figures:
    outcomes, total = cluster.outcomes, len(load.jobs)
    last = int(total * (1 - _EDGE)) if load.concurrency is not None else total
    numbers = range(int(total * _EDGE), last)
    ended = [number for number in numbers if not isnan(outcomes.e2e_ms[number])]
    met = [number for number in ended if objective.met(outcomes.ttft_ms[number], outcomes.tpot_ms[number])]
    seconds = _seconds(cluster, load, numbers)
    tokens = sum([load.jobs[number].output_tokens for number in ended])
    num_gpus = sum([worker.num_gpus for worker in cluster.pool])
    rate = len(ended) / seconds
    ttft = sorted([outcomes.ttft_ms[number] for number in ended]) or [inf]
    several = [number for number in ended if load.jobs[number].output_tokens > 1]
    busy = _busy(cluster, roles)
    return Figures(
        name=names[0],
        kind=names[1],
        load=load.name,
        attained=len(met) / len(numbers),
        goodput_per_s=len(met) / seconds,
        ttft_ms=fmean(ttft),
        ttft_p99_ms=ttft[int(0.99 * (len(ttft) - 1))],
        tpot_ms=fmean([outcomes.tpot_ms[number] for number in several]) if several else 0.0,
        e2e_ms=fmean([outcomes.e2e_ms[number] for number in ended]) if ended else inf,
        output_tokens_per_s_per_gpu=tokens / seconds / num_gpus,
        times=_times(cluster, load, ended),
        prefill_busy=busy[0],
        decode_busy=busy[1],
        keeps_up=load.concurrency is not None or (len(ended) == len(numbers) and rate > 0.93 * load.rate),
    )


def _seconds(cluster: FastCluster, load: Load, numbers: range) -> float:
    """Over which the judged requests came, or in which as many ended."""
    times = [job.at_ms for job in load.jobs] if load.concurrency is None else cluster.started_ms
    return max(1e-9, (times[numbers[-1]] - times[numbers[0]]) / 1000)


def _times(cluster: FastCluster, load: Load, ended: Sequence[int]) -> Times:
    outcomes = cluster.outcomes
    if not ended:
        return Times(inf, 0.0, 0.0, 0.0, 0.0)

    def mean(values: Sequence[float]) -> float:
        return fmean([values[number] for number in ended])

    tokens = max(1, sum([job.output_tokens for job in load.jobs]))
    later = mean(outcomes.e2e_ms) - mean(outcomes.ttft_ms)
    output = fmean([load.jobs[number].output_tokens for number in ended])
    stalled = min(later, outcomes.stalled_ms / tokens * output)
    queued, handoff = mean(outcomes.queued_ms), mean(outcomes.handoff_ms)
    return Times(queued, mean(outcomes.ttft_ms) - queued - handoff, handoff, later - stalled, stalled)


def _busy(cluster: FastCluster, roles: Sequence[str]) -> tuple[float, float]:
    ended_ms = max(1e-9, cluster.outcomes.ended_ms)

    def share(prefill: bool) -> float:
        chosen = [one for one, role in zip(cluster.usage(), roles, strict=True) if (role == "prefill") == prefill]
        return fmean([(one.prefill_ms + one.decode_ms) / ended_ms for one in chosen]) if chosen else 0.0

    return share(True), share(False)
