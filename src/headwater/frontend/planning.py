"""Keeps the roles of adaptive workers fitting to the traffic: looks, lets the planner think elsewhere, tells workers.

A decision takes tenths of a second of computing, so it is made in a process of its own, at low priority; the planner
travels there and back. Nothing depends on it: while it cannot decide, roles stay as they are. Of several frontends that
had requests in the last minute the one with the least id plans, by what it sees itself and by how large a part of all
work that is.
"""

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from headwater.clock import Clock
from headwater.errors import InvalidRequest
from headwater.planner.decide import Decision, Planner, PlannerSettings
from headwater.planner.observe import pool_of, served_of
from headwater.planner.plan import RolePlan
from headwater.planner.pool import WorkerModel
from headwater.router.decisions import DecisionLog
from headwater.router.view import ClusterView
from headwater.router.worker import WorkerView, time_class
from headwater.runtime.parent import die_with_parent
from headwater.types import Role

logger = logging.getLogger(__name__)

_DECIDE_TIMEOUT_S = 60.0
_NICE = 10
_RESCUE_S = 0.5
_ACTIVE_S = 60.0
"""That a frontend counts after its last request."""

TellRole = Callable[[str, Role], None]
"""By worker id."""


@dataclass(slots=True)
class ModelPlan:
    """The plan of one model's workers."""

    planner: Planner
    workers: tuple[str, ...]
    last: Decision | None = None
    num_changes: int = 0
    scored: Decision | None = None
    """The last decision for which plans were tried."""


@dataclass(frozen=True, slots=True)
class PlanningSettings:
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    link_bytes_per_ms: float = 10e6


