"""The frontend process: puts the parts together, serves until told to stop, drains.

The only place that chooses concrete parts. `Frontend` can also be started inside another process's loop, over any
planes and registry: that is how tests and the in-process cluster run it.
"""

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from headwater.clock import Clock, RealClock
from headwater.config.schema import FrontendConfig, RuntimeConfig, ServeConfig
from headwater.errors import ConfigError
from headwater.frontend.admin import AdminPages, FrontendState
from headwater.frontend.app import Application
from headwater.frontend.artifacts import ArtifactCache
from headwater.frontend.cluster import Cluster, OnHung
from headwater.frontend.decision_pages import DecisionPages
from headwater.frontend.dispatcher import ClusterDispatcher
from headwater.frontend.http.base import HttpRequest, Responder
from headwater.frontend.http.limits import HttpLimits
from headwater.frontend.http.server import HttpServer
from headwater.frontend.http.tls import open_tls
from headwater.frontend.metrics import FrontendMetrics, MetricsPage
from headwater.frontend.models import ModelSet
from headwater.frontend.neighbours import Neighbours, accept_from_neighbour, folder_for
from headwater.frontend.openai.serving import RelayedModel, ServedModel, build_model, openai_routes
from headwater.frontend.plan_pages import PlanPages
from headwater.frontend.planning import Planning
from headwater.frontend.records import OpenRequests
from headwater.frontend.request_log import RequestLog
from headwater.frontend.resumption import Resumption, ResumptionLimits
from headwater.frontend.routes import Route
from headwater.frontend.routing import build_router, dispatch_limits, planning_settings, vigil_limits
from headwater.frontend.tenants.admission import TenantAdmission, usage_of
from headwater.frontend.tenants.tenancy import Tenancy, check_public
from headwater.router.router import Router
from headwater.runtime.loopback import is_loopback
from headwater.runtime.planes import Planes, open_planes
from headwater.runtime.private_folder import default_run_folder
from headwater.runtime.registry.base import Registry
from headwater.runtime.registry.open import open_registry

logger = logging.getLogger(__name__)

_OPEN_PATHS = frozenset(("/docs", "/openapi.json"))
_GENERATING_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))
_MIN_DESCRIPTORS = 512
_PARTIAL_BODIES_BYTES = 64 * 1024 * 1024
_LOOK_AROUND_S = 30.0
_LOOK_S = 0.02
_BACK_DOOR_S = 1.0
_GC_THRESHOLD = 50_000
_SWITCH_INTERVAL_S = 0.0005
"""How long the loop waits for a thread that is at work on a long prompt: a tenth of the default."""

OnListening = Callable[[int], None]


