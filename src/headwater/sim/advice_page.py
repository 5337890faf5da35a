"""The advisor's report as one HTML file: throughput against interactivity, goodput over load, where the time goes."""

from collections.abc import Callable, Sequence
from html import escape

from headwater.sim.advice import Figures, front
from headwater.sim.charts import STYLE, Axis, Series, legend, line_chart
from headwater.sim.page import PAGE_STYLE

_KINDS = {"aggregated": 0, "split": 1, "adaptive": 2}
_COLUMNS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("met", lambda one: f"{one.attained:.0%}"),
    ("goodput /s", lambda one: f"{one.goodput_per_s:.2f}"),
    ("TTFT ms", lambda one: f"{one.ttft_ms:,.0f}"),
    ("p99", lambda one: f"{one.ttft_p99_ms:,.0f}"),
    ("TPOT ms", lambda one: f"{one.tpot_ms:.1f}"),
    ("E2E ms", lambda one: f"{one.e2e_ms:,.0f}"),
    ("tok/s/GPU", lambda one: f"{one.output_tokens_per_s_per_gpu:,.0f}"),
    ("waiting", lambda one: f"{one.times.queued_ms:,.0f}"),
    ("prefill", lambda one: f"{one.times.prefill_ms:,.0f}"),
    ("hand-off", lambda one: f"{one.times.handoff_ms:,.0f}"),
    ("decode", lambda one: f"{one.times.decode_ms:,.0f}"),
    ("standing still", lambda one: f"{one.times.stalled_ms:,.0f}"),
)


def advice_page(title: str, words: Sequence[str], shown: Sequence[Figures], all_figures: Sequence[Figures]) -> str:
    """`shown`: the rows of the table; `all_figures`: every option under every load."""
    sentences = "".join([f"<p>{escape(sentence)}</p>" for sentence in words])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{PAGE_STYLE}{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{sentences}"
        f'<div class="legend">{legend(list(_KINDS.items()))}</div><div class="charts">'
        f"<div>{_pareto(all_figures)}</div></div>{_table(shown)}</body></html>\n"
    )


def _pareto(figures: Sequence[Figures]) -> str:
    series = [
        Series(kind, colour, [(one.tokens_per_s_per_user, one.output_tokens_per_s_per_gpu) for one in best])
        for kind, colour in _KINDS.items()
        if (best := front([one for one in figures if one.kind == kind]))
    ]
    x = Axis.over("tokens/s per user", [across for one in series for across, _ in one.points])
    y = Axis.over("output tokens/s per GPU", [up for one in series for _, up in one.points])
    return line_chart("Throughput against interactivity", x, y, series, "marked")


def _table(figures: Sequence[Figures]) -> str:
    head = "".join([f"<th>{title}</th>" for title, _ in _COLUMNS])
    rows = "".join([f"<tr><td>{escape(one.name)}, {escape(one.load)}</td>{_cells(one)}</tr>" for one in figures])
    return f'<div class="wide"><table><tr><th>workers, load</th>{head}</tr>{rows}</table></div>'


def _cells(figures: Figures) -> str:
    return "".join([f"<td>{cell(figures)}</td>" for _, cell in _COLUMNS])
