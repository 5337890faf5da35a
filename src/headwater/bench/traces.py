"""Replay of public request traces: Mooncake JSONL and Azure CSV (plain or gzip).

Mooncake rows carry `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one per 512-token block: equal
ids become equal text, so that prefix reuse is what it was. Azure rows carry lengths only: every prompt is new.
Lengths and times that no request can have are refused, for a simulation would take them at their word.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated, TextIO

import msgspec

from headwater.bench.workload import LoadRequest, words
from headwater.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
_MAX_TOKENS = 1 << 24
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]


class _MooncakeRow(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds."""
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """The first `limit` rows of a trace, `speed` times faster, lengths multiplied by `length_scale`."""

    path: Path
    limit: int | None = None
    speed: float = 1.0
    length_scale: float = 1.0

    def requests(self, scale: float) -> Iterator[LoadRequest]:
        for number, row in enumerate(read_trace(self.path)):
            if self.limit is not None and number >= self.limit:
                return
            yield LoadRequest(
                prompt=self._prompt(number, row, scale),
                output_tokens=max(1, round(row.output_tokens * self.length_scale)),
                at_s=row.at_s / self.speed,
            )

    def _prompt(self, number: int, row: TraceRow, scale: float) -> str:
        remaining = max(1, round(row.input_tokens * self.length_scale * scale))
        block = max(1, round(MOONCAKE_BLOCK_TOKENS * self.length_scale * scale))
        seeds = [f"block/{hash_id}" for hash_id in row.hash_ids] or [f"row/{number}"]
        parts: list[str] = []
        for index, seed in enumerate(seeds):
            last = index == len(seeds) - 1
            count = remaining if last else min(block, remaining)
            if count <= 0:
                break
            parts.append(words(Random(seed), count))
            remaining -= count
        return " ".join(parts)


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Rows of a trace file in order. Raises `ConfigError` naming the row that cannot be read."""
    with _open_text(path) as file:
        is_json = path.name.removesuffix(".gz").endswith(".jsonl")
        try:
            yield from _mooncake(path, file) if is_json else _azure(path, file)
        except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
            raise ConfigError(f"cannot read the trace {path}: {error}") from error


def _open_text(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8")
        return path.open(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error


def _mooncake(path: Path, file: TextIO) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(_MooncakeRow, strict=False)
    for number, line in enumerate(file, 1):
        try:
            row = decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not a Mooncake trace row: {error}") from error
        yield TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _azure(path: Path, file: TextIO) -> Iterator[TraceRow]:
    start: datetime | None = None
    rows = csv.DictReader(file)
    if not set(_AZURE_COLUMNS) <= set(rows.fieldnames or ()):
        raise ConfigError(f"{path}:1: expected the columns {', '.join(_AZURE_COLUMNS)}")
    for number, row in enumerate(rows, 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or at
            asked = TraceRow(
                (at - start).total_seconds(), _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"])
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: not an Azure trace row: {error}") from error
        yield asked


def _tokens(text: str) -> int:
    return msgspec.convert(text, _Tokens, strict=False)