class Frontend:
    """One frontend: everything between the HTTP port and the workers."""

    def __init__(
        self,
        config: ServeConfig,
        planes: Planes,
        registry: Registry,
        *,
        cache_folder: Path | None = None,
        meeting_folder: Path | None = None,
        on_built: Callable[[], None] = lambda: None,
        on_hung: OnHung | None = None,
    ) -> None:
        """`meeting_folder`: where frontends of this host find each other; None: this one is alone."""
        frontend_id = f"fe-{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(3)}"
        records = OpenRequests()
        metrics = FrontendMetrics()
        self._config = config
        self._clock = RealClock()
        self._started = self._clock.now()
        self._subscriber = planes.subscriber()
        self._request_log = open_request_log(config.frontend, self._clock)
        self.tenancy = Tenancy(config.frontend, frontend_id, self._clock, public=not is_loopback(config.frontend.host))
        router = build_router(config.router, frontend_id)
        self.view = router.view
        self.dispatcher = self._make_dispatcher(router, records, metrics)
        build = partial(build_model, tokenizer_backend=config.frontend.tokenizer_backend)
        self.models: ModelSet[ServedModel | RelayedModel] = ModelSet(
            self.view, build, ArtifactCache(cache_folder), on_built
        )
        self.cluster = self._make_cluster(planes, registry, frontend_id)
        self.cluster.on_hung = on_hung
        self.planning = self._make_planning()
        self._neighbours: Neighbours | None = None
        if meeting_folder is not None and config.faults.resume_time > 0:
            self._neighbours = Neighbours(meeting_folder, frontend_id)
        self._resumption = Resumption(ResumptionLimits(config.faults.resume_time), metrics.faults, self._neighbours)
        routes = [*self._admin_routes(frontend_id, metrics), *self._api_routes()]
        self.application = self._make_application(routes, records, metrics)
        limits, on_answered = http_limits(config.frontend), self.application.on_answered
        self.server = HttpServer(
            self.application, limits, cors=config.frontend.cors, on_answered=on_answered, tls=open_tls(config.frontend)
        )
        self._back_door = HttpServer(self._answer_neighbour, limits, on_answered=on_answered)

    def _make_dispatcher(self, router: Router, records: OpenRequests, metrics: FrontendMetrics) -> ClusterDispatcher:
        return ClusterDispatcher(
            router,
            records,
            metrics,
            self._clock,
            dispatch_limits(self._config, self.tenancy.weights),
            admission=TenantAdmission(self.tenancy.meter),
            notes=self._request_log,
        )

    def _make_cluster(self, planes: Planes, registry: Registry, frontend_id: str) -> Cluster:
        return Cluster(
            registry,
            lambda address: planes.link(address, frontend_id),
            self._subscriber,
            self.view,
            self.models,
            self.dispatcher,
            vigil_limits(self._config.faults),
        )

    def _make_planning(self) -> Planning:
        planning = Planning(
            self.view,
            self.dispatcher.decisions,
            self._clock,
            self.cluster.tell_role,
            planning_settings(self._config.disaggregation),
        )
        self.dispatcher.prefills.is_loose = planning.is_loose
        return planning

    def _make_application(
        self, routes: Sequence[Route], records: OpenRequests, metrics: FrontendMetrics
    ) -> Application:
        application = Application(
            routes,
            self.tenancy,
            records,
            metrics,
            lambda record: usage_of(record, self.view),
            max_concurrent_requests=self._config.frontend.max_concurrent_requests,
        )
        application.check_early = self.dispatcher.check_early
        application.comes_back = self._resumption.comes_back
        return application

    def _admin_routes(self, frontend_id: str, metrics: FrontendMetrics) -> list[Route]:
        state = FrontendState(
            frontend_id=frontend_id,
            draining=lambda: self.application.draining,
            num_requests=lambda: self.application.num_generating,
            num_sequences=lambda: self.dispatcher.num_streams,
            num_connections=lambda: self.server.num_connections,
            uptime_s=lambda: self._clock.now() - self._started,
        )
        page = MetricsPage(metrics, self.view, lambda: self.server.num_connections, self.tenancy.meter)
        decisions = DecisionPages(self.dispatcher.decisions, frontend_id)
        pages = (AdminPages(state, self.cluster, self.models, self.view, page), decisions, PlanPages(self.planning))
        return [route for page in pages for route in page.routes()]

    def _api_routes(self) -> list[Route]:
        offered = openai_routes(self.models, self.dispatcher, self._config.frontend, self._clock)
        return [
            Route(
                spec.method,
                spec.path,
                self._resumption.around(spec.handler) if spec.path in _GENERATING_PATHS else spec.handler,
                scope=None if spec.path in _OPEN_PATHS else "inference",
                generates=spec.path in _GENERATING_PATHS,
            )
            for spec in offered
        ]

    def _answer_neighbour(self, request: HttpRequest, responder: Responder) -> Awaitable[None] | None:
        accept_from_neighbour(request)
        return self.application(request, responder)

    async def start(self, *, share_port: bool = False, listen_fds: Sequence[int] = ()) -> int:
        """Listen and begin to look for workers; returns the port.

        On sockets that listen already: first look what is there, so that what waits in them is not answered too early.
        """
        frontend = self._config.frontend
        self.tenancy.start()
        await self._open_back_door()
        if listen_fds:
            self._follow()
            await self._look_around()
            return await self.server.start_on([socket.socket(fileno=fd) for fd in listen_fds])
        try:
            port = await self.server.start(frontend.host, frontend.port, reuse_port=share_port)
        except OSError as error:
            raise _cannot_listen(frontend, error) from error
        self._follow()
        return port

    async def _open_back_door(self) -> None:
        """Without it, clients that come back have to come back here."""
        if self._neighbours is not None:
            try:
                await self._back_door.start_on([self._neighbours.listen()])
            except (OSError, ConfigError) as error:
                logger.warning("other frontends cannot ask this one for answers it keeps: %s", error)

    def _follow(self) -> None:
        self.cluster.start()
        self.planning.start()

    async def _look_around(self) -> None:
        """Until all workers that are ready are connected and their models can be served; not for ever."""
        deadline = self._clock.now() + _LOOK_AROUND_S
        while not self._knows_its_way() and self._clock.now() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    def _knows_its_way(self) -> bool:
        workers = [worker for worker in self.view.workers if worker.instance.state == "ready"]
        return self.models.synced and (not workers or (self.models.ready and all(w.connected for w in workers)))

    async def stop(self, timeout_s: float, *, succeeded: bool = False) -> bool:
        """Accept nothing more, let what came end, leave. True when all ended in time.

        `succeeded`: another frontend has the port now, and may be asked for answers that are kept here.
        """
        ends_at = asyncio.get_running_loop().time() + timeout_s
        self.application.draining = True
        complete = await self.server.stop(timeout_s)
        if succeeded and self._neighbours is not None:
            await self._resumption.settle(ends_at)
        self._resumption.close()
        if self._neighbours is not None:
            self._neighbours.close()
            await self._back_door.stop(min(timeout_s, _BACK_DOOR_S))
        await self.planning.close()
        await self.cluster.close()
        await self._subscriber.close()
        await self.tenancy.close()
        if self._request_log is not None:
            await asyncio.to_thread(self._request_log.close)
        return complete


