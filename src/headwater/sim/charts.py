"""Charts as SVG text: lines and bars, no script, colours from the page's style sheet (`STYLE`)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 30, 42
_BAR_HEIGHT, _BAR_LABEL, _BAR_VALUE = 22, 150, 44
_NUM_COLOURS = 10
_LEAST_LOGARITHMIC = 1e-6
_LEGEND_COLUMN, _LEGEND_ROW = 150, 15

LineStyle = Literal["line", "thin", "marked"]

STYLE = """
.chart{width:100%;height:auto;font:11px system-ui,sans-serif;fill:var(--text)}
.chart .title{font-weight:600;font-size:12px}
.chart .grid{stroke:var(--grid);stroke-width:1}
.chart .axis{stroke:var(--muted);stroke-width:1}
.chart .muted{fill:var(--muted)}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}
.chart .thin{fill:none;stroke-width:1;opacity:.7}
.chart .limit{stroke:var(--text);stroke-width:1.5;stroke-dasharray:4 3}
.c0{--c:#0a7d5a}.c1{--c:#c2410c}.c2{--c:#2563eb}.c3{--c:#9333ea}.c4{--c:#b8860b}
.c5{--c:#0e7490}.c6{--c:#be185d}.c7{--c:#4d7c0f}.c8{--c:#64748b}.c9{--c:#7c2d12}
@media (prefers-color-scheme:dark){
.c0{--c:#34d399}.c1{--c:#fb923c}.c2{--c:#60a5fa}.c3{--c:#c084fc}.c4{--c:#facc15}
.c5{--c:#22d3ee}.c6{--c:#f472b6}.c7{--c:#a3e635}.c8{--c:#94a3b8}.c9{--c:#d6a27c}}
.stroke{stroke:var(--c)}.fill{fill:var(--c)}
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One line. `colour` is a number; equal numbers look the same in all charts of a page."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    least: float
    most: float
    logarithmic: bool = False

    @classmethod
    def over(cls, label: str, values: Iterable[float], *, logarithmic: bool = False) -> "Axis":
        """From 0 to the largest value, or from the least positive one, six decades down at most, if logarithmic."""
        positive = [value for value in values if value > 0 and math.isfinite(value)]
        most = max(positive, default=1.0)
        if not logarithmic:
            return cls(label, 0.0, most * 1.05)
        least = max(min(positive, default=most / 10), most * _LEAST_LOGARITHMIC)
        return cls(label, least, most if most > least else least * 10, True)

    def place(self, value: float) -> float:
        """0 at the least, 1 at the most; values outside are put on the edge."""
        if self.logarithmic:
            value = max(value, self.least)
            part = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            part = (value - self.least) / ((self.most - self.least) or 1.0)
        return min(1.0, max(0.0, part))

    def ticks(self) -> list[float]:
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
            marks = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
            inside = [mark for mark in marks if self.least <= mark <= self.most]
            whole = [mark for mark in inside if math.log10(mark) % 1 == 0]
            return whole if len(inside) > 8 and len(whole) > 1 else inside
        step = _round_step((self.most - self.least) / 5)
        first = math.ceil(self.least / step)
        return [number * step for number in range(first, math.floor(self.most / step) + 1)]


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series], style: LineStyle = "line") -> str:
    """`thin` is for many lines that need no telling apart, `marked` shows the points too."""
    body = [_frame(title, x, y)]
    for one in series:
        points = [(_x(x, across), _y(y, up)) for across, up in one.points]
        joined = " ".join([f"{across:.1f},{up:.1f}" for across, up in points])
        line = "thin" if style == "thin" else "line"
        body.append(f'<g class="c{one.colour % _NUM_COLOURS}"><polyline class="{line} stroke" points="{joined}"/>')
        if style == "marked":
            body += [f'<circle class="fill" cx="{across:.1f}" cy="{up:.1f}" r="3"/>' for across, up in points]
        body.append(f"<title>{escape(one.name)}</title></g>")
    return _svg(title, WIDTH, HEIGHT, body)


def bar_chart(title: str, axis: Axis, bars: Sequence[tuple[str, int, float]], limit: float) -> str:
    """Bars of (name, colour, value) lying on their side, and a line where the most possible is."""
    height = _TOP + _BAR_HEIGHT * len(bars) + _BOTTOM - 8
    bottom = height - _BOTTOM + 14
    span = WIDTH - _BAR_LABEL - _BAR_VALUE
    body = [f'<text class="title" x="0" y="14">{escape(title)}</text>']
    for tick in axis.ticks():
        across = _BAR_LABEL + span * axis.place(tick)
        body.append(f'<line class="grid" x1="{across:.1f}" x2="{across:.1f}" y1="{_TOP - 6}" y2="{bottom - 8}"/>')
        body.append(_text(across, bottom + 6, _number(tick), "middle", "muted"))
    for number, (name, colour, value) in enumerate(bars):
        up = _TOP + _BAR_HEIGHT * number
        length = span * axis.place(value)
        body.append(_text(_BAR_LABEL - 8, up + 12, name, "end"))
        body.append(
            f'<g class="c{colour % _NUM_COLOURS}"><rect class="fill" x="{_BAR_LABEL}" y="{up}" width="{length:.1f}" '
            f'height="{_BAR_HEIGHT - 6}" rx="2"/></g>'
        )
        body.append(_text(WIDTH - 2, up + 12, f"{value:.1f}", "end", "muted"))
    across = _BAR_LABEL + span * axis.place(limit)
    body.append(f'<line class="limit" x1="{across:.1f}" x2="{across:.1f}" y1="{_TOP - 8}" y2="{bottom - 8}"/>')
    body.append(_text(_BAR_LABEL + span / 2, bottom + 22, axis.label, "middle", "muted"))
    return _svg(title, WIDTH, height + 12, body)


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Which colour is who."""
    per_row = WIDTH * 2 // _LEGEND_COLUMN
    body: list[str] = []
    for number, (name, colour) in enumerate(names):
        across, up = number % per_row * _LEGEND_COLUMN, number // per_row * _LEGEND_ROW
        swatch = f'<rect class="fill" x="{across}" y="{up + 2}" width="10" height="10" rx="2"/>'
        body.append(f'<g class="c{colour % _NUM_COLOURS}">{swatch}</g>{_text(across + 15, up + 11, name, "start")}')
    return _svg("legend", WIDTH * 2, -(-len(names) // per_row) * _LEGEND_ROW + 4, body)


def _frame(title: str, x: Axis, y: Axis) -> str:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = [f'<text class="title" x="0" y="14">{escape(title)}</text>']
    for tick in x.ticks():
        across = _x(x, tick)
        parts.append(f'<line class="grid" x1="{across:.1f}" x2="{across:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(_text(across, bottom + 14, _number(tick), "middle", "muted"))
    for tick in y.ticks():
        up = _y(y, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{up:.1f}" y2="{up:.1f}"/>')
        parts.append(_text(_LEFT - 6, up + 4, _number(tick), "end", "muted"))
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text((_LEFT + right) / 2, HEIGHT - 8, x.label, "middle", "muted"))
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text class="muted" text-anchor="middle" transform="translate(12 {middle:.0f}) rotate(-90)">'
        f"{escape(y.label)}</text>"
    )
    return "".join(parts)


def _svg(title: str, width: int, height: int, body: Sequence[str]) -> str:
    return (
        f'<svg class="chart" role="img" aria-label="{escape(title, quote=True)}" viewBox="0 0 {width} {height}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'
    )


def _text(across: float, up: float, text: str, anchor: str, style: str = "") -> str:
    classes = f' class="{style}"' if style else ""
    return f'<text{classes} x="{across:.1f}" y="{up:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(axis: Axis, value: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * axis.place(value)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * axis.place(value)


def _round_step(rough: float) -> float:
    if rough <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(rough))
    return next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * 0.999)


def _number(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
