"""On PYTHONPATH: reads and writes of blocks take as long as on a disk of SLOW_DISK_MB_PER_S, one at a time."""

import os
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

BYTES_PER_S = 1e6 * float(os.environ["SLOW_DISK_MB_PER_S"])


def slowed(call: Callable[..., int], turn: Lock) -> Callable[..., int]:
    def run(*args: Any) -> int:
        with turn:
            began = time.perf_counter()
            num_bytes = call(*args)
            time.sleep(max(0.0, began + num_bytes / BYTES_PER_S - time.perf_counter()))
        return num_bytes

    return run


one_at_a_time = Lock()
os.preadv = slowed(os.preadv, one_at_a_time)
os.pwritev = slowed(os.pwritev, one_at_a_time)
