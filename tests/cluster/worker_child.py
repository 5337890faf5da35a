"""A worker process around the scripted engine, for tests that kill it. Says what happens, a JSON line each."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence

import uvloop
from scripted_engine import ScriptedEngine

from headwater.config.schema import RuntimeConfig, ServeConfig
from headwater.errors import HeadwaterError
from headwater.protocol.request import EngineRequest
from headwater.worker.process import run_worker


def say(what: str, value: object) -> None:
    print(json.dumps([what, value]), flush=True)


class TalkingEngine(ScriptedEngine):
    """Fails when asked for exactly 666 tokens."""

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        super().submit(requests)
        say("submitted", len(requests))
        if requests[0].sampling.max_tokens == 666:
            asyncio.get_running_loop().call_later(0.05, self.fail)

    def abort(self, streams: Sequence[int]) -> None:
        super().abort(streams)
        say("aborted", len(streams))


def main() -> int:
    registry, bind, load_s, drain_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    config = ServeConfig(runtime=RuntimeConfig(registry=registry, bind=bind, drain_timeout=drain_s))
    say("pid", os.getpid())
    engine = TalkingEngine(load_s=load_s)
    try:
        return uvloop.run(run_worker(config, worker_index=0, num_workers=1, make_engine=lambda *_: engine))
    except HeadwaterError as error:
        say("failed", error.code)
        return 1


if __name__ == "__main__":
    sys.exit(main())
