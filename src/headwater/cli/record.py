"""`headwater record`: what recorded requests contain, and one file of many for a replay."""

import argparse
import gzip
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.table import Table

from headwater.errors import ConfigError
from headwater.protocol.request_log import FORMAT, VERSION, LoggedRequest, LogHeader
from headwater.sim.report import shared_lru_hit_rate
from headwater.sim.request_log import from_log, read_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="logs written with --record-requests (.gz too)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="all of them in order of arrival, for a replay")
    parser.add_argument("--model", help="only requests for this model")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")


class Summary(msgspec.Struct, frozen=True):
    """Of the requests that were answered, unless said otherwise."""

    logged: int
    """Also those that were refused, or aborted before their first token."""
    outcomes: dict[str, int]
    models: dict[str, int]
    sessions: int
    tenants: int
    hours: float
    requests_per_s: float
    prompt_tokens_mean: float
    output_tokens_mean: float
    hit_rate: float
    """What the engines found in their caches."""
    reuse_possible: float
    """What one unbounded cache would have found."""
    ttft_ms_mean: float


def run(args: argparse.Namespace) -> int:
    logged = [one for path in args.files for one in read_log(path) if args.model in (None, one.model)]
    if not logged:
        raise ConfigError("there are no requests in these files" + (f" for {args.model}" if args.model else ""))
    logged.sort(key=lambda one: one.at)
    if args.output:
        _write(args.output, logged)
    summary = _summary(logged)
    if args.json:
        print(msgspec.json.encode(summary).decode())
    else:
        Console().print(_table(summary))
    return 0


def _write(path: Path, logged: Sequence[LoggedRequest]) -> None:
    try:
        with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
            file.write(msgspec.json.encode(LogHeader(FORMAT, VERSION)) + b"\n")
            file.writelines(msgspec.json.encode(one) + b"\n" for one in logged)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _summary(logged: Sequence[LoggedRequest]) -> Summary:
    answered = [one for one in logged if one.output_tokens > 0]
    block_size = max(one.block_size for one in logged)
    seconds = logged[-1].at - logged[0].at
    return Summary(
        logged=len(logged),
        outcomes=dict(Counter(one.outcome for one in logged)),
        models=dict(Counter(one.model for one in logged)),
        sessions=len({one.session for one in logged} - {""}),
        tenants=len({one.tenant for one in logged} - {""}),
        hours=seconds / 3600,
        requests_per_s=len(logged) / seconds if seconds else 0.0,
        prompt_tokens_mean=fmean([one.prompt_tokens for one in answered] or [0.0]),
        output_tokens_mean=fmean([one.output_tokens for one in answered] or [0.0]),
        hit_rate=sum([one.cached_tokens for one in answered]) / max(1, sum([one.prompt_tokens for one in answered])),
        reuse_possible=shared_lru_hit_rate(from_log(answered, block_size), 1 << 60, block_size),
        ttft_ms_mean=fmean([one.ttft_ms for one in answered if one.ttft_ms is not None] or [0.0]),
    )


def _table(summary: Summary) -> Table:
    table = Table(show_header=False, box=None)
    rows = {
        "requests": f"{summary.logged:,} in {summary.hours:.2f} h, {summary.requests_per_s:.2f} a second",
        "outcomes": _counts(summary.outcomes),
        "models": _counts(summary.models),
        "sessions, tenants": f"{summary.sessions:,}, {summary.tenants:,}",
        "mean prompt, answer": f"{summary.prompt_tokens_mean:,.0f}, {summary.output_tokens_mean:,.0f} tokens",
        "prefix reuse": f"{summary.hit_rate:.1%} of prompt tokens; {summary.reuse_possible:.1%} was possible",
        "mean TTFT": f"{summary.ttft_ms_mean:,.0f} ms",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _counts(counts: dict[str, int]) -> str:
    return ", ".join([f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1])])
