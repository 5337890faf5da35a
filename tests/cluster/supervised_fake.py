"""A child process for supervisor tests. `engine.model` says how each part behaves: `worker-0=crash,frontend-0=stuck`.

Not a test. Speaks the real child protocol through `headwater.deploy.child`.
"""

import logging
import os
import signal
import subprocess
import sys
import time

from headwater.config.schema import ServeConfig
from headwater.deploy.child import main
from headwater.deploy.reports import Reporter
from headwater.engines.base import Progress
from headwater.errors import ConfigError, HeadwaterError


def behave(kind: str, config: ServeConfig, index: int, reporter: Reporter) -> int:
    name = f"{kind}-{index}"
    behaviour = dict(word.split("=") for word in (config.engine.model or "").split(",") if word).get(name, "ok")
    print(f"{name} pid {os.getpid()} keys {len(config.frontend.api_key)}")
    logging.getLogger("fake").warning("%s has the key %s", name, ", ".join(config.frontend.api_key))
    reporter.progress(Progress("load", 1, 2, "bytes"))
    match behaviour:
        case "config-error":
            raise ConfigError("no such model", hint="name another")
        case "failed":
            raise HeadwaterError("the device is on fire")
        case "crash":
            os._exit(7)
        case "slow":
            time.sleep(600)
        case "waits":
            while True:
                reporter.progress(Progress("wait", detail="there is no server"))
                time.sleep(0.05)
        case "stuck":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "grandchild":
            process = subprocess.Popen(["sleep", "600"])
            print(f"grandchild {process.pid}")
        case "long-line":
            sys.stdout.write("x" * 300_000 + "\n")
        case "babble":
            os.write(reporter._fd, b"no json\n" + b"\x00" * 200_000 + b"\n")
    reporter.progress(Progress("ready"))
    if behaviour == "crash-after-ready":
        os._exit(9)
    if behaviour == "drains":
        signal.signal(signal.SIGTERM, lambda *_: (print(f"{name} drained", flush=True), os._exit(0)))
    while True:
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(
        main(
            sys.argv[1:],
            {
                "frontend": lambda config, seat, reporter: behave("frontend", config, seat.index, reporter),
                "worker": lambda config, seat, reporter: behave("worker", config, seat.index, reporter),
            },
        )
    )
