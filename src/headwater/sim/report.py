"""Figures of simulated runs, one object per trace, worker count, policy and mode."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from headwater.bench.report import percentile
from headwater.kv.index import block_keys
from headwater.sim.cluster import SimRecord, SimResult
from headwater.sim.workload import SimRequest


class SimReport(msgspec.Struct, frozen=True):
    """One row. Times in ms; `hit_rate` and `ceiling` are parts of all prompt tokens."""

    trace: str
    workers: int
    policy: str
    mode: str
    """`x1` (arrival speed) or `closed16` (requests in flight per worker)."""
    requests: int
    hit_rate: float
    ceiling: float
    """What one LRU cache as large as all workers' together would have reached, in order of arrival."""
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_mean: float
    """Mean over requests of the time per output token after the first."""
    e2e_ms_mean: float
    e2e_ms_p99: float
    output_tok_s: float
    imbalance: float
    """Busiest worker's busy time over the mean."""
    predicted_hit_rate: float
    """What the router expected when it chose."""
    sim_requests_per_min: float = 0.0
    """Simulated requests per minute of this machine's CPU time."""


def summarise(
    result: SimResult, *, trace: str, policy: str, mode: str, ceiling: float, cpu_s: float = 0.0
) -> SimReport:
    """Figures of one run."""
    records = result.records
    ttft = sorted((record.first_token_s - record.arrived_s) * 1e3 for record in records)
    e2e = sorted((record.finished_s - record.arrived_s) * 1e3 for record in records)
    prompt_tokens = sum(record.request.prompt_tokens for record in records)
    return SimReport(
        trace=trace,
        workers=len(result.busy_ms),
        policy=policy,
        mode=mode,
        requests=len(records),
        hit_rate=sum(record.cached_tokens for record in records) / prompt_tokens,
        ceiling=ceiling,
        ttft_ms_mean=fmean(ttft),
        ttft_ms_p50=percentile(ttft, 50),
        ttft_ms_p99=percentile(ttft, 99),
        itl_ms_mean=fmean([itl_ms(record) for record in records if record.request.output_tokens > 1] or [0.0]),
        e2e_ms_mean=fmean(e2e),
        e2e_ms_p99=percentile(e2e, 99),
        output_tok_s=sum(record.request.output_tokens for record in records) / max(result.duration_s, 1e-9),
        imbalance=max(result.busy_ms) / max(fmean(result.busy_ms), 1e-9),
        predicted_hit_rate=sum(record.predicted_cached_tokens for record in records) / prompt_tokens,
        sim_requests_per_min=len(records) / cpu_s * 60 if cpu_s else 0.0,
    )


def itl_ms(record: SimRecord) -> float:
    """Time per output token after the first."""
    return (record.finished_s - record.first_token_s) * 1e3 / (record.request.output_tokens - 1)


def shared_lru_hit_rate(requests: Iterable[SimRequest], capacity_blocks: int, block_size: int) -> float:
    """Part of the prompt tokens that one LRU cache of `capacity_blocks` holds when their request comes."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit_tokens = prompt_tokens = 0
    for request in requests:
        keys = block_keys(request.block_ids)
        hit = 0
        while hit < len(keys) and keys[hit] in cache:
            hit += 1
        hit_tokens += min(hit * block_size, request.prompt_tokens - 1)
        prompt_tokens += request.prompt_tokens
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return hit_tokens / max(1, prompt_tokens)


def rows(reports: Sequence[SimReport]) -> list[tuple[str, ...]]:
    """Cells for a table, under `COLUMNS`."""
    return [
        (
            report.trace,
            str(report.workers),
            report.mode,
            report.policy,
            f"{report.hit_rate:.1%}",
            f"{report.ceiling:.1%}",
            f"{report.ttft_ms_mean:,.0f}",
            f"{report.ttft_ms_p99:,.0f}",
            f"{report.itl_ms_mean:,.1f}",
            f"{report.e2e_ms_mean:,.0f}",
            f"{report.e2e_ms_p99:,.0f}",
            f"{report.output_tok_s:,.0f}",
            f"{report.imbalance:.2f}",
        )
        for report in reports
    ]


COLUMNS = (
    "trace",
    "workers",
    "mode",
    "policy",
    "hit",
    "ceiling",
    "TTFT ms",
    "p99",
    "ITL ms",
    "E2E ms",
    "p99",
    "tok/s",
    "imbalance",
)
