"""A time model that is wrong corrects itself by what clients see.

The last minutes are simulated again, with the plans that held then, and compared with what was measured: time per
output token says how wrong decode times are, a low quantile of time to first token (which queues hardly touch) how
wrong prefill times are. Factors move part of the way at a time, and within bounds: a queue makes a small error of
prefill times a large one of the first token, so that this one moves least.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isnan, log

from headwater.planner.plan import RolePlan
from headwater.planner.pool import WorkerModel
from headwater.planner.traffic import Served
from headwater.planner.whatif import FastCluster, Job

_FEWEST = 16
_STEP_LIMIT = 1.3
_TOTAL_LIMIT = 4.0
_QUANTILE = 0.25
_SETTLED_PART = 0.25
_JUDGED_MS = 60_000.0
"""The newest requests of a replay count: those before them bring the cluster where it was."""
_PREFILL_PART, _PREFILL_DEAD_ZONE = 0.2, 0.08
_DECODE_PART, _DECODE_DEAD_ZONE = 0.5, 0.03


@dataclass(frozen=True, slots=True)
class Correction:
    """What the believed times are multiplied with."""

    prefill: float = 1.0
    decode: float = 1.0
    error: float = 0.0
    """How far time per output token was off in the last replay, relative."""

    def applied(self, pool: Sequence[WorkerModel]) -> list[WorkerModel]:
        """The pool as it is believed now. Workers of one model share the corrected one."""
        if self.prefill == self.decode == 1.0:
            return list(pool)
        known: dict[int, WorkerModel] = {}
        for model in pool:
            if id(model) not in known:
                curve = model.curve.scaled(prefill=self.prefill, decode=self.decode)
                known[id(model)] = replace(model, curve=curve)
        return [known[id(model)] for model in pool]


@dataclass(frozen=True, slots=True)
class Held:
    """A plan and since when it holds."""

    since_ms: float
    plan: RolePlan


def corrected(
    correction: Correction,
    pool: Sequence[WorkerModel],
    held: Sequence[Held],
    seen: Sequence[Served],
    jobs: Sequence[Job],
    expected_output_tokens: float,
) -> Correction:
    """The next correction. `seen` and `jobs` are the same requests, as measured and to simulate."""
    predicted = _replay(correction.applied(pool), held, jobs, expected_output_tokens)
    judged_ms = jobs[-1].at_ms - max(_JUDGED_MS, (1 - _SETTLED_PART) * (jobs[-1].at_ms - jobs[0].at_ms) / 2)
    pairs = [
        (served, times)
        for served, times in zip(seen, predicted, strict=True)
        if served.at_ms >= judged_ms and not (isnan(served.tpot_ms) or isnan(times[1]))
    ]
    if len(pairs) < _FEWEST:
        return correction
    first = _ratio(_low([s.ttft_ms for s, _ in pairs]), _low([t[0] for _, t in pairs]))
    later = _ratio(sum([s.tpot_ms for s, _ in pairs]), sum([t[1] for _, t in pairs]))
    return Correction(
        _moved(correction.prefill, first, _PREFILL_PART, _PREFILL_DEAD_ZONE),
        _moved(correction.decode, later, _DECODE_PART, _DECODE_DEAD_ZONE),
        abs(later - 1),
    )


def _replay(
    pool: Sequence[WorkerModel], held: Sequence[Held], jobs: Sequence[Job], expected_output_tokens: float
) -> list[tuple[float, float]]:
    start_ms = jobs[0].at_ms if jobs else 0.0
    before = [one for one in held if one.since_ms <= start_ms]
    cluster = FastCluster(pool, (before or held)[-1 if before else 0].plan, expected_output_tokens)
    changes = [one for one in held if one.since_ms > start_ms]
    for job in jobs:
        while changes and changes[0].since_ms <= job.at_ms:
            change = changes.pop(0)
            cluster.advance(change.since_ms)
            cluster.set_plan(change.plan)
        cluster.advance(job.at_ms)
        cluster.submit(job)
    length_ms = jobs[-1].at_ms - start_ms if jobs else 0.0
    cluster.advance(start_ms + 2 * length_ms)
    return list(zip(cluster.outcomes.ttft_ms, cluster.outcomes.tpot_ms, strict=True))


def _low(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * _QUANTILE)]


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if measured > 0 and predicted > 0 else 1.0


def _moved(factor: float, ratio: float, part: float, dead_zone: float) -> float:
    if abs(ratio - 1) < dead_zone:
        return factor
    limited = max(1 / _STEP_LIMIT, min(_STEP_LIMIT, ratio))
    return max(1 / _TOTAL_LIMIT, min(_TOTAL_LIMIT, factor * exp(part * log(limited))))
