"""`headwater sleep WORKER`: a worker finishes or hands over its streams, and gives its device's memory back.

Exit code 0 once it is asleep; 1 when it has gone on instead, and its log says why; 2 when its engine cannot; 3 when it
is not asleep in time.
"""

import argparse

from headwater.cli.worker_command import add_change_arguments, run_change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_change_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_change(args, "sleep", "asleep")
