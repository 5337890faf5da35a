"""Which cores a worker computes on, so that workers of one host do not share cores by accident.

The cores this process may use are cut into as many shares as there are workers, hyper-threads of one core kept
together. A worker is bound to its share, not thread by thread, so whatever else runs on the host can still be
evaded. A single worker, or more workers than cores, are left to the operating system. A CPU quota of a container
bounds the number of threads: threads beyond it would only be stopped by the kernel.
"""

import logging
import os
import threading
from dataclasses import dataclass

from headwater.engines.base import Placement
from headwater.engines.native.host import HostCores
from headwater.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part of the host."""

    threads: int
    cpus: tuple[int, ...] | None
    """Logical CPUs to bind to; None: all of them."""


def choose_share(host: HostCores, placement: Placement, threads: int | None) -> Share:
    """Cores and threads of one worker. Raises `ConfigError` for more threads than CPUs."""
    workers, total = placement.count, len(host.cores)
    cores = host.cores
    if 1 < workers <= total:
        index = placement.index % workers
        cores = host.cores[index * total // workers : (index + 1) * total // workers]
    bound = len(cores) < total
    cpus = tuple(sorted(cpu for core in cores for cpu in core))
    if threads is None:
        threads = _default_threads(len(cores), host, workers)
    elif not 1 <= threads <= len(cpus):
        raise ConfigError(f"threads is {threads}, but each of {workers} workers has {len(cpus)} CPUs on this host")
    return Share(threads, cpus if bound else None)


def _default_threads(num_cores: int, host: HostCores, workers: int) -> int:
    """One per core of the share; a worker that has the host to itself leaves a core to the frontend."""
    if workers > len(host.cores):
        return 1
    threads = num_cores - 1 if workers == 1 else num_cores
    if host.quota is not None:
        threads = min(threads, int(host.quota / workers))
    return max(threads, 1)


def bind(share: Share) -> None:
    """Bind the calling thread, and the threads it will start, to the share."""
    if share.cpus is None:
        return
    try:
        os.sched_setaffinity(threading.get_native_id(), share.cpus)
    except OSError as error:
        logger.warning("cannot bind to CPUs %s: %s", share.cpus, error)