class Planning:
    """One per frontend; `start`, then `close`."""

    def __init__(
        self, view: ClusterView, log: DecisionLog, clock: Clock, tell: TellRole, settings: PlanningSettings
    ) -> None:
        self.plans: dict[str, ModelPlan] = {}
        """By model fingerprint."""
        self.pinned: dict[str, Role] = {}
        """By worker: roles that somebody insists on; empty: the planner chooses."""
        self._view = view
        self._log = log
        self._clock = clock
        self._tell = tell
        self._settings = settings
        self._active: dict[str, float] = {}
        """When each frontend was last known to have requests open."""
        self._executor: Executor | None = None
        self._task: asyncio.Task[None] | None = None

    def is_loose(self, fingerprint: str) -> bool:
        """Whether requests for a model may leave its plan."""
        kept = self.plans.get(fingerprint)
        return kept is not None and not self.pinned and kept.planner.plan.loose

    def pin(self, roles: Mapping[str, Role]) -> None:
        """Somebody says which adaptive worker does what, until `unpin`. Raises `InvalidRequest`."""
        known = {worker.worker_id: worker.instance for worker in self._view.workers}
        for worker_id in roles:
            if worker_id not in known or not known[worker_id].adaptive:
                reason = "has a role of its own" if worker_id in known else "is not here"
                raise InvalidRequest(f"worker {worker_id} {reason}", param="roles")
        for fingerprint in {known[worker_id].card.fingerprint for worker_id in roles}:
            of_model = [one for one in known.values() if one.card.fingerprint == fingerprint]
            if not RolePlan(tuple(roles.get(one.worker_id, one.role) for one in of_model)).complete:
                raise InvalidRequest("with these roles nobody would prefill, or nobody would decode", param="roles")
        self.pinned = dict(roles)
        self._tell_pinned()

    def unpin(self) -> None:
        """The planner chooses again, from the roles that are there."""
        self.pinned = {}
        self.plans.clear()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="planning of roles")

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end_process()

    async def _run(self) -> None:
        while True:
            await self._pause(self._settings.planner.interval_ms / 1000)
            if self.pinned:
                self._tell_pinned()
                continue
            for fingerprint, workers in self._adaptive().items():
                try:
                    await self._plan(fingerprint, workers)
                except Exception:  # border of the task: serving goes on with the roles there are
                    logger.exception("no plan of roles was made; roles stay")
                    self._end_process()

    async def _pause(self, seconds: float) -> None:
        """Until the next look; meanwhile no model is left without a worker that decodes, whoever plans."""
        ends = self._clock.now() + seconds
        while (left := ends - self._clock.now()) > 0:
            await asyncio.sleep(min(left, _RESCUE_S))
            self._rescue()

    def _rescue(self) -> None:
        usable = [worker for worker in self._view.workers if worker.usable]
        decoded = {worker.instance.card.fingerprint for worker in usable if worker.instance.role != "prefill"}
        for worker in usable:
            instance = worker.instance
            if instance.adaptive and instance.card.fingerprint not in decoded:
                logger.warning("nobody decodes %s any more: %s does both", instance.card.name, worker.worker_id)
                self._tell(worker.worker_id, "both")

    def _adaptive(self) -> dict[str, list[WorkerView]]:
        """Workers of each model that has adaptive ones, if this frontend is the one to plan."""
        found: dict[str, list[WorkerView]] = {}
        for worker in sorted(self._view.workers, key=lambda worker: worker.worker_id):
            if worker.usable:
                found.setdefault(worker.instance.card.fingerprint, []).append(worker)
        for fingerprint in self.plans.keys() - found.keys():
            del self.plans[fingerprint]
        return {
            fingerprint: workers
            for fingerprint, workers in found.items()
            if len(workers) > 1 and any(worker.instance.adaptive for worker in workers) and self._leads(workers)
        }

    def _leads(self, workers: Iterable[WorkerView]) -> bool:
        """Whether this frontend has the least id of those that had requests lately."""
        now = self._clock.now()
        loads = [worker.load for worker in workers if worker.load is not None]
        for load in loads:
            self._active.update({told.frontend_id: now for told in load.frontends})
        if any(worker.booked_sequences for worker in workers):
            self._active[self._view.frontend_id] = now
        self._active = {name: seen for name, seen in self._active.items() if now - seen < _ACTIVE_S}
        return min(self._active, default="") == self._view.frontend_id

    def believed(self) -> dict[str, list[WorkerModel]]:
        """What is known of the workers of each model, as far as their step times are."""
        by_model: dict[str, list[WorkerView]] = {}
        for worker in self._view.workers:
            if worker.usable:
                by_model.setdefault(worker.instance.card.name, []).append(worker)
        pools = {name: self._pool(workers) for name, workers in by_model.items()}
        return {name: pool for name, pool in pools.items() if pool is not None}

    def _pool(self, workers: Sequence[WorkerView]) -> list[WorkerModel] | None:
        steps = {name: self._view.perf.steps(name) for name in {time_class(worker.instance) for worker in workers}}
        return pool_of(workers, steps, self._settings.link_bytes_per_ms)

    async def _plan(self, fingerprint: str, workers: list[WorkerView]) -> None:
        now_ms = self._clock.epoch() * 1000
        kept = self._kept(fingerprint, workers, now_ms)
        pool = self._pool(workers)
        if pool is not None:
            self._observe(kept, workers)
            await self._decide(kept, now_ms, pool)
        if not self.pinned:  # somebody may have insisted on roles meanwhile
            self._tell_roles(kept, workers)

    def _kept(self, fingerprint: str, workers: list[WorkerView], now_ms: float) -> ModelPlan:
        """The plan so far. When workers come or go it begins with the roles that are there."""
        ids = tuple(worker.worker_id for worker in workers)
        kept = self.plans.get(fingerprint)
        if kept is not None and kept.workers == ids:
            return kept
        fixed = [None if worker.instance.adaptive else worker.instance.role for worker in workers]
        planner = Planner(len(workers), self._settings.planner, fixed)
        roles = RolePlan(tuple(worker.instance.role for worker in workers))
        if roles.complete:
            planner.adopt(roles, now_ms)
        kept = self.plans[fingerprint] = ModelPlan(planner, ids)
        return kept

    def _observe(self, kept: ModelPlan, workers: list[WorkerView]) -> None:
        kept.planner.traffic.refill(served_of(self._log, set(kept.workers)))
        own = sum(worker.booked_sequences for worker in workers)
        foreign = sum(worker.foreign.num_sequences for worker in workers if worker.foreign is not None)
        kept.planner.share = max(0.01, own / (own + foreign)) if own else 1.0

    async def _decide(self, kept: ModelPlan, now_ms: float, pool: list[WorkerModel]) -> None:
        loop = asyncio.get_running_loop()
        try:
            deciding = loop.run_in_executor(self._process(), _decide, kept.planner, now_ms, pool)
            kept.planner, decision = await asyncio.wait_for(deciding, _DECIDE_TIMEOUT_S)
        except (TimeoutError, BrokenProcessPool) as error:
            logger.warning("no plan of roles was made (%s); roles stay", error or type(error).__name__)
            self._end_process()
            return
        kept.last = decision
        if decision.scores:
            kept.scored = decision
        if decision.changed:
            kept.num_changes += 1
            logger.info("roles: %s, since %s", decision.plan.describe(), decision.reason)

    def _tell_roles(self, kept: ModelPlan, workers: list[WorkerView]) -> None:
        """Told again until the registry says so."""
        for worker, role in zip(workers, kept.planner.plan.roles, strict=True):
            if worker.instance.adaptive and worker.instance.role != role:
                self._tell(worker.worker_id, role)

    def _tell_pinned(self) -> None:
        for worker in self._view.workers:
            role = self.pinned.get(worker.worker_id, worker.instance.role)
            if worker.instance.adaptive and worker.instance.role != role:
                self._tell(worker.worker_id, role)

    def _process(self) -> Executor:
        if self._executor is None:
            # A forked child would inherit the sockets and the threads of this process.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(os.getpid(),))
        return self._executor

    def _end_process(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)


def _begin(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    os.nice(_NICE)


def _decide(planner: Planner, now_ms: float, pool: list[WorkerModel]) -> tuple[Planner, Decision]:
    return planner, planner.decide(now_ms, pool)
