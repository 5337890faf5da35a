"""Routes for operators: health, readiness, version, metrics, and the cluster as this frontend sees it.

/live           200 as long as the process answers at all
/health         200 with a summary when some model can be served, else 503; for load balancers and people
/ready          the same question; says what is missing
/version        version of the program and of the protocol
/metrics        Prometheus text
/debug/cluster  all of the above in one JSON document, for `headwater status`
/admin/drain/ID POST: lets a worker finish or hand over its streams and leave, for `headwater drain`
/admin/sleep/ID POST: likewise, but it stays and gives its device's memory back, for `headwater sleep`
/admin/wake/ID  POST: is ready again, for `headwater wake`
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from headwater import __version__
from headwater.errors import HeadwaterError
from headwater.frontend.cluster import Cluster
from headwater.frontend.http.base import Handler, HttpRequest, Responder
from headwater.frontend.http.replies import JSON, reply_for
from headwater.frontend.metrics import CONTENT_TYPE, MetricsPage
from headwater.frontend.models import ModelSet
from headwater.frontend.openai.parse import Shape, parse_body
from headwater.frontend.routes import Route
from headwater.protocol import PROTOCOL_VERSION
from headwater.router.view import ClusterView
from headwater.router.worker import WorkerView


@dataclass(frozen=True, slots=True)
class FrontendState:
    """Numbers of the frontend itself, read when asked."""

    frontend_id: str
    draining: Callable[[], bool]
    num_requests: Callable[[], int]
    num_sequences: Callable[[], int]
    num_connections: Callable[[], int]
    uptime_s: Callable[[], float]


class AdminPages:
    def __init__(
        self,
        state: FrontendState,
        cluster: Cluster,
        models: ModelSet[Any],
        view: ClusterView,
        metrics: MetricsPage,
    ) -> None:
        self._state = state
        self._cluster = cluster
        self._models = models
        self._view = view
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/live", _json(lambda: (200, {"status": "alive"})), scope=None),
            Route("GET", "/health", _json(self._health), scope=None),
            Route("GET", "/ready", _json(self._ready), scope=None),
            Route("GET", "/version", _json(_version), scope=None),
            Route("GET", "/metrics", self._serve_metrics, scope="metrics"),
            Route("GET", "/debug/cluster", _json(self._debug)),
            Route("POST", "/admin/drain/{worker_id}", self._drain),
            Route("POST", "/admin/sleep/{worker_id}", _told(self._cluster.sleep, "asleep")),
            Route("POST", "/admin/wake/{worker_id}", _told(self._cluster.wake, "ready")),
        ]

    def _drain(self, request: HttpRequest, responder: Responder) -> None:
        """Body: `{"within_s": 30}`; a worker takes no longer than its own `--drain-timeout`."""
        worker_id = request.path_params["worker_id"]
        try:
            body = request.body
            within_s = parse_body(_DRAIN, body, strict=False).fields.within_s if body else math.inf
            self._cluster.drain(worker_id, within_s)
        except HeadwaterError as error:
            reply_for(error).send_to(responder)
        else:
            responder.send(202, (JSON,), msgspec.json.encode({"worker_id": worker_id, "state": "draining"}))

    def _health(self) -> tuple[int, dict[str, Any]]:
        draining = self._state.draining()
        ready = self._models.ready and not draining
        workers = self._view.workers
        return 200 if ready else 503, {
            "status": "draining" if draining else "ready" if ready else "not ready",
            "models": {name: reason or "ready" for name, reason in self._reasons().items()},
            "workers": {"ready": sum(worker.eligible for worker in workers), "known": len(workers)},
        }

    def _ready(self) -> tuple[int, dict[str, Any]]:
        if self._state.draining():
            return 503, {"ready": False, "missing": ["this frontend is draining"]}
        if self._models.ready:
            return 200, {"ready": True}
        return 503, {"ready": False, "missing": self._missing()}

    def _missing(self) -> list[str]:
        if not self._models.synced:
            reachable = self._cluster.registry_reachable
            return ["the registry has not answered yet" if reachable else "the registry cannot be reached"]
        reasons = self._models.missing()
        if reasons:
            return [f"model {name}: {reason}" for name, reason in reasons.items()]
        starting = [worker.worker_id for worker in self._view.workers]
        if starting:
            return [f"worker {worker_id} is loading its model" for worker_id in starting]
        return ["no worker has registered and the catalogue is empty"]

    def _reasons(self) -> dict[str, str]:
        missing = self._models.missing()
        return {name: missing.get(name, "") for name in self._models.names()}

    def _debug(self) -> tuple[int, dict[str, Any]]:
        state = self._state
        return 200, {
            "frontend": {
                "id": state.frontend_id,
                "version": __version__,
                "draining": state.draining(),
                "uptime_s": round(state.uptime_s(), 1),
                "requests": state.num_requests(),
                "sequences": state.num_sequences(),
                "connections": state.num_connections(),
            },
            "registry": {"reachable": self._cluster.registry_reachable, "synced": self._models.synced},
            "models": [self._describe_model(name, reason) for name, reason in self._reasons().items()],
            "workers": [self._describe_worker(worker) for worker in self._view.workers],
        }

    def _describe_model(self, name: str, reason: str) -> dict[str, Any]:
        card = self._models.card(name)
        return {
            "name": name,
            "ready": not reason,
            "missing": reason or None,
            "fingerprint": card.fingerprint,
            "architecture": card.architecture,
            "dtype": card.dtype,
            "max_model_len": card.max_model_len,
            "block_size": card.block_size,
        }

    def _describe_worker(self, worker: WorkerView) -> dict[str, Any]:
        instance = worker.instance
        connection = self._cluster.connection(worker.worker_id)
        return {
            "worker_id": worker.worker_id,
            "model": instance.card.name,
            "role": instance.role,
            "adaptive": instance.adaptive,
            "state": instance.state,
            "failed_sleeps": instance.num_failed_sleeps,
            "connected": worker.connected,
            "last_error": connection.last_error if connection is not None else None,
            "engine": instance.engine,
            "host": instance.host,
            "pid": instance.pid,
            "hardware": instance.hardware,
            "kv_blocks": instance.kv_blocks,
            "max_num_seqs": instance.max_num_seqs,
            "load": _load(worker),
            "kv_events": self._view.residency.sends_events(worker.worker_id),
            "booked": {
                "sequences": worker.booked_sequences,
                "prefill_tokens": worker.booked_prefill_tokens,
                "output_tokens": worker.booked_output_tokens,
            },
        }

    def _serve_metrics(self, _request: HttpRequest, responder: Responder) -> None:
        responder.send(200, ((b"content-type", CONTENT_TYPE),), self._metrics.render())


def _load(worker: WorkerView) -> dict[str, Any] | None:
    load = worker.load
    if load is None:
        return None
    described = {name: getattr(load, name) for name in load.__struct_fields__ if name != "timings"}
    used = load.kv_blocks_total - load.kv_blocks_free
    described["kv_usage"] = round(used / load.kv_blocks_total, 4) if load.kv_blocks_total else 0.0
    described["prefix_hit_rate"] = round(load.cached_tokens / load.prompt_tokens, 4) if load.prompt_tokens else 0.0
    return described


def _version() -> tuple[int, dict[str, Any]]:
    return 200, {"version": __version__, "protocol": ".".join(map(str, PROTOCOL_VERSION))}


class _DrainBody(msgspec.Struct):
    within_s: Annotated[float, msgspec.Meta(ge=0)]


_DRAIN = Shape.of(_DrainBody, {})


def _told(tell: Callable[[str], None], state: str) -> Handler:
    """`state`: what the worker is going to be in."""

    def handle(request: HttpRequest, responder: Responder) -> None:
        worker_id = request.path_params["worker_id"]
        try:
            tell(worker_id)
        except HeadwaterError as error:
            reply_for(error).send_to(responder)
        else:
            responder.send(202, (JSON,), msgspec.json.encode({"worker_id": worker_id, "state": state}))

    return handle


def _json(make: Callable[[], tuple[int, dict[str, Any]]]) -> Handler:
    def handle(_request: HttpRequest, responder: Responder) -> None:
        status, document = make()
        responder.send(status, (JSON, (b"cache-control", b"no-store")), msgspec.json.encode(document))

    return handle
