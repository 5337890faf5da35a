"""What verbs that tell a worker something have in common."""

import argparse
import json
import time
from typing import Any
from urllib.parse import quote

from headwater.cli.http import Server, error_message
from headwater.cli.parser import seconds
from headwater.cli.target import add_target, server_of
from headwater.errors import ConfigError, DeadlineExceeded, HeadwaterError, Unavailable

_TIMEOUT_S = 10.0
_POLL_S = 0.2


def add_change_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="id of the worker, as `headwater status` shows it")
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="TIME", help="for it to get there")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_target(parser)


def run_change(args: argparse.Namespace, command: str, state: str) -> int:
    """Tell a worker, and wait until it is in that state."""
    server = server_of(args, _TIMEOUT_S)
    began = time.monotonic()
    before = workers(server).get(args.worker, {"failed_sleeps": 0})
    tell(server, command, args.worker, {})
    while (now := workers(server).get(args.worker, {})).get("state") != state:
        if not now or now["failed_sleeps"] > before["failed_sleeps"]:
            raise HeadwaterError(f"{args.worker} is {now.get('state', 'gone')} and not {state}; its log says why")
        if time.monotonic() > began + args.timeout:
            raise DeadlineExceeded(f"{args.worker} is not {state} yet", hint="its log says why")
        time.sleep(_POLL_S)
    took_s = time.monotonic() - began
    if args.json:
        print(json.dumps({"worker_id": args.worker, "state": state, "took_s": round(took_s, 2)}))
    else:
        print(f"{args.worker} is {state}, after {took_s:.1f} s")
    return 0


def tell(server: Server, command: str, worker_id: str, body: dict[str, Any]) -> None:
    """Raises `ConfigError` for a worker that is not there."""
    status, answer = server.ask("POST", f"/admin/{command}/{quote(worker_id)}", body)
    if status == 202:
        return
    message = error_message(answer)
    if status == 400:
        known = workers(server)
        raise ConfigError(message, hint=None if worker_id in known else f"workers here: {', '.join(known) or 'none'}")
    raise Unavailable(message) if status >= 500 else HeadwaterError(message)


def workers(server: Server) -> dict[str, dict[str, Any]]:
    """What the frontend says about each, by id."""
    document: dict[str, Any] = server.get_json("/debug/cluster")
    return {str(worker["worker_id"]): worker for worker in document["workers"]}
