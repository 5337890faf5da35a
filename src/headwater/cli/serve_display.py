"""What `headwater serve` shows: progress of the parts until all are ready, then a table and a command to try.

On a terminal the progress is a live region below the log; elsewhere, and with JSON logs, it is log lines. Lines of the
parts are prefixed with their names; JSON lines already carry them.
"""

import json
import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from headwater.cli.log_writer import LogWriter
from headwater.config.schema import ServeConfig
from headwater.config.units import about_bytes
from headwater.deploy.actions import Part
from headwater.deploy.reports import READY, ProgressReport
from headwater.protocol.cluster import Instance

_log = logging.getLogger("headwater.serve")

_LINE_INTERVAL_S = 5.0
_WORDS = {
    "start": "starting",
    "resolve": "finding the model",
    "download": "downloading",
    "load": "loading",
    "convert": "preparing weights",
    "warm": "warming up",
    "wait": "waiting",
    READY: "ready",
}


class ServeDisplay:
    """The supervisor's observer."""

    def __init__(
        self,
        writer: LogWriter,
        parts: Sequence[Part],
        on_ready: Callable[[], None],
        on_restarted: Callable[[str | None], None],
        *,
        json_logs: bool,
        live_on: Console | None,
    ) -> None:
        self._writer = writer
        self._on_ready = on_ready
        self._on_restarted = on_restarted
        self._json_logs = json_logs
        self._reports: dict[str, ProgressReport] = {str(part): ProgressReport("start") for part in parts}
        self._logged: dict[str, tuple[str, float]] = {}
        self._prefixes = {str(part): prefix(str(part), parts) for part in parts}
        self._live: Live | None = None
        if live_on is not None:
            self._start_live(live_on)

    def on_log(self, part: Part, lines: Sequence[bytes]) -> None:
        mark = self._prefixes[str(part)]
        self._writer.lines([line if self._json_logs and line.startswith(b"{") else mark + line for line in lines])

    def on_progress(self, part: Part, report: ProgressReport) -> None:
        self._reports[str(part)] = report
        if self._live is not None:
            self._live.update(self._table())
            return
        phase, at = self._logged.get(str(part), ("", 0.0))
        now = time.monotonic()
        if report.phase != phase or now - at >= _LINE_INTERVAL_S:
            self._logged[str(part)] = (report.phase, now)
            _log.info("%s: %s", part, describe(report))

    def on_restarting(self, part: Part, reason: str, delay_s: float) -> None:
        self._reports[str(part)] = ProgressReport("start", detail=f"died: {reason}")
        if not delay_s:
            _log.info("%s has left (%s); starting it again", part, reason)
            return
        _log.warning("%s died: %s; starting it again in %g s", part, reason, delay_s)

    def on_gave_up(self, part: Part, reason: str) -> None:
        self._reports.pop(str(part), None)
        _log.error("%s is given up: %s", part, reason)

    def on_serving(self) -> None:
        self.stop_live()
        self._on_ready()

    def on_rolling(self) -> None:
        _log.info("restarting one process after the other")

    def on_rolled(self, failure: str | None) -> None:
        if failure is None:
            _log.info("all processes have been replaced")
        else:
            _log.error("the rolling restart ended early: %s", failure)
        self._on_restarted(failure)

    def on_stopping(self, reason: str) -> None:
        self.stop_live()
        short = reason.partition("; ")[0]  # what comes after has been told by `on_gave_up`
        _log.info("stopping: %s (once more to stop at once)", short)

    def stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._writer.divert(None)

    def _start_live(self, console: Console) -> None:
        self._live = Live(self._table(), console=console, refresh_per_second=8, transient=True)
        self._live.start()
        self._writer.divert(lambda line: console.print(Text(line), soft_wrap=True))

    def _table(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for name, report in self._reports.items():
            mark = Text("✓", "green") if report.phase == READY else Spinner("dots")
            bar = ProgressBar(report.total, report.done, width=30) if report.total else Text("")
            grid.add_row(mark, Text(name, "bold"), Text(describe(report)), bar)
        return grid


def prefix(name: str, parts: Sequence[Part]) -> bytes:
    """What stands before a log line, equally wide for all."""
    width = max(len("supervisor"), *(len(str(part)) for part in parts))
    return f"{name:<{width}} | ".encode()


def describe(report: ProgressReport) -> str:
    """`downloading 1.2 of 3.4 GiB (35 %), model.safetensors`."""
    words = _WORDS.get(report.phase, report.phase)
    if report.total:
        done, total = (_quantity(value, report.unit) for value in (report.done, report.total))
        words += f" {done} of {total} ({100 * report.done / report.total:.0f} %)"
    elif report.done:
        words += f" {_quantity(report.done, report.unit)}"
    return f"{words}, {report.detail}" if report.detail else words


def print_ready(out: IO[str], config: ServeConfig, url: str, instances: Sequence[Instance], took_s: float) -> None:
    """The closing table and a command that can be copied. Workers that are still on their way are left out."""
    ready = [instance for instance in instances if instance.state == "ready"]
    console = Console(file=out, highlight=False, markup=False)
    table = Table(title=f"ready in {took_s:.1f} s", title_justify="left", show_header=False)
    for name, value in ready_rows(config, url, ready):
        table.add_row(name, Text(value))
    console.print(table)
    if ready:
        console.print("\ntry it:\n", style="dim")
        console.print(curl_command(config, url, ready[0].card.name), soft_wrap=True)


def ready_rows(config: ServeConfig, url: str, instances: Sequence[Instance]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    by_model = {instance.card.name: instance for instance in instances}
    for name, instance in by_model.items():
        card = instance.card
        engine = f"{instance.engine} ({instance.hardware})" if instance.hardware else instance.engine
        rows += [
            ("model", ", ".join(card.served_names) or name),
            ("architecture", f"{card.architecture}, {card.dtype}"),
            ("engine", engine),
            ("KV blocks", f"{instance.kv_blocks:,} x {card.block_size} tokens per worker"),
            ("longest context", f"{card.max_model_len:,} tokens"),
            ("workers", _workers([other for other in instances if other.card.name == name], config.workers)),
        ]
    keys = "API key required" if config.frontend.api_key or config.frontend.keys else "no API key"
    rows += [("frontends", str(config.frontends)), ("URL", f"{url}/v1  ({keys})")]
    return rows


def _workers(instances: Sequence[Instance], expected: int) -> str:
    """How many, and of which roles if they differ."""
    count = str(len(instances)) if len(instances) >= expected else f"{len(instances)} of {expected} so far"
    roles = Counter(instance.role for instance in instances)
    if roles.keys() <= {"both"}:
        return count
    return f"{count} ({', '.join(f'{number} {role}' for role, number in sorted(roles.items()))})"


def curl_command(config: ServeConfig, url: str, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "stream": True}
    words = ["curl", "-N", f"{url}/v1/chat/completions", "-H", "content-type: application/json"]
    line = " ".join(shlex.quote(word) for word in words)
    if config.frontend.tls_cert is not None:
        line += f" --cacert {shlex.quote(os.path.expanduser(config.frontend.tls_cert))}"
    if config.frontend.tls_client_ca is not None:
        line += " --cert client.pem --key client.key"
    if config.frontend.api_key or config.frontend.keys:
        line += ' -H "authorization: Bearer $API_KEY"'
    return f"{line} -d {shlex.quote(json.dumps(body))}"


def _quantity(value: float, unit: str) -> str:
    return about_bytes(value) if unit == "bytes" else f"{value:g} {unit}".rstrip()
