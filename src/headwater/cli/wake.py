"""`headwater wake WORKER`: a worker that sleeps is ready again.

Exit code 0 once it is ready; 1 when it has gone; 3 when it is not ready in time. Its log says why.
"""

import argparse

from headwater.cli.worker_command import add_change_arguments, run_change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_change_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_change(args, "wake", "ready")
