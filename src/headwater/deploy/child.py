"""Entry of a supervised process: takes its configuration from an inherited file, reports over an inherited pipe.

Dies with its supervisor, whatever kills that (PDEATHSIG). Never sees secrets on its command line or in its environment.
"""

import argparse
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headwater.config.fields import secrets_of
from headwater.config.schema import ServeConfig
from headwater.deploy.actions import FAILED_EXIT, PERMANENT_EXIT
from headwater.deploy.reports import Reporter
from headwater.errors import ConfigError, HeadwaterError, ModelError
from headwater.logs import configure_logging
from headwater.runtime.parent import die_with_parent

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Seat:
    """Which of the processes of a kind this is."""

    index: int
    listen_fds: tuple[int, ...] = ()
    """Sockets that listen already, for a frontend."""


RunPart = Callable[[ServeConfig, Seat, Reporter], int]
"""Runs until the process is told to leave; returns the exit code."""


def main(argv: Sequence[str], run_parts: Mapping[str, RunPart]) -> int:
    """Run the part that the command line names; the exit code is for the supervisor."""
    args = _parse(argv, list(run_parts))
    die_with_parent(args.parent_pid)
    config = read_config(args.config_fd)
    configure_logging(config.runtime, f"{args.kind}-{args.index}", secrets=secrets_of(config))
    reporter = Reporter(args.report_fd)
    try:
        seat = Seat(args.index, tuple(int(fd) for fd in args.listen_fds.split(",") if fd))
        return run_parts[args.kind](config, seat, reporter)
    except HeadwaterError as error:
        _log.debug("%s failed", args.kind, exc_info=True)
        reporter.failed(error)
        return PERMANENT_EXIT if isinstance(error, ConfigError | ModelError) else FAILED_EXIT


def arguments(kind: str, seat: Seat, config_fd: int, report_fd: int) -> list[str]:
    """The command line that `main` reads."""
    words = {"--index": seat.index, "--config-fd": config_fd, "--report-fd": report_fd, "--parent-pid": os.getpid()}
    listening = ["--listen-fds", ",".join(map(str, seat.listen_fds))] if seat.listen_fds else []
    return [kind, *(str(word) for pair in words.items() for word in pair), *listening]


def read_config(fd: int) -> ServeConfig:
    """Read from the start whatever the file position, which siblings share."""
    pieces: list[bytes] = []
    while piece := os.pread(fd, _READ_BYTES, sum(map(len, pieces))):
        pieces.append(piece)
    os.close(fd)
    return msgspec.json.decode(b"".join(pieces), type=ServeConfig)


def _parse(argv: Sequence[str], kinds: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("kind", choices=kinds)
    for name in ("--index", "--config-fd", "--report-fd", "--parent-pid"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--listen-fds", default="")
    return parser.parse_args(argv)
