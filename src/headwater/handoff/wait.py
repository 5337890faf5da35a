"""What decode and prefill workers know of each other's time, by the rules of `headwater.handoff.patience`.

`Wait` is one hand-off as the decode worker waits for it, `OwnWork` what it would do instead, `Line` what a place in the
line of a prefill worker means. Times are in seconds on the caller's clock, unless said otherwise.
"""

from dataclasses import replace
from math import inf

from headwater.errors import HeadwaterError, TransferTimeout
from headwater.handoff.patience import Pace, Patience, Progress, Prospects
from headwater.protocol.events import LoadReport
from headwater.scheduler.exchange import WORD_S

_FADING = 0.9
_STEPS_BETWEEN_WORDS = 3


class Wait:
    """From the asking on. What is heard moves the bounds."""

    def __init__(self, patience: Patience, num_blocks: int, now: float) -> None:
        self.patience = patience
        """As it began."""
        self.asked = now
        self._limit = patience
        """As it is now: time in line does not count."""
        self._progress = Progress(num_blocks)
        self._heard = now

    def hear(self, now: float) -> None:
        """Something about this request."""
        self._heard = now

    def in_line(self, silence_s: float, now: float) -> None:
        """It waits there, and goes on waiting."""
        self._limit = self.patience.in_line(now - self.asked, silence_s)

    def announced(self, num_blocks: int, now: float) -> None:
        """Blocks can be read."""
        self._heard = now
        self._limit = replace(self._limit, stall_s=self.patience.stall_s)
        self._progress.announced(now - self.asked, num_blocks)

    def left_s(self, now: float) -> float:
        return self.asked + self._limit.total_s - now

    def as_expected(self, there_s: float, now: float) -> bool:
        return now - self.asked + there_s <= self.patience.total_s

    def overdue(self, now: float) -> HeadwaterError | None:
        """Why it is not waited for any longer."""
        limit = self._limit
        if now - self.asked > limit.total_s:
            return TransferTimeout(f"not done within {limit.total_s:.1f} s")
        if self._progress.hopeless(limit):
            return TransferTimeout(f"at its pace it would take {self._progress.ends_s():.1f} s")
        if now - self._heard > limit.stall_s:
            return TransferTimeout(f"nothing was heard for {limit.stall_s:.1f} s")
        return None


class OwnWork:
    """Of a decode worker: what it would take to compute here what waits in a line elsewhere."""

    def __init__(self) -> None:
        self._until = 0.0
        """When what was taken back is computed."""

    def taken_back(self, num_ahead: int, prospects: Prospects, now: float) -> HeadwaterError | None:
        """Why it is computed here, if that is better; it counts before what is asked about next."""
        if not prospects.better_here:
            return None
        self._until = now + prospects.here_s
        return TransferTimeout(
            f"{num_ahead} are before it in {prospects.there_s:.1f} s of line, and here it takes "
            f"{prospects.here_s:.1f} s"
        )

    def prospects(self, wait: Wait, there_s: float, here_ms: float, now: float, deadline_s: float = inf) -> Prospects:
        """`here_ms`: price of computing it here; 0: no idea."""
        here_s = max(0.0, self._until - now) + here_ms / 1000 if here_ms > 0 else 0.0
        return Prospects(there_s, here_s, deadline_s, wait.as_expected(there_s, now))


class Line:
    """Of a prefill worker, from its own reports."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._longest_step_ms = 0.0

    def observe(self, report: LoadReport) -> None:
        prefills = [timing for timing in report.timings if timing.num_prefill_tokens]
        if prefills:
            num_tokens = sum([timing.num_prefill_tokens for timing in prefills])
            self._pace.observe(num_tokens, sum([timing.duration_ms for timing in prefills]))
        steps_ms = [timing.duration_ms for timing in report.timings]
        self._longest_step_ms = max(_FADING * self._longest_step_ms, *steps_ms, 0.0)

    def expected_ms(self, num_tokens: int) -> float:
        """Until so many are computed; 0: no idea."""
        return self._pace.expected_ms(num_tokens)

    @property
    def silence_ms(self) -> float:
        """What may pass until the next word."""
        return 2 * WORD_S * 1000 + _STEPS_BETWEEN_WORDS * self._longest_step_ms
