"""Numbers of this frontend: plain counters and arrays on the hot path, Prometheus text only when asked.

Names follow vLLM's, with our prefix. Per model: tokens, running requests, time to first token, gap between tokens,
whole duration, time before a worker was given the request. Per route and status: answers. Per worker: what its last
load report says, and what this frontend has booked on it.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headwater.frontend.fault_metrics import FaultCollector, FaultMetrics
from headwater.frontend.histogram import Histogram
from headwater.frontend.router_metrics import RouterCollector, RouterMetrics
from headwater.frontend.tenants.meter import Meter
from headwater.frontend.tenants.metrics import TenantCollector
from headwater.router.view import ClusterView
from headwater.router.worker import WorkerView

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_DURATION_BOUNDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_QUEUE_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_MAX_MODELS = 256
"""Models with numbers of their own; cards come from workers, so their number is not ours to trust."""
_MAX_ANSWER_KINDS = 2048


class ModelMetrics:
    """One model's numbers."""

    __slots__ = (
        "cached_tokens",
        "duration",
        "generated_tokens",
        "inter_token_latency",
        "prompt_tokens",
        "queue_time",
        "running",
        "time_to_first_token",
    )

    def __init__(self) -> None:
        self.running = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.time_to_first_token = Histogram(_TTFT_BOUNDS)
        self.inter_token_latency = Histogram(_GAP_BOUNDS)
        self.duration = Histogram(_DURATION_BOUNDS)
        self.queue_time = Histogram(_QUEUE_BOUNDS)

    def submitted(self, num_prompt_tokens: int, num_sequences: int, waited_s: float) -> None:
        self.running += num_sequences
        self.prompt_tokens += num_prompt_tokens
        self.queue_time.observe(waited_s)

    def ended(self, num_generated: int) -> None:
        self.running -= 1
        self.generated_tokens += num_generated


class FrontendMetrics:
    """All numbers of one frontend."""

    def __init__(self) -> None:
        self.router = RouterMetrics()
        self.faults = FaultMetrics()
        self.models: dict[str, ModelMetrics] = {}
        self.answers: dict[tuple[str, int], int] = {}
        self.disconnects = 0

    def model(self, name: str) -> ModelMetrics:
        found = self.models.get(name)
        if found is None:
            name = name if len(self.models) < _MAX_MODELS else "other"
            found = self.models.setdefault(name, ModelMetrics())
        return found

    def answered(self, route: str, status: int, complete: bool) -> None:
        if not complete:
            self.disconnects += 1
        key = (route, status)
        if key in self.answers or len(self.answers) < _MAX_ANSWER_KINDS:
            self.answers[key] = self.answers.get(key, 0) + 1


