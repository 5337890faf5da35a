"""`headwater explain REQUEST_ID`: why a request went where it went, and what came of it.

Decisions are kept by the frontend that made them, the last two thousand of each. Where several share a port, the
question is put again until the right one has answered. Exit code 0 when the request was found, 1 when not.
"""

import argparse
import json
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater.cli.console import open_console
from headwater.cli.http import Server
from headwater.cli.target import add_target, server_of

_TIMEOUT_S = 10.0
_MOST_TRIES = 48
_SURE_AFTER = 12
"""Answers in a row from frontends that have been heard already."""

Document = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="as in the log and the x-request-id header")
    parser.add_argument("--candidates", type=int, default=16, metavar="N", help="show the N cheapest (default 16)")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    decisions = look(server_of(args, _TIMEOUT_S), args.request_id, args.candidates)
    if args.json:
        print(json.dumps(decisions, indent=2))
    elif not decisions:
        print(f"no frontend remembers a request {args.request_id}")
    else:
        console = open_console(highlight=False)
        for decision in decisions:
            show(console, decision)
    return 0 if decisions else 1


def look(server: Server, request_id: str, candidates: int) -> list[Document]:
    """The decisions about a request, one per prompt; none when no frontend knows it."""
    path = f"/debug/decisions?request_id={quote(request_id, safe='')}&candidates={max(0, candidates)}"
    heard: set[str] = set()
    repeats = 0
    for _ in range(_MOST_TRIES):
        answer = server.get_json(path)
        if answer["decisions"]:
            found: list[Document] = answer["decisions"]
            return found
        repeats = repeats + 1 if answer["frontend_id"] in heard else 0
        heard.add(answer["frontend_id"])
        if repeats >= _SURE_AFTER:
            break
    return []


def show(console: Console, decision: Document) -> None:
    for line in in_words(decision):
        console.print(Text(line), soft_wrap=True)
    if decision["candidates"]:
        console.print(_table(decision))


def in_words(decision: Document) -> list[str]:
    """The story of a decision, line by line."""
    expected, actual = decision["predicted"], decision["actual"]
    lines = [_chosen(decision)]
    if decision["queued_ms"]:
        lines.append(f"  waited {decision['queued_ms']:,.1f} ms in line{_standing(decision)}")
    lines += [f"  {tried['worker_id']} refused: {tried['reason']}" for tried in decision["detours"]]
    if decision["worker_id"] is not None:
        lines.append(f"  expected: {_first_token(expected)}, {_cached(expected, decision)}{_best(expected)}")
    if decision["knowledge"] == "approximate":
        lines.append("  that worker sends no KV events: what it has cached was guessed from what it was sent")
    lines.append(f"  happened: {_happened(actual, decision)}")
    return [*lines, *_margin(decision)]


def _chosen(decision: Document) -> str:
    prompt = f"{decision['prompt_tokens']:,} prompt tokens"
    if decision["sequences"] > 1:
        prompt += f", {decision['sequences']} answers"
    if decision["worker_id"] is None:
        return f"{decision['request_id']} ({decision['model']}, {prompt}) was sent to no worker"
    return (
        f"{decision['request_id']} ({decision['model']}, {prompt}) went to {decision['worker_id']}, "
        f"one of {decision['num_candidates']}, chosen by {decision['policy']}"
    )


def _standing(decision: Document) -> str:
    tenant = f", tenant {decision['tenant']}" if decision["tenant"] else ""
    return f" (priority {decision['priority']}{tenant})"


def _first_token(figures: Document) -> str:
    if figures["ttft_ms"] is None:
        return "first token at an unknown time"
    return f"first token after {figures['ttft_ms']:,.1f} ms"


def _cached(figures: Document, decision: Document) -> str:
    if figures["cached_tokens"] is None:
        return "cached tokens not told"
    return f"{figures['cached_tokens']:,} of {decision['prompt_tokens']:,} tokens cached"


def _best(expected: Document) -> str:
    missed = expected["best_cached_tokens"] - expected["cached_tokens"]
    return f" ({missed:,} fewer than another worker has)" if missed > 0 else ""


def _happened(actual: Document, decision: Document) -> str:
    error = f" ({actual['error']})" if actual["error"] else ""
    if actual["ttft_ms"] is None:
        return f"{actual['outcome']}{error}"
    took = f" after {actual['e2e_ms']:,.1f} ms" if actual["e2e_ms"] is not None else ""
    tokens = f"{actual['output_tokens']:,} tokens generated"
    return f"{_first_token(actual)}, {_cached(actual, decision)}; {tokens}, {actual['outcome']}{error}{took}"


def _margin(decision: Document) -> list[str]:
    """What decided between the first two."""
    ranked = decision["candidates"]
    if len(ranked) < 2 or ranked[0]["worker_id"] != decision["worker_id"] or not ranked[0]["parts"]:
        return []
    first, second = ranked[0], ranked[1]
    names = first["parts"].keys() | second["parts"].keys()
    gaps = {name: second["parts"].get(name, 0.0) - first["parts"].get(name, 0.0) for name in names}
    gap = second["total"] - first["total"]
    if gap <= 0:
        return [f"  {second['worker_id']} would have cost the same"]
    most = max(gaps, key=lambda name: gaps[name])
    return [f"  {second['worker_id']} would have cost {gap:,.1f} more, most of it {_title(most)}"]


def _table(decision: Document) -> Table:
    names = list(dict.fromkeys(name for candidate in decision["candidates"] for name in candidate["parts"]))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker", no_wrap=False, overflow="fold")
    for title in ("total", *map(_title, names)):
        table.add_column(title, justify="right")
    for candidate in decision["candidates"]:
        won = candidate["worker_id"] == decision["worker_id"]
        parts = [candidate["parts"].get(name) for name in names]
        cells = [f"{value:,.1f}" if value is not None else "" for value in (candidate["total"], *parts)]
        table.add_row(Text(candidate["worker_id"]), *cells, style="bold" if won else None)
    return table


def _title(part: str) -> str:
    return part.removesuffix("_ms").replace("_", " ") + (" ms" if part.endswith("_ms") else "")
