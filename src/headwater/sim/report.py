"""Figures of simulated runs, one object per trace, worker count, policy and mode."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import msgspec

from headwater.bench.report import percentile
from headwater.errors import ConfigError
from headwater.kv.index import block_keys
from headwater.sim.cluster import SimConfig
from headwater.sim.records import SimRecord, SimResult
from headwater.sim.workload import SimRequest

_CURVE_POINTS = 100


class SimReport(msgspec.Struct, frozen=True):
    """One row. Times in ms; `hit_rate` and `ceiling` are parts of all prompt tokens."""

    trace: str
    workers: int
    policy: str
    mode: str
    """`x1` (arrival speed) or `closed16` (requests in flight per worker); after the pools, if any: `2P+6D x1`."""
    requests: int
    hit_rate: float
    ceiling: float
    """What one LRU cache as large as all workers' together would have reached, in order of arrival."""
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_mean: float
    """Over all gaps between tokens of all requests."""
    tpot_ms_mean: float
    """Over requests, of the time per output token after the first."""
    e2e_ms_mean: float
    e2e_ms_p50: float
    e2e_ms_p99: float
    output_tok_s: float
    steady_tok_s: float
    """The same from when a tenth of the requests had come to when the last came: without filling and emptying."""
    imbalance: float
    """Busiest worker's busy time over the mean; of pools, that of the more uneven one."""
    prefill_imbalance: float
    """Most prompt tokens computed by a worker over the mean; of pools, over that of the prefill workers."""
    utilisation: float
    """Part of the time that a worker was busy, mean."""
    predicted_hit_rate: float
    """What the router expected when it chose."""
    loaded_rate: dict[str, float] = {}
    """Part of all prompt tokens that came from each tier outside the engines; they count in `hit_rate`."""
    remote_rate: float = 0.0
    """Part of the requests whose prompt was computed by a prefill worker."""
    fell_back: int = 0
    """Requests that were to be, and had to be computed where they decode, in part at least."""
    moved_bytes: int = 0
    """KV, from prefill to decode workers."""
    pool_utilisation: dict[str, float] = {}
    """Of prefill and decode workers, each by themselves."""
    refused: int = 0
    """By the router's queue; they count in no other figure."""
    sim_requests_per_min: float = 0.0
    """Simulated requests per minute of this machine's CPU time."""

    @property
    def pools(self) -> str:
        """`2P+6D`; empty when every worker does both."""
        return self.mode.rpartition(" ")[0]


class SimCurves(msgspec.Struct, frozen=True):
    """What a chart of a run needs."""

    ttft_ms: list[float]
    """101 quantiles, from the least to the most."""
    itl_ms: list[float]
    """The same, of the mean gap of each request."""
    times_s: list[float]
    loads: list[list[int]]
    """Open sequences per worker at these times."""


def mode_of(config: SimConfig) -> str:
    pools = "" if config.pools is None else f"{config.pools} "
    if config.in_flight_per_worker is not None:
        return f"{pools}closed{config.in_flight_per_worker}"
    return f"{pools}x{config.arrival_speed:g}"


def summarise(
    result: SimResult, *, trace: str, policy: str, mode: str, ceiling: float, block_tokens: int = 0, cpu_s: float = 0.0
) -> SimReport:
    """Figures of one run. Raises `ConfigError` when nothing was served."""
    records = result.records
    if not records:
        raise ConfigError(f"{trace}, {policy}: no request was served ({result.num_refused} were refused)")
    ttft, e2e = _sorted_ms(records, _ttft_ms), _sorted_ms(records, _e2e_ms)
    prompt_tokens = sum([record.prompt_tokens for record in records])
    output_tokens = sum([record.output_tokens for record in records])
    decoding_ms = sum([_e2e_ms(record) - _ttft_ms(record) for record in records])
    duration_s = max(result.duration_s, 1e-9)
    busy = _by_pool(result, result.busy_ms)
    return SimReport(
        trace=trace,
        workers=len(result.busy_ms),
        policy=policy,
        mode=mode,
        requests=len(records),
        hit_rate=sum([record.cached_tokens for record in records]) / prompt_tokens,
        ceiling=ceiling,
        ttft_ms_mean=fmean(ttft),
        ttft_ms_p50=percentile(ttft, 50),
        ttft_ms_p99=percentile(ttft, 99),
        itl_ms_mean=decoding_ms / max(1, output_tokens - len(records)),
        tpot_ms_mean=fmean(_sorted_ms(_several(records), _tpot_ms) or [0.0]),
        e2e_ms_mean=fmean(e2e),
        e2e_ms_p50=percentile(e2e, 50),
        e2e_ms_p99=percentile(e2e, 99),
        output_tok_s=output_tokens / duration_s,
        steady_tok_s=_steady_tok_s(records),
        imbalance=max(map(_imbalance, busy.values())),
        prefill_imbalance=_imbalance(next(iter(_by_pool(result, result.prefill_tokens).values()))),
        utilisation=fmean(result.busy_ms) / duration_s / 1e3,
        predicted_hit_rate=sum([record.predicted_cached_tokens for record in records]) / prompt_tokens,
        loaded_rate={tier: count * block_tokens / prompt_tokens for tier, count in result.loaded_blocks.items()},
        remote_rate=sum([record.prefiller >= 0 for record in records]) / len(records),
        fell_back=result.handoffs.fell_back,
        moved_bytes=result.handoffs.moved_bytes,
        pool_utilisation={pool: fmean(ms) / duration_s / 1e3 for pool, ms in busy.items() if pool},
        refused=result.num_refused,
        sim_requests_per_min=len(records) / cpu_s * 60 if cpu_s else 0.0,
    )


