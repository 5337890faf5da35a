"""Numbers about faults: what was cancelled and how far it was, what moved, who was put aside."""

from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Stage = Literal["queued", "prefilling", "decoding", "moving"]


class FaultMetrics:
    """Plain counters; whoever does the work counts."""

    def __init__(self) -> None:
        self.cancelled_by_stage: dict[Stage, int] = dict.fromkeys(("queued", "prefilling", "decoding", "moving"), 0)
        self.moved = 0
        """Times that a sequence went on at another worker."""
        self.poisonous = 0
        """Requests refused because workers died of them."""
        self.quarantined = 0
        """Times that a worker was put aside because it did not move on."""
        self.returned = 0
        """Times that one came back."""
        self.resumed = 0
        """Broken answers that a client came back for."""
        self.waiting: Callable[[], int] = int
        """Sequences without a worker now."""

    def cancelled(self, stage: Stage) -> None:
        self.cancelled_by_stage[stage] += 1


class FaultCollector(Collector):
    def __init__(self, metrics: FaultMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        cancelled = CounterMetricFamily(
            "headwater_cancelled_sequences", "Sequences no longer wanted, by how far they were.", labels=["stage"]
        )
        for stage, count in metrics.cancelled_by_stage.items():
            cancelled.add_metric([stage], count)
        yield cancelled
        for name, help_text, read in _COUNTERS:
            yield CounterMetricFamily(f"headwater_{name}", help_text, value=read(metrics))
        yield GaugeMetricFamily("headwater_sequences_moving", "Sequences without a worker.", value=metrics.waiting())


_Read = Callable[[FaultMetrics], int]
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("moved_sequences", "Sequences that went on at another worker.", lambda metrics: metrics.moved),
    ("poisonous_requests", "Requests refused because two workers died of them.", lambda metrics: metrics.poisonous),
    ("worker_quarantines", "Workers put aside because they did not move on.", lambda metrics: metrics.quarantined),
    ("worker_returns", "Workers that came back from there.", lambda metrics: metrics.returned),
    ("resumed_answers", "Broken answers that a client came back for.", lambda metrics: metrics.resumed),
)
