"""Thins out load reports: an engine makes one per step, the cluster needs about twenty a second."""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from headwater.protocol.events import LoadReport, StepTiming

REPORT_INTERVAL_S = 0.05
SHARED_INTERVAL_S = 0.02
"""When several frontends have to know of each other's requests."""
MAX_TIMINGS = 256
_MAX_REMEMBERED = 128
"""Of steps with and of steps without prefill."""


class LoadReporter:
    """Passes on the newest report at once or after the interval; step timings of those between are kept, bounded."""

    def __init__(self, publish: Callable[[LoadReport], None], interval_s: float = REPORT_INTERVAL_S) -> None:
        self.interval_s = interval_s
        self._publish = publish
        self._newest: LoadReport | None = None
        self._sent: LoadReport | None = None
        self._timings: deque[StepTiming] = deque(maxlen=MAX_TIMINGS)
        self._remembered = (deque[StepTiming](maxlen=_MAX_REMEMBERED), deque[StepTiming](maxlen=_MAX_REMEMBERED))
        self._last = -interval_s
        self._timer: asyncio.TimerHandle | None = None

    def offer(self, report: LoadReport) -> None:
        self._newest = report
        self._timings += report.timings
        for timing in report.timings:
            self._remembered[timing.num_prefill_tokens > 0].append(timing)
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._last + self.interval_s - loop.time()
        if wait_s <= 0:
            self._send(loop)
        else:
            self._timer = loop.call_later(wait_s, self._send, loop)

    def repeat(self, starved_ms: float = 0.0) -> None:
        """What goes with a report has changed: send the last one again, if no newer one is about to be sent."""
        if self._sent is not None and self._timer is None:
            self.offer(msgspec.structs.replace(self._sent, starved_ms=starved_ms) if starved_ms else self._sent)

    def recall(self) -> list[LoadReport]:
        """The last report, if any, with what is remembered of steps so far: for those who join now."""
        if self._sent is None:
            return []
        decodes, prefills = self._remembered
        return [msgspec.structs.replace(self._sent, timings=[*decodes, *prefills])]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._last = loop.time()
        report, self._newest = self._newest, None
        if report is not None:
            self._sent = msgspec.structs.replace(report, timings=[], starved_ms=0.0)
            self._publish(msgspec.structs.replace(report, timings=list(self._timings)))
        self._timings.clear()
