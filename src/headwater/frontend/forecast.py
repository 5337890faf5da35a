"""How long will a new request wait for its first token? What waits, divided by the rate at which waiting ends.

The rate is measured only while something waits, so it is what the cluster can do, not what it is asked to; time at the
end of which all who waited had left again does not count. Before enough was seen, whoever asks may know what the time
model expects of such requests (`expected_per_s`). By Little's law the quotient is the wait. A tenant waits for
its own requests at its share of the rate, or for everybody's at the whole rate, whichever is sooner. Who would wait
longer than it may is refused at once and told when to come back, so that what is taken in can be answered in time
however much is asked. Pure: time comes in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.errors import Overloaded

_MEMORY_S = 10.0
"""Busy time in which the weight of what was measured falls to a third."""
_LEAST_SAMPLES = 8.0
"""First tokens to be seen before the rate is believed."""
_MARGIN = 0.7
"""Of the time allowed: waits scatter."""
_LONGEST_RETRY_S = 60.0


@dataclass(slots=True)
class _Model:
    waiting: dict[str, int] = field(default_factory=dict[str, int])
    """Sequences without a first token, by tenant."""
    total: int = 0
    started: float = 0.0
    busy_s: float = 0.0
    """Time in which something waited, up to the last first token, ..."""
    unproven_s: float = 0.0
    """... and since then."""
    last: float = 0.0

    def pass_time(self, now: float) -> None:
        """To be called before anything changes."""
        elapsed_s = now - self.last
        self.last = now
        if self.total and elapsed_s > 0:
            fade = math.exp(-elapsed_s / _MEMORY_S)
            self.started *= fade
            self.busy_s *= fade
            self.unproven_s = self.unproven_s * fade + elapsed_s

    @property
    def rate_per_s(self) -> float:
        """0 while it is not known."""
        busy_s = self.busy_s + self.unproven_s
        return self.started / busy_s if self.started >= _LEAST_SAMPLES and busy_s > 0 else 0.0


class Forecast:
    """Of one frontend; each measures what it gets of the workers."""

    def __init__(self, tenant_weights: Mapping[str, float] | None = None) -> None:
        self._models: dict[str, _Model] = {}
        self._weights = {} if tenant_weights is None else tenant_weights

    def wait_s(self, model: str, tenant: str, now: float, expected_per_s: float = 0.0) -> float:
        """Of one more sequence; 0 while nothing is known. The first of all waits for nobody: what its prompt alone
        takes is for the queue to say."""
        found = self._model(model, now)
        rate = found.rate_per_s or (expected_per_s if found.total else 0.0)
        if not rate:
            return 0.0
        own = found.waiting.get(tenant, 0) + 1
        active = found.waiting.keys() | {tenant}
        share = self._weight(tenant) / sum(self._weight(name) for name in active)
        return min(found.total + 1, own / share) / rate

    def knows(self, model: str, now: float) -> bool:
        """Whether enough was seen."""
        return self._model(model, now).rate_per_s > 0

    def admit(self, model: str, tenant: str, allowed_s: float, now: float, expected_per_s: float = 0.0) -> None:
        """Raises `Overloaded` for who would wait longer than that."""
        wait_s = self.wait_s(model, tenant, now, expected_per_s)
        if wait_s > _MARGIN * allowed_s:
            raise Overloaded(
                f"the first token would take about {wait_s:.1f} s, more than {_MARGIN:.0%} "
                f"of the {max(0.0, allowed_s):.1f} s allowed",
                retry_after_s=min(_LONGEST_RETRY_S, max(1.0, wait_s - _MARGIN * allowed_s)),
            )

    def admit_any(self, tenant: str, allowed_s: float, now: float) -> None:
        """The same for who has not said for which model: raises `Overloaded` if it would be too long for any."""
        soonest = min(self._models, key=lambda model: self.wait_s(model, tenant, now), default=None)
        if soonest is not None:
            self.admit(soonest, tenant, allowed_s, now)

    def came(self, model: str, tenant: str, count: int, now: float) -> None:
        found = self._model(model, now)
        found.waiting[tenant] = found.waiting.get(tenant, 0) + count
        found.total += count

    def began(self, model: str, tenant: str, now: float) -> None:
        """A sequence has its first token."""
        found = self._model(model, now)
        found.started += 1.0
        found.busy_s += found.unproven_s
        found.unproven_s = 0.0
        self.left(model, tenant, now)

    def left(self, model: str, tenant: str, now: float) -> None:
        """A sequence ended without one. If it was the last, the time since the last first token shows nothing."""
        found = self._model(model, now)
        found.total -= 1
        if not found.total:
            found.unproven_s = 0.0
        found.waiting[tenant] -= 1
        if not found.waiting[tenant]:
            del found.waiting[tenant]

    def _model(self, model: str, now: float) -> _Model:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _Model(last=now)
        found.pass_time(now)
        return found

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
