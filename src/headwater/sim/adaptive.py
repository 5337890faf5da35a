"""A simulated pool whose roles are planned while it runs: the planner sees what a frontend sees, and no more."""

from collections.abc import Sequence
from math import inf, isnan

from headwater.planner.decide import Decision, Planner, PlannerSettings
from headwater.planner.pool import WorkerModel
from headwater.planner.traffic import Served
from headwater.planner.whatif import FastCluster, Job

_PATIENCE = 2.0
"""How long after the last arrival a run goes on, in lengths of the load."""


class AdaptiveCluster:
    """`pool` is what the workers are, `believed` what the planner thinks they are."""

    def __init__(
        self, pool: Sequence[WorkerModel], settings: PlannerSettings, believed: Sequence[WorkerModel] | None = None
    ) -> None:
        self.planner = Planner(len(pool), settings)
        self.cluster = FastCluster(pool, self.planner.plan, self.planner.traffic.expected_output())
        self.decisions: list[tuple[float, Decision]] = []
        """Those for which plans were tried, with their times."""
        self._believed = pool if believed is None else believed
        self._open: dict[int, tuple[Served, Job]] = {}

    @property
    def num_changes(self) -> int:
        return sum([decision.changed for _, decision in self.decisions])

    def run(self, jobs: Sequence[Job]) -> FastCluster:
        """All jobs, as they arrive, and then until they have ended or too long has passed."""
        interval_ms = tick_ms = self.planner.settings.interval_ms
        for number, job in enumerate(jobs):
            while tick_ms <= job.at_ms:
                self.cluster.advance(tick_ms)
                self._decide(tick_ms)
                tick_ms += interval_ms
            self.cluster.advance(job.at_ms)
            self.cluster.submit(job)
            self._open[number] = (self.planner.traffic.arrived(job.at_ms, job.prompt_tokens, job.cached_tokens), job)
        self.cluster.advance(jobs[-1].at_ms * (1 + _PATIENCE) if jobs else inf)
        return self.cluster

    def run_closed(self, jobs: Sequence[Job], concurrency: int) -> FastCluster:
        """All jobs, so many at a time."""
        self.cluster.begin_closed(jobs, concurrency)
        tick_ms, num_seen = self.planner.settings.interval_ms, 0
        while self.cluster.outcomes.finished < len(jobs):
            self.cluster.advance(tick_ms)
            started = self.cluster.started_ms
            for number in range(num_seen, len(started)):
                job = jobs[number]
                served = self.planner.traffic.arrived(started[number], job.prompt_tokens, job.cached_tokens)
                self._open[number] = (served, job)
            num_seen = len(started)
            self._decide(tick_ms)
            tick_ms += self.planner.settings.interval_ms
        return self.cluster

    def _decide(self, now_ms: float) -> None:
        outcomes, planner = self.cluster.outcomes, self.planner
        for number in [number for number in self._open if not isnan(outcomes.e2e_ms[number])]:
            served, job = self._open.pop(number)
            served.ttft_ms, served.tpot_ms = outcomes.ttft_ms[number], outcomes.tpot_ms[number]
            planner.traffic.ended(served, job.output_tokens)
        for number, tokens in self.cluster.generated().items():
            self._open[number][0].generated = tokens
        decision = planner.decide(now_ms, self._believed)
        self.cluster.set_expected_output(planner.traffic.expected_output())
        if decision.changed:
            self.cluster.set_plan(decision.plan)
        if decision.scores:
            self.decisions.append((now_ms, decision))
