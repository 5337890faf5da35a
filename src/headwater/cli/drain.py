"""`headwater drain WORKER`: a worker gets nothing new, finishes or hands over its streams, and leaves.

Under `headwater serve` a fresh process takes its place. Exit code 0 once it is gone, 3 when it is not in time.
"""

import argparse
import json
import time

from headwater.cli.http import Server
from headwater.cli.parser import seconds
from headwater.cli.target import add_target, server_of
from headwater.cli.worker_command import tell, workers
from headwater.errors import DeadlineExceeded

_TIMEOUT_S = 10.0
_POLL_S = 0.2
_LEAVING_S = 30.0
"""What a worker may take beyond its streams."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="id of the worker, as `headwater status` shows it")
    parser.add_argument(
        "--within", type=seconds, default=30.0, metavar="TIME", help="for streams to finish before they go elsewhere"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is gone")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    server = server_of(args, _TIMEOUT_S)
    began = time.monotonic()
    tell(server, "drain", args.worker, {"within_s": args.within})
    if not args.no_wait:
        _until_gone(server, args.worker, began + args.within + _LEAVING_S)
    took_s = time.monotonic() - began
    state = "draining" if args.no_wait else "gone"
    if args.json:
        print(json.dumps({"worker_id": args.worker, "state": state, "took_s": round(took_s, 2)}))
    else:
        print(f"{args.worker} is {state}" + ("" if args.no_wait else f", after {took_s:.1f} s"))
    return 0


def _until_gone(server: Server, worker_id: str, deadline: float) -> None:
    while worker_id in workers(server):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{worker_id} is still there", hint="`headwater status` shows what it does")
        time.sleep(_POLL_S)
