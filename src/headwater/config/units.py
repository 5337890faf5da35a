"""Human units: `32K` tokens, `20GiB` of memory, `500ms` of time, read and written.

Counts take the suffixes vLLM users know: lower case is decimal (`1k` = 1,000), upper case binary (`1K` = 1,024).
Bytes take those too and in addition `kB MB GB TB` (decimal) and `KiB MiB GiB TiB` (binary). Seconds take
`us ms s m h d`. What does not come out whole (`1.5` tokens) is refused rather than rounded.
"""

import re
from decimal import Decimal
from typing import TypeVar

Number = TypeVar("Number", int, Decimal)

COUNT_FACTORS = {
    "": 1,
    **{suffix: 1000**power for power, suffix in enumerate("kmgt", start=1)},
    **{suffix: 1024**power for power, suffix in enumerate("KMGT", start=1)},
}
BYTE_FACTORS = COUNT_FACTORS | {
    "B": 1,
    "kB": 1000,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
SECOND_FACTORS = {
    "": Decimal(1),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}

_QUANTITY = re.compile(r"([0-9][0-9_]{0,30}(?:\.[0-9]{1,12})?|\.[0-9]{1,12})\s?([A-Za-z]{0,3})")


def parse_count(text: str) -> int:
    """Raises ValueError when the text is no whole number with a known suffix."""
    return _whole(text, COUNT_FACTORS)


def parse_bytes(text: str) -> int:
    return _whole(text, BYTE_FACTORS)


def parse_seconds(text: str) -> float:
    number, suffix = _split(text)
    return float(number * _factor(suffix, SECOND_FACTORS))


def format_bytes(value: int) -> str:
    """The shortest exact spelling: `16MiB`, but `1000` stays `1000`."""
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if value and value % 1024**power == 0:
            return f"{value // 1024**power}{prefix}iB"
    return str(value)


def format_seconds(value: float) -> str:
    if value and value < 1 and (value * 1000).is_integer():
        return f"{int(value * 1000)}ms"
    return f"{int(value) if float(value).is_integer() else value}s"


def about_bytes(value: float) -> str:
    """Rounded for people: `1.4 GiB`."""
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if value >= 1024**power:
            return f"{value / 1024**power:.1f} {prefix}iB"
    return f"{int(value)} B"


def _whole(text: str, factors: dict[str, int]) -> int:
    number, suffix = _split(text)
    value = number * _factor(suffix, factors)
    if value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def _split(text: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number")
    return Decimal(match[1].replace("_", "")), match[2]


def _factor(suffix: str, factors: dict[str, Number]) -> Number:
    factor = factors.get(suffix)
    if factor is None:
        raise ValueError(f"unknown unit {suffix!r}; one of {', '.join(name for name in factors if name)}")
    return factor
