"""The report of a set of runs as one HTML file: tables and charts, no script, nothing loaded from elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby

from headwater.sim.charts import STYLE, Axis, Series, bar_chart, legend, line_chart
from headwater.sim.report import SimCurves, SimReport

Outcome = tuple[SimReport, SimCurves]

_MAX_LINES = 64
"""Workers drawn one by one; of more, quantiles are drawn."""
_MAX_POINTS = 128
_BANDS = (0.0, 0.1, 0.5, 0.9, 1.0)

PAGE_STYLE = """
:root{color-scheme:light dark;--text:#1c2430;--muted:#5b6675;--grid:#e3e7ed;--page:#fff;--panel:#f7f8fa}
@media (prefers-color-scheme:dark){:root{--text:#e6eaf0;--muted:#9aa6b5;--grid:#2c3440;--page:#12161c;--panel:#191f27}}
body{margin:0 auto;max-width:1500px;padding:1.5rem;background:var(--page);color:var(--text);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2rem 0 .6rem}p{color:var(--muted);margin:.2rem 0 1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{color:var(--muted);font-weight:500}td.best{font-weight:700}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(380px,1fr));gap:1rem;margin:1rem 0}
.charts>div{background:var(--panel);border-radius:8px;padding:.8rem}.legend{max-width:920px}
"""

_TABLE: tuple[tuple[str, str, str, int], ...] = (
    ("hit %", "hit_rate", "{:.1%}", -1),
    ("TTFT ms", "ttft_ms_mean", "{:,.0f}", 1),
    ("p99", "ttft_ms_p99", "{:,.0f}", 1),
    ("ITL ms", "itl_ms_mean", "{:,.1f}", 1),
    ("E2E ms", "e2e_ms_mean", "{:,.0f}", 1),
    ("p99", "e2e_ms_p99", "{:,.0f}", 1),
    ("output tok/s", "output_tok_s", "{:,.0f}", -1),
    ("imbalance", "imbalance", "{:.2f}", 1),
    ("utilisation", "utilisation", "{:.0%}", 0),
)
"""Title, field, format, and whether less (1) or more (-1) is better."""
_POOLS: tuple[tuple[str, Callable[[SimReport], str]], ...] = (
    ("computed remotely", lambda report: f"{report.remote_rate:.0%}"),
    ("moved GB", lambda report: f"{report.moved_bytes / 1e9:,.0f}"),
    ("prefill busy", lambda report: f"{report.pool_utilisation['prefill']:.0%}"),
    ("decode busy", lambda report: f"{report.pool_utilisation['decode']:.0%}"),
)
"""More columns, for pools."""


def page(outcomes: Sequence[Outcome], title: str = "Simulated cluster") -> str:
    """The whole file."""
    policies = list(dict.fromkeys(report.policy for report, _ in outcomes))
    colours = {policy: number for number, policy in enumerate(policies)}
    sections = [_section(list(group), colours) for _, group in groupby(outcomes, key=lambda outcome: _cell(outcome[0]))]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{PAGE_STYLE}{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1><p>All times are simulated. The dashed line beside hit rates is what one LRU "
        f"cache as large as all workers' together would have reached.</p>"
        f'<div class="legend">{legend(list(colours.items()))}</div>'
        f"{''.join(_pareto(outcomes, colours))}{''.join(sections)}</body></html>\n"
    )


def _cell(report: SimReport) -> tuple[str, int, str]:
    return report.trace, report.workers, report.mode


def _section(outcomes: Sequence[Outcome], colours: dict[str, int]) -> str:
    first = outcomes[0][0]
    charts = [
        _cdf("Time to first token", "ms", [(r.policy, c.ttft_ms) for r, c in outcomes], colours),
        _cdf("Time per output token", "ms", [(r.policy, c.itl_ms) for r, c in outcomes], colours),
        _hit_rates([report for report, _ in outcomes], colours),
        *_loads(outcomes, colours),
    ]
    panels = "".join([f"<div>{chart}</div>" for chart in charts])
    heading = f"{escape(first.trace)}, {first.workers} workers, {escape(first.mode)}, {first.requests:,} requests"
    return f'<h2>{heading}</h2>{_table([r for r, _ in outcomes])}<div class="charts">{panels}</div>'


def _table(reports: Sequence[SimReport]) -> str:
    titles = [title for title, *_ in _TABLE] + ([title for title, _ in _POOLS] if reports[0].pools else [])
    head = "".join([f"<th>{title}</th>" for title in titles])
    rows = "".join([f"<tr><td>{escape(report.policy)}</td>{_cells(report, reports)}</tr>" for report in reports])
    return f'<div class="wide"><table><tr><th>policy</th>{head}</tr>{rows}</table></div>'


def _cells(report: SimReport, reports: Sequence[SimReport]) -> str:
    parts: list[str] = []
    for _, field, form, sense in _TABLE:
        value = getattr(report, field)
        best = sense and sense * value == min(sense * getattr(other, field) for other in reports)
        parts.append(f"<td{' class=best' if best else ''}>{form.format(value)}</td>")
    if report.pools:
        parts += [f"<td>{said(report)}</td>" for _, said in _POOLS]
    return "".join(parts)


def _cdf(title: str, unit: str, quantiles: Sequence[tuple[str, list[float]]], colours: dict[str, int]) -> str:
    series = [
        Series(policy, colours[policy], [(value, 100 * i / (len(values) - 1)) for i, value in enumerate(values)])
        for policy, values in quantiles
        if len(values) > 1
    ]
    x = Axis.over(unit, [across for one in series for across, _ in one.points], logarithmic=True)
    return line_chart(title, x, Axis("% of requests", 0, 100), series)


def _hit_rates(reports: Sequence[SimReport], colours: dict[str, int]) -> str:
    bars = [(report.policy, colours[report.policy], 100 * report.hit_rate) for report in reports]
    ceiling = 100 * max(report.ceiling for report in reports)
    axis = Axis.over("% of prompt tokens from cache", [ceiling * 1.1, *[value * 1.1 for _, _, value in bars]])
    return bar_chart("Prefix reuse beside its ceiling", axis, bars, ceiling)


def _loads(outcomes: Sequence[Outcome], colours: dict[str, int]) -> Iterator[str]:
    most = [load for _, curve in outcomes for loads in curve.loads for load in loads]
    y = Axis.over("open sequences", most)
    for report, curve in outcomes:
        stride = -(-len(curve.times_s) // _MAX_POINTS) or 1
        times, loads = curve.times_s[::stride], curve.loads[::stride]
        if report.workers > _MAX_LINES:
            loads = [_bands(load) for load in loads]
        lines = [
            Series(f"worker {number}", colours[report.policy], list(zip(times, line, strict=True)))
            for number, line in enumerate(zip(*loads, strict=True))
        ]
        x = Axis.over("s", times)
        each = "each worker" if report.workers <= _MAX_LINES else "quantiles over workers"
        yield line_chart(f"Load of {each}: {report.policy}", x, y, lines, "thin")


def _bands(load: list[int]) -> list[int]:
    ordered = sorted(load)
    return [ordered[round(band * (len(ordered) - 1))] for band in _BANDS]


def _pareto(outcomes: Sequence[Outcome], colours: dict[str, int]) -> Iterator[str]:
    """Throughput against interactivity, for each load and size that was tried at several rates."""

    def kind(report: SimReport) -> tuple[str, int, str]:
        return report.trace, report.workers, report.pools

    charts: list[str] = []
    for (trace, workers, pools), group in groupby(sorted([report for report, _ in outcomes], key=kind), key=kind):
        members = list(group)
        if len({report.mode for report in members}) < 2:
            continue
        series = [Series(policy, colour, _frontier(members, policy)) for policy, colour in colours.items()]
        x = Axis.over("tokens/s per user (1 / ITL)", [across for one in series for across, _ in one.points])
        y = Axis.over("output tokens/s per worker", [up for one in series for _, up in one.points])
        charts.append(f"<div>{line_chart(f'{trace}, {pools or workers} workers', x, y, series, 'marked')}</div>")
    if charts:
        yield f'<h2>Throughput against interactivity</h2><div class="charts">{"".join(charts)}</div>'


def _frontier(reports: Sequence[SimReport], policy: str) -> list[tuple[float, float]]:
    return sorted(
        [
            (1000 / report.itl_ms_mean, report.output_tok_s / report.workers)
            for report in reports
            if report.policy == policy and report.itl_ms_mean > 0
        ]
    )
