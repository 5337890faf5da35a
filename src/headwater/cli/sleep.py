"""`headwater sleep WORKER`: a worker finishes or hands over its streams, and gives its device's memory back.

Exit code 0 once it is asleep, 3 when it is not in time: then its log says why.
"""

import argparse

from headwater.cli.worker_command import add_change_arguments, run_change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_change_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_change(args, "sleep", "asleep")
