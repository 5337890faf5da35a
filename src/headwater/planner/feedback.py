"""A time model that is wrong corrects itself by what clients see.

The last minutes are simulated again, with the plans that held then, and compared with what was measured: time per
output token says how wrong decode times are, a low quantile of time to first token (which queues hardly touch) how
wrong prefill times are. Requests that lived through a change of roles do not count. Factors move part of the way at a
time, and within bounds: a queue makes a small error of prefill times a large one of the first token, so that this one
moves least.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isnan, log

from headwater.planner.plan import RolePlan
from headwater.planner.pool import WorkerModel
from headwater.planner.traffic import Served
from headwater.planner.whatif import FastCluster, Job, Outcomes

_FEWEST = 16
_TOTAL_LIMIT = 4.0
_QUANTILE = 0.25
_QUEUED = 0.4
"""Of the time to the first token: with more waiting than that, it says more of the queue, and of how it began, than of
steps."""
_STALLED = 0.25
"""Of the time after the first token: with more standing still for prefills than that, it says little of decoding."""
_FILLING = 0.6
"""The newest requests of a replay count; this part of it before them brings the cluster where it was, ..."""
_LIVES = 1.5
"""... which takes so many times as long as a request."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """How a factor follows what was measured."""

    part: float
    """Of the way, at a time."""
    dead_zone: float
    most: float
    """That is believed of one measurement."""


_PREFILL = _Pace(0.2, 0.08, 1.3)
_DECODE = _Pace(0.8, 0.03, 1.5)


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
    outcomes = _replay(correction.applied(pool), held, jobs, expected_output_tokens)
    filling_ms = _FILLING * (jobs[-1].at_ms - jobs[0].at_ms)
    judged_ms = jobs[0].at_ms + filling_ms
    numbers = [
        number
        for number, served in enumerate(seen)
        if served.at_ms >= judged_ms
        and not (isnan(served.tpot_ms) or isnan(outcomes.tpot_ms[number]))
        and _undisturbed(served, held)
    ]
    if len(numbers) < _FEWEST:
        return correction
    if filling_ms < _LIVES * sum([outcomes.e2e_ms[n] for n in numbers]) / len(numbers):
        return correction
    first = _ratio(_low([seen[n].ttft_ms for n in numbers]), _low([outcomes.ttft_ms[n] for n in numbers]))
    decoded, clean = _decoded(outcomes, numbers, len(jobs))
    later = _ratio(sum([seen[n].tpot_ms for n in decoded]), sum([outcomes.tpot_ms[n] for n in decoded]))
    queued = sum([outcomes.queued_ms[n] for n in numbers]) > _QUEUED * sum([outcomes.ttft_ms[n] for n in numbers])
    return Correction(
        correction.prefill if queued else _moved(correction.prefill, first, _PREFILL),
        _moved(correction.decode, later, _DECODE) if clean else correction.decode,
        abs(later - 1) if clean else 0.0,
    )


def _decoded(outcomes: Outcomes, numbers: Sequence[int], num_jobs: int) -> tuple[Sequence[int], bool]:
    """Whose times per token say how long decode steps take, and whether they do: those that decoded where nobody
    prefills; without enough of these all, if prefills beside them cost little."""
    remote = [number for number in numbers if outcomes.remote[number]]
    if len(remote) >= _FEWEST:
        return remote, True
    decoding_ms = sum([outcomes.e2e_ms[n] - outcomes.ttft_ms[n] for n in numbers])
    return numbers, outcomes.stalled_ms * len(numbers) / num_jobs <= _STALLED * decoding_ms


def _replay(
    pool: Sequence[WorkerModel], held: Sequence[Held], jobs: Sequence[Job], expected_output_tokens: float
) -> Outcomes:
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
    return cluster.outcomes


def _low(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * _QUANTILE)]


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if measured > 0 and predicted > 0 else 1.0


def _undisturbed(served: Served, held: Sequence[Held]) -> bool:
    """Whether one plan held while it was served: what a change of roles leaves behind is no matter of step times."""
    end_ms = served.at_ms + served.ttft_ms + served.tpot_ms * max(0, served.output_tokens - 1)
    return not any(served.at_ms < one.since_ms < end_ms for one in held)


def _moved(factor: float, ratio: float, pace: _Pace) -> float:
    if abs(ratio - 1) < pace.dead_zone:
        return factor
    limited = max(1 / pace.most, min(pace.most, ratio))
    return max(1 / _TOTAL_LIMIT, min(_TOTAL_LIMIT, factor * exp(pace.part * log(limited))))
