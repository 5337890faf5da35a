"""Numbers per tenant, for Prometheus: what each took since this frontend started, what was refused, what is left."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headwater.frontend.tenants.meter import Meter

_MAX_SHOWN = 512
"""Tenants with numbers of their own: names may be a gateway's to choose."""


class TenantCollector(Collector):
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        accounts = dict(sorted(self._meter.accounts.items())[:_MAX_SHOWN])
        for name, help_text, read in _COUNTERS:
            counter = CounterMetricFamily(f"headwater_tenant_{name}", help_text, labels=["tenant"])
            for tenant, account in accounts.items():
                counter.add_metric([tenant], read(account.since_start))
            yield counter
        running = GaugeMetricFamily("headwater_tenant_requests_running", "In progress here.", labels=["tenant"])
        month = GaugeMetricFamily("headwater_tenant_month_tokens", "Tokens used this month.", labels=["tenant"])
        refused = CounterMetricFamily(
            "headwater_tenant_refused", "Requests refused for a quota.", labels=["tenant", "quota"]
        )
        for tenant, account in accounts.items():
            running.add_metric([tenant], account.own_in_progress)
            month.add_metric([tenant], account.spent.month_tokens)
            for quota, count in account.refused.items():
                refused.add_metric([tenant, quota], count)
        yield from (running, month, refused)


_COUNTERS = (
    ("requests", "Requests that a worker was given and that ended.", lambda usage: float(usage.requests)),
    ("prompt_tokens", "Prompt tokens sent to workers.", lambda usage: float(usage.prompt_tokens)),
    ("cached_tokens", "Of these, cached.", lambda usage: float(usage.cached_tokens)),
    ("generation_tokens", "Tokens generated.", lambda usage: float(usage.output_tokens)),
    ("accelerator_seconds", "Worker time by the time model.", lambda usage: usage.accelerator_ms / 1e3),
)
