"""Replay of public request traces: Mooncake JSONL and Azure CSV (plain or gzip).

Mooncake rows carry `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one per 512-token block: equal
ids become equal text, so that prefix reuse is what it was. Azure rows carry lengths only: every prompt is new.
"""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import TextIO

from headwater.bench.workload import LoadRequest, words
from headwater.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512


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
        yield from _mooncake(path, file) if is_json else _azure(path, file)


def _open_text(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8")
        return path.open(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error


def _mooncake(path: Path, file: TextIO) -> Iterator[TraceRow]:
    for number, line in enumerate(file, 1):
        try:
            row = json.loads(line)
            yield TraceRow(
                at_s=float(row["timestamp"]) / 1000,
                input_tokens=int(row["input_length"]),
                output_tokens=int(row["output_length"]),
                hash_ids=tuple(int(hash_id) for hash_id in row.get("hash_ids", ())),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: not a Mooncake trace row: {error!r}") from error


def _azure(path: Path, file: TextIO) -> Iterator[TraceRow]:
    start: datetime | None = None
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or at
            yield TraceRow((at - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: not an Azure trace row: {error!r}") from error
