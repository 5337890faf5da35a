"""One simulated run as data: what is asked of which cluster. Runs are independent, so that processes can share them."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from headwater.bench.traces import read_trace
from headwater.errors import ConfigError
from headwater.router.policy import Policy, PolicySettings
from headwater.sim.cluster import NO_QUEUE, PATIENT_QUEUE, SimConfig
from headwater.sim.mixes import Mix
from headwater.sim.pools import make_cluster
from headwater.sim.report import SimCurves, SimReport, curves, mode_of, shared_lru_hit_rate, summarise
from headwater.sim.request_log import from_log, is_request_log, read_log
from headwater.sim.timing import StepTimes
from headwater.sim.workload import SimRequest, from_trace

_ROUTING = re.compile(r"([\w.-]+?)(?:@([01]|[01]?\.\d+))?(\+queue)?")


@dataclass(frozen=True, slots=True)
class Load:
    """Where requests come from."""

    source: Path | Mix
    block_size: int
    limit: int | None = None
    seed: int = 0
    """Of a mix."""

    @property
    def name(self) -> str:
        return self.source.name if isinstance(self.source, Mix) else self.source.name.split(".")[0]

    def requests(self) -> list[SimRequest]:
        """In order of arrival. Raises `ConfigError` for a file that cannot be read."""
        if isinstance(self.source, Mix):
            return self.source.requests(self.block_size, self.seed)[: self.limit]
        if is_request_log(self.source):
            return from_log(read_log(self.source), self.block_size)[: self.limit]
        requests = from_trace(read_trace(self.source), self.block_size)
        return sorted(requests, key=lambda request: request.at_s)[: self.limit]


@dataclass(frozen=True, slots=True)
class Routing:
    """How requests are placed, written `delay`, `delay@0.3`, `delay+queue` or `delay@0.3+queue`."""

    policy: str
    decode_share: float | None = None
    """What the number says: how much the time after the first token matters."""
    queued: bool = False
    """Behind the production queue, which refuses nobody here."""

    @classmethod
    def parse(cls, written: str) -> "Routing":
        """Raises `ConfigError` for what is not written so."""
        matched = _ROUTING.fullmatch(written)
        if matched is None:
            raise ConfigError(f"no policy is written {written!r}", hint="for example delay, delay@0.3 or delay+queue")
        policy, share, queue = matched.groups()
        return cls(policy, None if share is None else float(share), queue is not None)

    def __str__(self) -> str:
        share = "" if self.decode_share is None else f"@{self.decode_share:g}"
        return f"{self.policy}{share}{'+queue' if self.queued else ''}"

    @property
    def settings(self) -> PolicySettings:
        return PolicySettings() if self.decode_share is None else PolicySettings(self.decode_share)


@dataclass(frozen=True, slots=True)
class SimRun:
    """A load, a cluster, and how requests are placed in it."""

    load: Load
    config: SimConfig
    times: StepTimes
    routing: Routing

    def execute(self, policy: Policy, progress: Callable[[int], None] | None = None) -> tuple[SimReport, SimCurves]:
        """`policy` is the one named in `routing`; `progress` is told now and then how many requests have ended."""
        config = replace(self.config, queue=PATIENT_QUEUE if self.routing.queued else NO_QUEUE)
        requests = _requests(self.load)
        started = time.process_time()
        result = make_cluster(config, [self.times] * config.num_workers, policy).run(requests, progress)
        cpu_s = time.process_time() - started
        report = summarise(
            result,
            trace=self.load.name,
            policy=str(self.routing),
            mode=mode_of(config),
            ceiling=_ceiling(self.load, config.num_workers * config.num_blocks),
            block_tokens=config.block_size,
            cpu_s=cpu_s,
        )
        return report, curves(result)


# Runs come ordered by load: the last one is the one to keep.
@lru_cache(maxsize=1)
def _requests(load: Load) -> list[SimRequest]:
    return load.requests()


@lru_cache(maxsize=16)
def _ceiling(load: Load, capacity_blocks: int) -> float:
    return shared_lru_hit_rate(_requests(load), capacity_blocks, load.block_size)
