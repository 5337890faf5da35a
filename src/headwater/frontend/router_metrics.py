"""Numbers about routing: decisions, how good predictions are, overlap taken and missed, the queue, the index."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headwater.frontend.histogram import Histogram
from headwater.router.decisions import DecisionRecord
from headwater.router.view import ClusterView

_ERROR_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4, 10)
_WAIT_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_MAX_KINDS = 64


class RouterMetrics:
    """Plain counters; whoever does the work counts."""

    def __init__(self) -> None:
        self.decisions: dict[str, int] = {}
        self.predicted_cached_tokens = 0
        self.actual_cached_tokens = 0
        """Of the same requests."""
        self.overlap_taken_tokens = 0
        self.overlap_missed_tokens = 0
        self.detours = 0
        self.ttft_error = Histogram(_ERROR_BOUNDS)
        self.ttft_ratio = Histogram(_RATIO_BOUNDS)
        self.queue_wait = Histogram(_WAIT_BOUNDS)
        self.refused: dict[str, int] = {}
        self.waiting = 0

    def decided(self, record: DecisionRecord, policy: str) -> None:
        if policy in self.decisions or len(self.decisions) < _MAX_KINDS:
            self.decisions[policy] = self.decisions.get(policy, 0) + 1
        self.overlap_taken_tokens += record.predicted_cached_tokens
        self.overlap_missed_tokens += record.best_cached_tokens - record.predicted_cached_tokens

    def first_token(self, record: DecisionRecord) -> None:
        if record.cached_tokens is not None:
            self.predicted_cached_tokens += record.predicted_cached_tokens
            self.actual_cached_tokens += record.cached_tokens
        predicted_ms, actual_ms = record.predicted_ttft_ms, record.ttft_ms
        if predicted_ms is not None and actual_ms is not None:
            self.ttft_error.observe(abs(actual_ms - predicted_ms) / 1e3)
            if predicted_ms > 0:
                self.ttft_ratio.observe(actual_ms / predicted_ms)

    def refuse(self, code: str) -> None:
        if code in self.refused or len(self.refused) < _MAX_KINDS:
            self.refused[code] = self.refused.get(code, 0) + 1


class RouterCollector(Collector):
    def __init__(self, metrics: RouterMetrics, view: ClusterView) -> None:
        self._metrics = metrics
        self._view = view

    def collect(self) -> Iterator[Metric]:
        metrics, index = self._metrics, self._view.residency.index.stats()
        yield _by_label("headwater_router_decisions", "Decisions by policy.", "policy", metrics.decisions)
        yield _by_label(
            "headwater_router_refused", "Requests refused before a worker had them.", "code", metrics.refused
        )
        for name, help_text, count in (
            ("detours", "Sequences sent to another worker because one refused.", metrics.detours),
            ("predicted_cached_tokens", "Prompt tokens expected to be cached.", metrics.predicted_cached_tokens),
            ("actual_cached_tokens", "Prompt tokens of the same requests that were.", metrics.actual_cached_tokens),
            ("overlap_taken_tokens", "Cached tokens of the workers chosen, as known.", metrics.overlap_taken_tokens),
            ("overlap_missed_tokens", "What the best holders had beyond these.", metrics.overlap_missed_tokens),
            ("index_dropped_blocks", "Blocks not remembered for want of room.", index.num_dropped),
        ):
            yield CounterMetricFamily(f"headwater_router_{name}", help_text, value=count)
        yield _histogram("ttft_error_seconds", "Difference of predicted and real first token.", metrics.ttft_error)
        yield _histogram("ttft_ratio", "Real over predicted time to the first token.", metrics.ttft_ratio)
        yield _histogram("queue_wait_seconds", "Time in line, of those that were placed.", metrics.queue_wait)
        yield GaugeMetricFamily("headwater_router_queue_waiting", "Requests in line.", value=metrics.waiting)
        yield GaugeMetricFamily(
            "headwater_router_index_blocks", "Blocks remembered.", value=sum(index.num_blocks.values())
        )
        yield self._knowledge()

    def _knowledge(self) -> Metric:
        known = GaugeMetricFamily(
            "headwater_worker_kv_events", "1: it tells what it has cached; 0: that is guessed.", labels=["worker_id"]
        )
        for worker in self._view.workers:
            tells = self._view.residency.sends_events(worker.worker_id)
            if tells is not None:
                known.add_metric([worker.worker_id], float(tells))
        return known


def _by_label(name: str, help_text: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _histogram(name: str, help_text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(f"headwater_router_{name}", help_text)
    family.add_metric([], histogram.cumulative(), histogram.sum)
    return family
