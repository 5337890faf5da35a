"""The real parts behind `headwater.deploy.child`. Run by the supervisor: `python -m headwater.deploy.parts worker ...`.

Each part's code is imported only in the process that runs it.
"""

import sys

import uvloop

from headwater.config.schema import ServeConfig
from headwater.deploy.child import Seat, main
from headwater.deploy.reports import READY, Reporter
from headwater.engines.base import Progress


def frontend_part(config: ServeConfig, seat: Seat, reporter: Reporter) -> int:
    from headwater.frontend.process import run_frontend

    def listening(port: int) -> None:
        reporter.progress(Progress(READY, detail=f"listening on port {port}"))

    # A new process in place of one that is attached would meet the same server.
    on_hung = None if config.engine.attach else reporter.hung
    return uvloop.run(run_frontend(config, listen_fds=seat.listen_fds, on_listening=listening, on_hung=on_hung))


def worker_part(config: ServeConfig, seat: Seat, reporter: Reporter) -> int:
    from headwater.worker.process import worker_main

    return worker_main(config, worker_index=seat.index, num_workers=config.workers, progress=reporter.progress)


def store_part(config: ServeConfig, seat: Seat, reporter: Reporter) -> int:
    from headwater.kv.node.open import serve_store
    from headwater.tiers.node import node_options
    from headwater.tiers.socket import store_socket

    path = store_socket(config.kv)
    assert path is not None, "a store without an address"
    uvloop.run(serve_store(node_options(config.kv), path, lambda: reporter.progress(Progress(READY, detail=str(path)))))
    return 0


PARTS = {"frontend": frontend_part, "store": store_part, "worker": worker_part}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PARTS))
