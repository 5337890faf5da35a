"""Just enough of Prometheus' text format to read gauges off a server's /metrics."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str, prefixes: tuple[str, ...]) -> Iterator[Sample]:
    """Those whose names begin with one of the prefixes."""
    for line in text.splitlines():
        if not line.startswith(prefixes):
            continue
        found = _SAMPLE.match(line)
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        yield Sample(found[1], dict(_LABEL.findall(found[2] or "")), value)


def sums(text: str, prefixes: tuple[str, ...]) -> dict[str, float]:
    """Values by name, summed over all labels."""
    found: dict[str, float] = {}
    for sample in samples(text, prefixes):
        found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
