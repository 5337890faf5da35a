"""`headwater restart`: every process of a running `headwater serve` is replaced, one after the other, losing nothing.

Workers finish or hand over their streams before they leave; frontends are succeeded on the same listening socket.
Exit code 0 once all have been replaced, 1 when that ended early, 3 when it is not over in time.
"""

import argparse
import json
import os
import signal
import time

from headwater.cli.flags import add_config_flags
from headwater.cli.parser import seconds
from headwater.cli.target import running_cluster
from headwater.deploy.clusters import ClusterRecord, running_clusters
from headwater.errors import DeadlineExceeded, HeadwaterError, Unavailable

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=int, metavar="N", help="process id of the `headwater serve` that is meant")
    parser.add_argument("--wait", type=seconds, default=1800.0, metavar="TIME", help="0: do not wait until it is over")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_config_flags(parser, names=("log_level",))


def run(args: argparse.Namespace) -> int:
    cluster = running_cluster(args.pid)
    began = time.monotonic()
    os.kill(cluster.pid, signal.SIGUSR2)
    if args.wait:
        _until_over(cluster, began + args.wait)
    took_s = time.monotonic() - began
    if args.json:
        print(json.dumps({"pid": cluster.pid, "over": bool(args.wait), "took_s": round(took_s, 2)}))
    else:
        print(f"all processes have been replaced, in {took_s:.1f} s" if args.wait else "the restart has begun")
    return 0


def _until_over(before: ClusterRecord, deadline: float) -> None:
    while True:
        now = next((cluster for cluster in running_clusters() if cluster.pid == before.pid), None)
        if now is None:
            raise Unavailable(f"the `headwater serve` with process id {before.pid} has ended")
        if now.restarts > before.restarts:
            if now.restart_failure is not None:
                raise HeadwaterError(f"the restart ended early: {now.restart_failure}")
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded("the restart is not over yet", hint="it goes on; its log tells how far it is")
        time.sleep(_POLL_S)
