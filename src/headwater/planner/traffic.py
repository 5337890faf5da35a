"""Recent traffic: what came, how long answers were, and samples of what may come next.

Answers of requests that have not ended are unknown. They are guessed from ended ones with a prompt of about the same
length, so that long answers, which end late, do not vanish from a window that has just begun.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan, sqrt
from statistics import fmean

from headwater.planner.whatif import Job

_ALIKE = 1.5
_INITIAL_OUTPUT_TOKENS = 128
_FEW = 8
_TRIES = 6
_CHANCE = 2.0
_LEAST_CHANGE = 0.05
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Served:
    """One request as it was seen; NaN and 0 until known."""

    at_ms: float
    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    generated: int = 0
    """Tokens so far, while it has not ended."""
    open: bool = True
    ttft_ms: float = nan
    tpot_ms: float = nan


@dataclass(frozen=True, slots=True)
class Summary:
    """Traffic in three figures, to see whether it has changed."""

    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float

    def differs(self, other: "Summary", part: float) -> bool:
        pairs = (
            (self.requests_per_s, other.requests_per_s),
            (self.prompt_tokens_per_s, other.prompt_tokens_per_s),
            (self.output_tokens_per_s, other.output_tokens_per_s),
        )
        return any(abs(mine - theirs) > part * max(mine, theirs) for mine, theirs in pairs)


class Traffic:
    """The last requests, bounded in number and in time."""

    def __init__(self, most: int = 8192, keep_ms: float = 300_000.0, known_lengths: int = 1024) -> None:
        self._served: deque[Served] = deque(maxlen=most)
        self._keep_ms = keep_ms
        self._lengths: deque[tuple[int, int]] = deque(maxlen=known_lengths)
        """(prompt, output) of the last ended ones."""

    def __len__(self) -> int:
        return len(self._served)

    def arrived(self, at_ms: float, prompt_tokens: int, cached_tokens: int = 0) -> Served:
        """Fill in the rest of the record as it becomes known; `ended` at last."""
        served = Served(at_ms, prompt_tokens, cached_tokens)
        self._served.append(served)
        while self._served[0].at_ms < at_ms - self._keep_ms:
            self._served.popleft()
        return served

    def ended(self, served: Served, output_tokens: int) -> None:
        served.output_tokens, served.open = max(1, output_tokens), False
        self._lengths.append((served.prompt_tokens, served.output_tokens))

    def refill(self, served: Sequence[Served]) -> None:
        """These, in order of arrival, instead of what was known."""
        self._served.clear()
        self._served.extend(served)
        self._lengths.clear()
        self._lengths.extend([(one.prompt_tokens, one.output_tokens) for one in served if one.output_tokens])

    def since(self, at_ms: float) -> list[Served]:
        """Those that came from then on, in order."""
        found: list[Served] = []
        for served in reversed(self._served):
            if served.at_ms < at_ms:
                break
            found.append(served)
        return found[::-1]

    def jobs(self, served: Sequence[Served], seed: int) -> list[Job]:
        """The same requests to simulate, with answers guessed where they are not known."""
        known = sorted(self._lengths)
        prompts = [prompt for prompt, _ in known]
        draws = Draws(seed)
        return [
            Job(
                one.at_ms,
                one.prompt_tokens,
                one.output_tokens or max(one.generated + 1, _guess(known, prompts, one, draws)),
                one.cached_tokens,
            )
            for one in served
        ]

    def backlog(self, seed: int) -> list[Job]:
        """What is open, as if it came now: prompts that are to be computed, and answers that are to go on."""
        waiting = [one for one in self._served if one.open]
        jobs: list[Job] = []
        for one, job in zip(waiting, self.jobs(waiting, seed), strict=True):
            if one.generated:
                prompt = one.prompt_tokens + one.generated
                jobs.append(Job(0.0, prompt, job.output_tokens - one.generated, prompt - 1))
            else:
                jobs.append(Job(0.0, job.prompt_tokens, job.output_tokens, job.cached_tokens))
        return jobs

    def expected_output(self) -> float:
        return fmean([output for _, output in self._lengths]) if self._lengths else float(_INITIAL_OUTPUT_TOKENS)


def summary(jobs: Sequence[Job], seconds: float) -> Summary:
    """Of jobs that came within so long."""
    return Summary(
        len(jobs) / seconds,
        sum([job.prompt_tokens - job.cached_tokens for job in jobs]) / seconds,
        sum([job.output_tokens for job in jobs]) / seconds,
    )


def resample(jobs: Sequence[Job], requests_per_s: float, num: int, seed: int) -> list[Job]:
    """`num` requests like these at that rate: lengths drawn one by one, gaps between arrivals as uneven as theirs."""
    draws = Draws(seed)
    gaps = [later.at_ms - earlier.at_ms for earlier, later in pairwise(jobs)] or [1000.0]
    chosen = [gaps[draws.below(len(gaps))] for _ in range(num)]
    stretch = 1000.0 / requests_per_s * num / max(1e-9, sum(chosen))
    at_ms = 0.0
    sample: list[Job] = []
    for gap in chosen:
        at_ms += gap * stretch
        like = jobs[draws.below(len(jobs))]
        sample.append(Job(at_ms, like.prompt_tokens, like.output_tokens, like.cached_tokens))
    return sample


def shifted(jobs: Sequence[Job]) -> list[Job]:
    """The same requests, from now on."""
    return [replace(job, at_ms=job.at_ms - jobs[0].at_ms) for job in jobs]


class Draws:
    """Numbers that look random and depend on the seed alone (SplitMix64)."""

    def __init__(self, seed: int) -> None:
        self._state = seed * 0x9E3779B97F4A7C15 & _MASK

    def below(self, limit: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = (self._state ^ (self._state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
        return (mixed ^ (mixed >> 31)) * limit >> 64


def same(before: Sequence[Served], before_ms: float, after: Sequence[Served], after_ms: float) -> bool:
    """Whether two stretches of so many ms look like one traffic: rates and lengths differ by chance at most."""
    if not before or not after:
        return not before and not after
    rates = len(before) / before_ms, len(after) / after_ms
    noise = sqrt(len(before)) / before_ms + sqrt(len(after)) / after_ms
    if abs(rates[0] - rates[1]) > _CHANCE * noise:
        return False
    means = [fmean([one.prompt_tokens for one in some]) for some in (before, after)]
    errors = [
        sqrt(fmean([(one.prompt_tokens - mean) ** 2 for one in some]) / len(some))
        for some, mean in zip((before, after), means, strict=True)
    ]
    return abs(means[0] - means[1]) <= _CHANCE * sum(errors) + _LEAST_CHANGE * max(means)


def _guess(known: Sequence[tuple[int, int]], prompts: Sequence[int], one: Served, draws: Draws) -> int:
    """An answer of an ended request with a prompt like this one's, longer than what this one has already."""
    if not known:
        return max(_INITIAL_OUTPUT_TOKENS, 2 * one.generated)
    prompt_tokens = one.prompt_tokens
    first, last = bisect_left(prompts, prompt_tokens / _ALIKE), bisect_right(prompts, prompt_tokens * _ALIKE)
    if last - first < _FEW:
        first, last = max(0, first - _FEW), min(len(known), last + _FEW)
    for _ in range(_TRIES):
        tokens = known[first + draws.below(last - first)][1]
        if tokens > one.generated:
            return tokens
    return one.generated + one.generated // 4