def curves(result: SimResult) -> SimCurves:
    """Distributions and load over time of one run."""
    return SimCurves(
        ttft_ms=_quantiles(_sorted_ms(result.records, _ttft_ms)),
        itl_ms=_quantiles(_sorted_ms(_several(result.records), _tpot_ms)),
        times_s=result.history.times_s,
        loads=result.history.loads,
    )


def shared_lru_hit_rate(requests: Iterable[SimRequest], capacity_blocks: int, block_size: int) -> float:
    """Part of the prompt tokens that one LRU cache of `capacity_blocks` holds when their request comes."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit_tokens = prompt_tokens = 0
    for request in requests:
        keys = block_keys(request.block_ids + request.answer_ids)
        num_prompt_blocks = request.prompt_tokens // block_size
        hit = 0
        while hit < num_prompt_blocks and keys[hit] in cache:
            hit += 1
        hit_tokens += min(hit * block_size, request.prompt_tokens - 1)
        prompt_tokens += request.prompt_tokens
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return hit_tokens / max(1, prompt_tokens)


def _ttft_ms(record: SimRecord) -> float:
    return (record.first_token_s - record.arrived_s) * 1e3


def _e2e_ms(record: SimRecord) -> float:
    return (record.finished_s - record.arrived_s) * 1e3


def _tpot_ms(record: SimRecord) -> float:
    return (record.finished_s - record.first_token_s) * 1e3 / (record.output_tokens - 1)


def _several(records: Sequence[SimRecord]) -> list[SimRecord]:
    return [record for record in records if record.output_tokens > 1]


def _sorted_ms(records: Sequence[SimRecord], figure: Callable[[SimRecord], float]) -> list[float]:
    return sorted([figure(record) for record in records])


def _quantiles(values: list[float]) -> list[float]:
    return [percentile(values, point) for point in range(_CURVE_POINTS + 1)] if values else []


def _steady_tok_s(records: Sequence[SimRecord]) -> float:
    begin_s, end_s = records[len(records) // 10].arrived_s, records[-1].arrived_s
    tokens = sum([record.output_tokens for record in records if begin_s < record.finished_s <= end_s])
    return tokens / (end_s - begin_s) if end_s > begin_s else 0.0


def _by_pool(result: SimResult, per_worker: Sequence[float]) -> dict[str, Sequence[float]]:
    """Prefill workers come first; one nameless pool when every worker does both."""
    split = result.num_prefill_workers
    return {"prefill": per_worker[:split], "decode": per_worker[split:]} if split else {"": per_worker}


def _imbalance(per_worker: Sequence[float]) -> float:
    return max(per_worker) / max(fmean(per_worker), 1e-9)


_COLUMNS = ("policy", "hit", "TTFT ms", "p99", "ITL ms", "E2E ms", "p99", "tok/s")


def columns(report: SimReport) -> tuple[str, ...]:
    """Of a table of reports of one kind."""
    return (*_COLUMNS, "remote", "GB") if report.pools else (*_COLUMNS, "imbal.")


def cells(report: SimReport) -> tuple[str, ...]:
    """One row under `columns`."""
    remote = (f"{report.remote_rate:.0%}", f"{report.moved_bytes / 1e9:,.0f}")
    return (
        report.policy,
        f"{report.hit_rate:.1%}",
        f"{report.ttft_ms_mean:,.0f}",
        f"{report.ttft_ms_p99:,.0f}",
        f"{report.itl_ms_mean:,.1f}",
        f"{report.e2e_ms_mean:,.0f}",
        f"{report.e2e_ms_p99:,.0f}",
        f"{report.output_tok_s:,.0f}",
        *(remote if report.pools else (f"{report.imbalance:.2f}",)),
    )
