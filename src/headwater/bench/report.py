"""From records to figures: percentiles, goodput under an SLO, a table and JSON.

Percentiles are linear interpolations between closest ranks. Inter-token latency is taken over the gaps between events
that carry text; time per output token over whole requests: (end - first token) / (tokens - 1). The interval beside a
mean is its 95 % confidence interval by the normal approximation (requests taken as independent).
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev

import msgspec
from rich.table import Table

from headwater.bench.load import RequestRecord
from headwater.bench.process_cpu import ProcessUsage

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good when it meets every limit that is set."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        return (
            record.error is None
            and _within(record.ttft_s, self.ttft_ms)
            and _within(tpot_s(record), self.tpot_ms)
            and _within(record.e2e_s, self.e2e_ms)
        )


class Distribution(msgspec.Struct, frozen=True):
    """One latency in milliseconds."""

    count: int
    mean_ms: float
    mean_ci95_ms: float
    min_ms: float
    max_ms: float
    percentiles_ms: dict[str, float]


class ServerCost(msgspec.Struct, frozen=True):
    """What a process tree used during the run."""

    pid: int
    cpu_s: float
    cpu_ms_per_request: float
    cpu_us_per_output_token: float
    rss_mib: float


class Report(msgspec.Struct, frozen=True):
    """Everything a run says, as `--json` prints it."""

    requests: int
    completed: int
    failed: int
    duration_s: float
    request_rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    good_requests: int
    goodput_per_s: float
    reads_per_request: float
    """Socket reads the client saw: how far tokens were joined."""
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    errors: dict[str, int]
    servers: list[ServerCost] = []


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first; None with fewer than two tokens."""
    if record.e2e_s is None or record.ttft_s is None or record.output_tokens < 2:
        return None
    return (record.e2e_s - record.ttft_s) / (record.output_tokens - 1)


def percentile(ordered: list[float], percent: float) -> float:
    """Of values in ascending order."""
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def distribution(seconds: list[float]) -> Distribution | None:
    """In milliseconds; None of nothing."""
    if not seconds:
        return None
    values = sorted(value * 1000 for value in seconds)
    return Distribution(
        count=len(values),
        mean_ms=fmean(values),
        mean_ci95_ms=1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0,
        min_ms=values[0],
        max_ms=values[-1],
        percentiles_ms={f"p{percent}": percentile(values, percent) for percent in PERCENTILES},
    )


def summarise(
    records: list[RequestRecord],
    duration_s: float,
    slo: Slo,
    usage: dict[int, tuple[ProcessUsage, ProcessUsage]] | None = None,
) -> Report:
    """Figures of one run. `usage`: per process, before and after."""
    good = [record for record in records if record.error is None]
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    met = sum(slo.met_by(record) for record in good)
    return Report(
        requests=len(records),
        completed=len(good),
        failed=len(records) - len(good),
        duration_s=duration_s,
        request_rate_per_s=len(good) / duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(output_tokens + prompt_tokens) / duration_s,
        good_requests=met,
        goodput_per_s=met / duration_s,
        reads_per_request=fmean(record.reads for record in good) if good else 0.0,
        ttft=distribution([record.ttft_s for record in good if record.ttft_s is not None]),
        itl=distribution(list(chain.from_iterable(record.gaps_s for record in good))),
        tpot=distribution([value for record in good if (value := tpot_s(record)) is not None]),
        e2e=distribution([record.e2e_s for record in good if record.e2e_s is not None]),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common(10)),
        servers=[_cost(pid, *pair, len(good), output_tokens) for pid, pair in (usage or {}).items()],
    )


def tables(report: Report) -> list[Table]:
    """For people."""
    totals = Table(title="Load", show_header=False)
    for name, value in _totals(report):
        totals.add_row(name, value)
    latency = Table(title="Latency, ms")
    for column in ("", "mean", "±95 %", *(f"p{percent}" for percent in PERCENTILES), "max"):
        latency.add_column(column, justify="left" if not column else "right")
    for name, values in (("TTFT", report.ttft), ("ITL", report.itl), ("TPOT", report.tpot), ("E2E", report.e2e)):
        if values is not None:
            figures = (values.mean_ms, values.mean_ci95_ms, *values.percentiles_ms.values(), values.max_ms)
            latency.add_row(name, *(f"{figure:,.1f}" for figure in figures))
    return [totals, latency]


def _totals(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("completed / failed", f"{report.completed:,} / {report.failed:,}"),
        ("duration", f"{report.duration_s:,.2f} s"),
        ("requests", f"{report.request_rate_per_s:,.2f} /s"),
        ("goodput", f"{report.goodput_per_s:,.2f} /s ({report.good_requests:,} good)"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("output tokens", f"{report.output_tokens:,} ({report.output_tokens_per_s:,.1f} /s)"),
        ("reads per request", f"{report.reads_per_request:,.1f}"),
    ]
    for cost in report.servers:
        figures = f"{cost.cpu_s:,.2f} s, {cost.cpu_ms_per_request:.3f} ms/request"
        rows.append((f"CPU of process {cost.pid}", f"{figures}, {cost.rss_mib:,.0f} MiB resident"))
    return rows + [(f"error x{count}", message) for message, count in report.errors.items()]


def _cost(pid: int, before: ProcessUsage, after: ProcessUsage, requests: int, output_tokens: int) -> ServerCost:
    cpu_s = after.cpu_s - before.cpu_s
    return ServerCost(
        pid=pid,
        cpu_s=cpu_s,
        cpu_ms_per_request=1e3 * cpu_s / max(1, requests),
        cpu_us_per_output_token=1e6 * cpu_s / max(1, output_tokens),
        rss_mib=after.rss_bytes / 2**20,
    )


def _within(value_s: float | None, limit_ms: float | None) -> bool:
    return limit_ms is None or value_s is None or value_s * 1000 <= limit_ms
