"""The cluster as this frontend sees it: follows the registry, keeps a connection to every worker.

Who may get requests: a worker with a lease in state `ready`, once it is connected. A broken connection takes it out
of rotation at once and its open streams go on elsewhere; while its lease stands it is connected again. A lease that is
gone takes it out of rotation at once too, but its streams go on as long as the connection lives: a worker that gives up
its lease may still be finishing. One that does not move on (`headwater.frontend.vigil`) is put aside: its streams go on
elsewhere, and it is back in service once it answers a canary. One that reports that its attached server is away gets
nothing until it reports otherwise. A registry outage changes nothing.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from headwater.errors import HeadwaterError, InvalidRequest, WorkerLost
from headwater.frontend.connection import OpenLink, WorkerConnection
from headwater.frontend.dispatcher import ClusterDispatcher
from headwater.frontend.fault_metrics import FaultMetrics
from headwater.frontend.models import ModelSet
from headwater.frontend.starved import StarvedHere
from headwater.frontend.vigil import Vigil, VigilLimits
from headwater.protocol.cluster import Instance
from headwater.protocol.events import EventBatch, EventSnapshot, LoadReport
from headwater.protocol.frames import Drain, SetRole, Sleep, StepFrame, Wake
from headwater.router.view import ClusterView
from headwater.runtime.events.base import EventSubscriber
from headwater.runtime.registry.base import (
    InstanceGone,
    InstancePut,
    ModelGone,
    ModelPut,
    Outage,
    Registry,
    RegistryEvent,
    Synced,
)
from headwater.types import Role

logger = logging.getLogger(__name__)

_RESUBSCRIBE_DELAY_S = 2.0
_LONGEST_DRAIN_S = 24 * 3600.0
_FIRST_CANARY_S = 0.5
_LONGEST_CANARY_DELAY_S = 30.0
_FORGET_QUARANTINES_S = 120.0
"""In service for so long: its next quarantine counts as the first again."""

OnHung = Callable[[int, float], None]
"""Process id of a worker of this host, and for how many seconds it has answered nothing."""


class Cluster:
    """Owns the connections and feeds view, models and dispatcher."""

    def __init__(
        self,
        registry: Registry,
        open_link: OpenLink,
        subscriber: EventSubscriber,
        view: ClusterView,
        models: ModelSet[Any],
        dispatcher: ClusterDispatcher,
        vigil: VigilLimits | None = None,
    ) -> None:
        self.registry_reachable = True
        self.on_hung: OnHung | None = None
        """Who may start another worker in place of one of this host that is not expected back."""
        self._registry = registry
        self._open_link = open_link
        self._subscriber = subscriber
        self._view = view
        self._models = models
        self._dispatcher = dispatcher
        self._connections: dict[str, WorkerConnection] = {}
        self._retired: set[WorkerConnection] = set()
        self._vigil = Vigil(view, vigil or VigilLimits())
        self._starved = StarvedHere(self.connection)
        self._faults: FaultMetrics = dispatcher.faults
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._spawn(self._follow_registry())
        self._spawn(self._keep_vigil())

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._dispatcher.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in (*self._connections.values(), *self._retired):
            await connection.close()
        self._connections.clear()
        self._retired.clear()
        await self._models.close()

    def tell_role(self, worker_id: str, role: Role) -> None:
        """An adaptive worker is to change its role; the registry tells when it has."""
        connection = self._connections.get(worker_id)
        if connection is not None and connection.connected:
            connection.send(SetRole(role))

    def connection(self, worker_id: str) -> WorkerConnection | None:
        return self._connections.get(worker_id)

    def drain(self, worker_id: str, within_s: float) -> None:
        """Tell a worker to leave. Raises `InvalidRequest` for an unknown one, or what keeps it from hearing."""
        self._known(worker_id).send(Drain(min(within_s, _LONGEST_DRAIN_S)))

    def sleep(self, worker_id: str) -> None:
        """Tell a worker to give its memory back for a while; the registry says when it is asleep. Raises likewise."""
        worker = self._known(worker_id)
        if not worker.instance.can_sleep:
            engine = worker.instance.engine
            raise InvalidRequest(
                f"worker {worker_id} cannot sleep: its engine, {engine}, does not give memory back", param="worker_id"
            )
        worker.send(Sleep())

    def wake(self, worker_id: str) -> None:
        self._known(worker_id).send(Wake())

    def _known(self, worker_id: str) -> WorkerConnection:
        connection = self._connections.get(worker_id)
        if connection is None:
            raise InvalidRequest(f"there is no worker {worker_id}", param="worker_id")
        return connection

    # -- registry -----------------------------------------------------------------------------------------------

    async def _follow_registry(self) -> None:
        async for event in self._registry.watch():
            self.apply(event)

    def apply(self, event: RegistryEvent) -> None:
        match event:
            case InstancePut(instance):
                self._put(instance)
            case InstanceGone(worker_id):
                self._gone(worker_id)
            case ModelPut(entry):
                self._models.put_catalogue(entry)
            case ModelGone(name):
                self._models.remove_catalogue(name)
            case Synced():
                self._models.synced = True
            case Outage(reachable, reason):
                self._outage(reachable, reason)

    def _put(self, instance: Instance) -> None:
        connection = self._connections.get(instance.worker_id)
        self._view.put(instance)
        if connection is not None:
            self._changed(connection, instance)
        else:
            connection = WorkerConnection(instance, self._open_link, self)
            self._connections[instance.worker_id] = connection
            connection.start()
            model = instance.card.name or "no model yet"
            logger.info("worker %s appeared (%s, %s)", instance.worker_id, model, instance.state)
        self._models.refresh()

    def _changed(self, connection: WorkerConnection, instance: Instance) -> None:
        """A worker that has loaded its model has another card than before."""
        other_model = connection.instance.card.fingerprint != instance.card.fingerprint
        if other_model:
            self._models.remove_source(connection)
        connection.instance = instance
        if other_model and connection.connected:
            self._models.add_source(connection)

    def _gone(self, worker_id: str) -> None:
        connection = self._connections.pop(worker_id, None)
        self._view.remove(worker_id)
        self._vigil.remove(worker_id)
        if connection is None:
            return
        logger.info("worker %s is gone from the registry", worker_id)
        connection.retired = True
        self._models.remove_source(connection)
        if connection.connected and self._dispatcher.has_streams(connection):
            self._retired.add(connection)
        else:
            self._spawn(self._end(connection))

    def _outage(self, reachable: bool, reason: str) -> None:
        self.registry_reachable = reachable
        if reachable:
            logger.info("the registry can be reached again")
        else:
            logger.warning("the registry cannot be reached (%s); serving goes on with what is known", reason)

    # -- ConnectionOwner ----------------------------------------------------------------------------------------

    def on_connected(self, connection: WorkerConnection) -> None:
        if connection.retired:
            return
        logger.info("worker %s is connected", connection.worker_id)
        self._dispatcher.taken_back(connection)
        if not connection.quarantined:
            self._admit(connection)
        self._models.add_source(connection)
        self._spawn(self._subscribe(connection))

    def _admit(self, connection: WorkerConnection) -> None:
        """It may get requests from now on, as far as its record says so."""
        connection.admitted = self._loop.time()
        self._vigil.add(connection.worker_id, connection.admitted)
        self._view.set_connected(connection.worker_id, True)
        self._dispatcher.add_connection(connection)
        self._models.refresh()

    def on_step(self, connection: WorkerConnection, frame: StepFrame) -> None:
        connection.has_computed = connection.has_computed or any(output.token_ids for output in frame.outputs)
        self._vigil.stepped(connection.worker_id, self._loop.time())
        self._dispatcher.on_step(connection, frame)
        if connection.retired and not self._dispatcher.has_streams(connection):
            self._retired.discard(connection)
            self._spawn(self._end(connection))

    def on_lost(self, connection: WorkerConnection, error: HeadwaterError) -> None:
        if not connection.retired:
            self._vigil.put_out(connection.worker_id, self._loop.time())
        self._view.set_connected(connection.worker_id, False)
        self._dispatcher.remove_connection(connection, error)
        self._models.remove_source(connection)
        self._spawn(self._unsubscribe(connection))
        if connection.retired:
            self._retired.discard(connection)
            self._spawn(self._end(connection))

    # -- events -------------------------------------------------------------------------------------------------

    async def _subscribe(self, connection: WorkerConnection) -> None:
        """Follow a worker's events, however often it takes. Without them it is routed to by bookings alone."""
        while connection.connected:
            try:
                await self._subscriber.subscribe(connection.instance.event_address, self._on_batch, self._on_snapshot)
                return
            except HeadwaterError as error:
                logger.warning("no load reports from worker %s: %s", connection.worker_id, error.message)
                await asyncio.sleep(_RESUBSCRIBE_DELAY_S)

    async def _unsubscribe(self, connection: WorkerConnection) -> None:
        await self._subscriber.unsubscribe(connection.instance.event_address)

    def _on_batch(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, LoadReport):
                self._vigil.reported(batch.worker_id, event, self._loop.time())
        self._tell_view(batch.worker_id, lambda: self._view.apply(batch.worker_id, batch.events))

    def _on_snapshot(self, snapshot: EventSnapshot) -> None:
        self._tell_view(snapshot.worker_id, lambda: self._view.rebuild(snapshot))

    def _tell_view(self, worker_id: str, tell: Callable[[], None]) -> None:
        """What a worker reports may change whether it can be given work."""
        worker = self._view.worker(worker_id)
        before = worker.away if worker is not None else ""
        tell()
        if worker is not None and worker.away != before:
            logger.warning("worker %s: %s", worker_id, worker.away or "it can be given work again")
            self._models.refresh()

    # -- the vigil ----------------------------------------------------------------------------------------------

    async def _keep_vigil(self) -> None:
        look_s = self._vigil.limits.look_s
        last = self._loop.time()
        while True:
            await asyncio.sleep(look_s)
            now = self._loop.time()
            self._vigil.forgive(max(0.0, now - last - 2 * look_s), now)
            last = now
            try:
                self._look_after(now)
            except Exception:  # the task's border: one bad look must not be the last one
                logger.exception("looking after the workers failed")

    def _look_after(self, now: float) -> None:
        self._starved.look(self._vigil, now)
        for worker_id, silent_s in self._vigil.hanging(now):
            if self._vigil.may_be_put_aside(worker_id, silent_s):
                self._quarantine(worker_id, f"worker {worker_id} has not moved on for {silent_s:.1f} s")
        for worker_id in self._vigil.due_for_canary(now):
            self._spawn(self._check_idle(worker_id))
        for worker_id, silent_s in self._vigil.hopeless(now):
            self._tell_hung(worker_id, silent_s)

    def _tell_hung(self, worker_id: str, silent_s: float) -> None:
        """If it is of this host. One that has never computed a step is left alone: its first one may take minutes, if
        kernels are compiled. So is one that refuses us: it answers, and others may be served there."""
        connection = self._connections.get(worker_id)
        if self.on_hung is None or connection is None or connection.refuses or not connection.has_computed:
            return
        if connection.instance.host == socket.gethostname():
            self.on_hung(connection.instance.pid, silent_s)

    async def _check_idle(self, worker_id: str) -> None:
        connection = self._connections.get(worker_id)
        worker = self._view.worker(worker_id)
        if connection is None or worker is None or not worker.eligible:
            return
        longest_s = self._vigil.longest_answer_s(worker)
        self._vigil.asked(worker_id, self._loop.time())
        try:
            await self._dispatcher.probes.probe(connection, longest_s)
        except HeadwaterError as error:
            if connection.connected and self._vigil.may_be_put_aside(worker_id, longest_s):
                self._quarantine(worker_id, error.message)
        finally:
            self._vigil.answered(worker_id)

    def _quarantine(self, worker_id: str, reason: str) -> None:
        connection = self._connections.get(worker_id)
        if connection is None or connection.quarantined:
            return
        recent = self._loop.time() - connection.admitted < _FORGET_QUARANTINES_S
        connection.quarantined = True
        connection.num_quarantines = connection.num_quarantines + 1 if recent else 1
        self._faults.quarantined += 1
        self._vigil.put_out(worker_id, self._loop.time())
        self._view.set_connected(worker_id, False)
        self._models.refresh()
        self._dispatcher.abandon(connection, reason)
        logger.warning("%s: it gets no requests until it answers a canary", reason)
        self._spawn(self._await_recovery(connection))

    async def _await_recovery(self, connection: WorkerConnection) -> None:
        """Ask until it answers, ever more seldom; the more often it was put aside of late, the later."""
        delay_s = _FIRST_CANARY_S * 2.0 ** min(connection.num_quarantines - 1, 6)
        while not connection.retired:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_CANARY_DELAY_S)
            if await self._answers(connection):
                break
        connection.quarantined = False
        if connection.connected and not connection.retired:
            logger.warning("worker %s moves on again and is back in service", connection.worker_id)
            self._faults.returned += 1
            self._dispatcher.taken_back(connection)
            self._admit(connection)

    async def _answers(self, connection: WorkerConnection) -> bool:
        worker = self._view.worker(connection.worker_id)
        if worker is None:
            return False
        try:
            await self._dispatcher.probes.probe(connection, self._vigil.longest_answer_s(worker))
        except HeadwaterError:
            return False
        return True

    # -- tasks --------------------------------------------------------------------------------------------------

    async def _end(self, connection: WorkerConnection) -> None:
        error = WorkerLost(f"worker {connection.worker_id} is gone")
        self._dispatcher.remove_connection(connection, error)
        await self._unsubscribe(connection)
        await connection.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a cluster task failed", exc_info=task.exception())