def open_request_log(config: FrontendConfig, clock: Clock) -> RequestLog | None:
    """Raises `ConfigError` when the file cannot be written."""
    if config.record_requests is None:
        return None
    path = Path(config.record_requests)
    return RequestLog(path, clock, max_bytes=config.record_requests_size, kept_files=config.record_requests_files)


def http_limits(config: FrontendConfig) -> HttpLimits:
    return HttpLimits(
        max_connections=config.max_connections,
        max_body_bytes=config.max_body,
        max_partial_bodies_bytes=max(_PARTIAL_BODIES_BYTES, 4 * config.max_body),
        stream_buffer_bytes=config.stream_buffer,
        header_timeout_s=config.header_timeout,
        body_timeout_s=config.body_timeout,
        keepalive_timeout_s=config.keepalive_timeout,
    )


async def run_frontend(
    config: ServeConfig,
    *,
    share_port: bool = False,
    listen_fds: Sequence[int] = (),
    on_listening: OnListening | None = None,
    on_hung: OnHung | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A second signal ends the draining.

    `listen_fds`: sockets that whoever started this process listens on, and goes on holding after it has left.
    `on_hung`: who can replace workers of this host is told of those that have been silent for long.
    """
    if config.runtime.registry is None:
        raise ConfigError("a frontend on its own needs --registry", hint="for example --registry file:///run/headwater")
    check_public(config)
    _allow_connections(config.frontend.max_connections)
    planes = open_planes(config.runtime)
    registry = open_registry(config.runtime.registry)
    try:
        frontend = Frontend(
            config,
            planes,
            registry,
            cache_folder=default_cache_folder(),
            meeting_folder=folder_for(default_run_folder(), config.runtime.registry),
            on_built=settle_memory,
            on_hung=on_hung,
        )
        await _serve(
            frontend, config, lambda: frontend.start(share_port=share_port, listen_fds=listen_fds), on_listening
        )
    finally:
        await registry.close()
        await planes.close()
    return 0


async def _serve(
    frontend: Frontend, config: ServeConfig, start: Callable[[], Awaitable[int]], on_listening: OnListening | None
) -> None:
    stop = _stop_signals()
    try:
        port = await start()
        logger.info("listening on %s:%d", config.frontend.host, port)
        if on_listening is not None:
            on_listening(port)
        settle_memory()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        succeeded = await stop.get() == signal.SIGUSR1
        logger.info("draining: %d requests in progress", frontend.application.num_generating)
        await _drain(frontend, stop, config.runtime, succeeded=succeeded)
    finally:
        await frontend.stop(0.0)


def default_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "headwater" / "artifacts"


async def _drain(frontend: Frontend, stop: asyncio.Queue[int], runtime: RuntimeConfig, *, succeeded: bool) -> None:
    timeout_s = runtime.handover_timeout if succeeded else runtime.drain_timeout
    draining = asyncio.ensure_future(frontend.stop(timeout_s, succeeded=succeeded))
    again = asyncio.ensure_future(stop.get())
    done, _ = await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if draining not in done:
        logger.warning("told again to stop: leaving now")
        draining.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining
    elif not draining.result():
        logger.warning("answers were still running after %g s and were cut off", timeout_s)


def _stop_signals() -> asyncio.Queue[int]:
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, received.put_nowait, number)
    return received


def _allow_connections(max_connections: int) -> None:
    """Raise the limit of descriptors as far as it is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _MIN_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
        if granted < wanted:
            logger.warning("only %d descriptors are allowed, %d connections may not fit", granted, max_connections)


def settle_memory() -> None:
    """What exists now stays: never look through it again for garbage, and give back what loading left free.

    Requests leave few cycles behind, so the collector may come seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 50)
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc only


def _cannot_listen(config: FrontendConfig, error: OSError) -> ConfigError:
    where = f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{where} is in use by another process", hint="--port 0 picks a free one")
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}", hint="--host names an own address")
