"""Load of every worker over time, in bounded memory: when there are too many samples, every second one goes."""

from dataclasses import dataclass, field

_MAX_SAMPLES = 512
_FIRST_INTERVAL_S = 0.25


@dataclass(slots=True)
class LoadHistory:
    """Open sequences per worker, sampled at a regular interval that doubles as time goes on."""

    interval_s: float = _FIRST_INTERVAL_S
    due_s: float = 0.0
    """When the next sample is wanted."""
    times_s: list[float] = field(default_factory=list[float])
    loads: list[list[int]] = field(default_factory=list[list[int]])
    """Per sample, per worker."""

    def note(self, now: float, load: list[int]) -> None:
        self.times_s.append(now)
        self.loads.append(load)
        if len(self.times_s) > _MAX_SAMPLES:
            self.times_s, self.loads = self.times_s[::2], self.loads[::2]
            self.interval_s *= 2
        self.due_s = now + self.interval_s
