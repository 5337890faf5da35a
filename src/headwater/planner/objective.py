"""What a plan is judged by: the share of requests that meet their objectives, then the time they take.

Without objectives only the mean end-to-end time counts. A plan that only just meets an objective in one sample of the
traffic misses it in the next one, so the share is taken at several tighter objectives too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from statistics import fmean

MARGINS = (1.0, 0.95, 0.88)
"""Parts of an objective at which attainment is taken, to tell a plan with room from one on the edge."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request is to meet; infinite: not asked for."""

    ttft_ms: float = inf
    tpot_ms: float = inf

    @property
    def given(self) -> bool:
        return self.ttft_ms < inf or self.tpot_ms < inf

    def met(self, ttft_ms: float, tpot_ms: float, part: float = 1.0) -> bool:
        """NaN never meets one."""
        return ttft_ms <= self.ttft_ms * part and tpot_ms <= self.tpot_ms * part


@dataclass(frozen=True, slots=True)
class Score:
    """How a plan did on one sample of traffic."""

    attained: float
    """Share of requests within the objectives."""
    secured: float
    """The same, averaged over `MARGINS`."""
    e2e_ms: float
    """Mean; requests that had not ended count with the time they had been open, twice."""
    ttft_ms: float
    tpot_ms: float

    @classmethod
    def mean(cls, scores: Sequence["Score"]) -> "Score":
        return cls(
            fmean([score.attained for score in scores]),
            fmean([score.secured for score in scores]),
            fmean([score.e2e_ms for score in scores]),
            fmean([score.ttft_ms for score in scores]),
            fmean([score.tpot_ms for score in scores]),
        )


def score(objective: Objective, times: Sequence[tuple[float, float, float]], open_ms: float) -> Score:
    """Of (TTFT, TPOT, end-to-end) per request; NaN where the run ended first, after `open_ms` or less."""
    if not times:
        return Score(0.0, 0.0, inf, inf, inf)
    met = [sum([objective.met(ttft, tpot, part) for ttft, tpot, _ in times]) / len(times) for part in MARGINS]
    ended = [entry for entry in times if not isnan(entry[2])]
    unfinished = len(times) - len(ended)
    e2e = (sum([entry[2] for entry in ended]) + unfinished * 2 * open_ms) / len(times)
    ttft = fmean([entry[0] for entry in ended]) if ended else inf
    tpot = fmean([entry[1] for entry in ended]) if ended else inf
    return Score(met[0], fmean(met), e2e, ttft, tpot)