class MetricsPage:
    """Makes the text of `/metrics`."""

    def __init__(
        self, metrics: FrontendMetrics, view: ClusterView, connections: Callable[[], int], meter: Meter
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(TenantCollector(meter))
        self._registry.register(_FrontendCollector(metrics, connections))
        self._registry.register(_WorkerCollector(view))
        self._registry.register(RouterCollector(metrics.router, view))
        self._registry.register(FaultCollector(metrics.faults))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _FrontendCollector(Collector):
    def __init__(self, metrics: FrontendMetrics, connections: Callable[[], int]) -> None:
        self._metrics = metrics
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "headwater_http_requests", "Answers by route and status; status 0: gone first.", labels=["route", "status"]
        )
        for (route, status), count in self._metrics.answers.items():
            answers.add_metric([route, str(status)], count)
        yield answers
        yield CounterMetricFamily(
            "headwater_client_disconnects", "Answers that the client did not wait for.", value=self._metrics.disconnects
        )
        yield GaugeMetricFamily("headwater_http_connections", "Open connections.", value=self._connections())
        yield from self._tokens()
        for name, help_text in _HISTOGRAMS.items():
            yield self._histogram(f"headwater_{name}_seconds", help_text, name)

    def _tokens(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("headwater_num_requests_running", "Sequences at workers.", labels=["model_name"])
        prompt = CounterMetricFamily("headwater_prompt_tokens", "Prompt tokens sent.", labels=["model_name"])
        cached = CounterMetricFamily("headwater_prompt_tokens_cached", "Of these, cached.", labels=["model_name"])
        generated = CounterMetricFamily("headwater_generation_tokens", "Tokens generated.", labels=["model_name"])
        for name, model in self._metrics.models.items():
            running.add_metric([name], model.running)
            prompt.add_metric([name], model.prompt_tokens)
            cached.add_metric([name], model.cached_tokens)
            generated.add_metric([name], model.generated_tokens)
        yield from (running, prompt, cached, generated)

    def _histogram(self, metric: str, help_text: str, name: str) -> Metric:
        family = HistogramMetricFamily(metric, help_text, labels=["model_name"])
        for model_name, model in self._metrics.models.items():
            histogram: Histogram = getattr(model, _ATTRIBUTES[name])
            family.add_metric([model_name], histogram.cumulative(), histogram.sum)
        return family


_HISTOGRAMS = {
    "time_to_first_token": "From the complete request to the first token.",
    "inter_token_latency": "Between the tokens of a sequence.",
    "e2e_request_latency": "From the complete request to the end of its answer.",
    "request_queue_time": "From the complete request until a worker was given it.",
}
_ATTRIBUTES = {
    "time_to_first_token": "time_to_first_token",
    "inter_token_latency": "inter_token_latency",
    "e2e_request_latency": "duration",
    "request_queue_time": "queue_time",
}


class _WorkerCollector(Collector):
    """Gauges and counters per worker, from its last report."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        workers = self._view.workers
        up = GaugeMetricFamily("headwater_worker_up", "Whether the worker can be given work.", labels=["worker_id"])
        booked = GaugeMetricFamily("headwater_worker_booked_tokens", "Booked by this frontend.", labels=["worker_id"])
        for worker in workers:
            up.add_metric([worker.worker_id], float(worker.usable))
            tokens = worker.booked_prefill_tokens + worker.booked_output_tokens
            booked.add_metric([worker.worker_id], tokens)
        yield up
        yield booked
        for name, help_text, read in _WORKER_GAUGES:
            yield _fill(GaugeMetricFamily(f"headwater_worker_{name}", help_text, labels=["worker_id"]), workers, read)
        for name, help_text, read in _WORKER_COUNTERS:
            yield _fill(CounterMetricFamily(f"headwater_worker_{name}", help_text, labels=["worker_id"]), workers, read)


_Read = Callable[[WorkerView], float]


def _kv_usage(worker: WorkerView) -> float:
    load = worker.load
    return 1.0 - load.kv_blocks_free / load.kv_blocks_total if load is not None and load.kv_blocks_total else 0.0


def _hit_rate(worker: WorkerView) -> float:
    load = worker.load
    return load.cached_tokens / load.prompt_tokens if load is not None and load.prompt_tokens else 0.0


def _report(name: str) -> _Read:
    return lambda worker: float(getattr(worker.load, name)) if worker.load is not None else 0.0


def _handoffs(name: str) -> _Read:
    return lambda worker: float(getattr(worker.load.handoffs, name)) if worker.load and worker.load.handoffs else 0.0


def _store(name: str) -> _Read:
    return lambda worker: float(getattr(worker.load.store, name)) if worker.load and worker.load.store else 0.0


_WORKER_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("num_requests_running", "Sequences running.", _report("num_running")),
    ("num_requests_waiting", "Sequences waiting.", _report("num_waiting")),
    ("waiting_prefill_tokens", "Prompt tokens not yet computed.", _report("waiting_prefill_tokens")),
    ("kv_cache_usage_ratio", "Share of KV blocks that hold live sequences.", _kv_usage),
    ("prefix_cache_hit_ratio", "Share of prompt tokens found in the cache, since start.", _hit_rate),
)
_WORKER_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("steps", "Engine steps.", _report("steps")),
    ("preemptions", "Sequences set back for want of KV blocks.", _report("preemptions")),
    ("prompt_tokens", "Prompt tokens taken in.", _report("prompt_tokens")),
    ("prefix_cache_hit_tokens", "Prompt tokens found in the cache.", _report("cached_tokens")),
    ("generation_tokens", "Tokens generated.", _report("generated_tokens")),
    ("handoffs", "Prompts computed by another worker.", _handoffs("done")),
    ("handoff_fallbacks", "Prompts that another worker did not deliver.", _handoffs("fell_back")),
    ("handoff_blocks", "KV blocks read from other workers.", _handoffs("blocks_moved")),
    ("store_blocks_loaded", "KV blocks loaded from the node's store.", _store("loaded")),
    ("store_blocks_stored", "KV blocks put into the node's store.", _store("stored")),
    ("store_blocks_dropped", "KV blocks not offered to the store: too much was under way.", _store("dropped")),
    ("store_loads_short", "Requests of which fewer blocks came than were expected.", _store("short")),
)


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily, workers: Iterable[WorkerView], read: _Read
) -> GaugeMetricFamily | CounterMetricFamily:
    for worker in workers:
        if worker.load is not None:
            family.add_metric([worker.worker_id], read(worker))
    return family
