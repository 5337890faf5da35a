"""The HTML report: well-formed, self-contained, and showing what was measured."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.sim.charts import Axis, Series, bar_chart, legend, line_chart
from headwater.sim.page import page
from headwater.sim.report import SimCurves, SimReport


def report(policy: str, mode: str = "x1", **figures: float) -> SimReport:
    zeros: dict[str, float] = dict.fromkeys(SimReport.__struct_fields__, 1.0)
    zeros |= {"hit_rate": 0.4, "ceiling": 0.5} | figures
    return SimReport(**zeros | {"trace": "t & <t>", "workers": 2, "policy": policy, "mode": mode, "requests": 10})  # type: ignore[arg-type]


CURVES = SimCurves([float(n) for n in range(1, 102)], [float(n) for n in range(1, 102)], [0.0, 1.0], [[1, 2], [3, 4]])
OUTCOMES = [
    (report(policy, mode, itl_ms_mean=itl), CURVES)
    for policy, itl in (("delay", 5.0), ("dynamo", 10.0))
    for mode in ("x1", "x2")
]


class Tags(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page(OUTCOMES)
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == []
    assert tags.links == []
    assert "script" not in tags.seen
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "t &amp; &lt;t&gt;" in text
    assert "prefers-color-scheme:dark" in text


def test_the_page_has_every_figure_asked_for() -> None:
    text = page(sorted(OUTCOMES, key=lambda outcome: outcome[0].mode))
    for title in ("Time to first token", "Time per output token", "Prefix reuse beside its ceiling"):
        assert text.count(f">{title}</text>") == 2, "one per mode"
    assert text.count("Load of each worker: delay</text>") == 2
    assert text.count("<h2>Throughput against interactivity</h2>") == 1
    assert text.count("<td class=best>5.0</td>") == 2


def test_one_mode_has_no_frontier() -> None:
    assert "interactivity" not in page(OUTCOMES[:1])


def test_many_workers_are_drawn_as_quantiles() -> None:
    crowd = SimCurves(CURVES.ttft_ms, CURVES.itl_ms, [0.0, 1.0], [list(range(100)), list(range(100))])
    text = page([(SimReport(**{**to_dict(report("delay")), "workers": 100}), crowd)])
    assert "quantiles over workers: delay" in text
    assert text.count('class="thin stroke"') == 5


def to_dict(one: SimReport) -> dict[str, object]:
    return {name: getattr(one, name) for name in SimReport.__struct_fields__}


def points(svg: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg)
    lines = root.iter("{http://www.w3.org/2000/svg}polyline")
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())] for line in lines
    ]


def test_a_line_goes_where_the_numbers_say() -> None:
    svg = line_chart("t", Axis("x", 0, 10), Axis("y", 0, 100), [Series("s", 0, [(0, 0), (5, 50), (10, 100)])])
    ((first, middle, last),) = points(svg)
    assert first[0] < middle[0] < last[0]
    assert first[1] > middle[1] > last[1], "y grows downwards in SVG"
    assert middle[0] == pytest.approx((first[0] + last[0]) / 2, abs=0.1)
    assert middle[1] == pytest.approx((first[1] + last[1]) / 2, abs=0.1)


def test_bars_are_as_long_as_their_values() -> None:
    svg = bar_chart("t", Axis.over("%", [50.0]), [("a", 0, 40.0), ("b & c", 1, 20.0)], 50.0)
    root = ElementTree.fromstring(svg)
    widths = [float(bar.attrib["width"]) for bar in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)


def test_a_legend_names_everybody() -> None:
    root = ElementTree.fromstring(legend([(f"policy {n}", n) for n in range(9)]))
    assert [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")] == [f"policy {n}" for n in range(9)]


@given(
    values=st.lists(st.floats(-1, 1e9) | st.just(float("inf")), max_size=6),
    logarithmic=st.booleans(),
    probe=st.floats(-10, 1e10),
)
def test_axes_take_any_values(values: list[float], logarithmic: bool, probe: float) -> None:
    axis = Axis.over("x", values, logarithmic=logarithmic)
    assert 0.0 <= axis.place(probe) <= 1.0
    ticks = axis.ticks()
    assert len(ticks) <= 40
    assert ticks == sorted(ticks)
    finite = [value for value in values if 0 < value < float("inf")]
    assert sorted(axis.place(value) for value in finite) == [axis.place(value) for value in sorted(finite)]
