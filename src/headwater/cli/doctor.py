"""`headwater doctor`: is this machine fit to serve, and what to do if not. Exit code 1 when something must be done."""

import argparse
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater.cli.doctor_checks import CHECKS, Check, Subject
from headwater.cli.flags import add_config_flags, load_from

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")
    add_config_flags(parser, names=("host", "port", "weights_cache", "device", "log_level"))


def run(args: argparse.Namespace) -> int:
    subject = Subject(load_from(args).config)
    checks = [check for group in CHECKS for check in group(subject)]
    if args.json:
        print(json.dumps([_plain(check) for check in checks], indent=2))
    else:
        _print(checks)
    return 1 if any(check.status == "fail" for check in checks) else 0


def _plain(check: Check) -> dict[str, str]:
    return {"name": check.name, "status": check.status, "detail": check.detail, "advice": check.advice}


def _print(checks: Sequence[Check]) -> None:
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(Text(check.status, _STYLES[check.status]), check.name, Text(check.detail))
        if check.advice and check.status != "ok":
            table.add_row("", "", Text(f"-> {check.advice}", "dim"))
    Console(highlight=False).print(table)
