"""The application behind the HTTP edge: routes, keys, limits, and the account of every request.

One instance is the handler of one server. A request passes here in this order: record, route, key and scope, drain and
limit, quotas of its tenant, handler. Its end comes back through `on_answered`, which counts it, settles the account of
the tenant and writes its log lines.
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable

from headwater.errors import Forbidden, HeadwaterError, RateLimited, Unauthorized
from headwater.frontend.http.base import HttpRequest, Responder
from headwater.frontend.http.replies import Reply, reply_for
from headwater.frontend.metrics import FrontendMetrics
from headwater.frontend.records import OpenRequests, RequestRecord
from headwater.frontend.routes import Route, RouteTable
from headwater.frontend.tenants.ledger import Usage
from headwater.frontend.tenants.quota import QuotaExceeded
from headwater.frontend.tenants.tenancy import Tenancy
from headwater.frontend.tenants.usage_log import UsageLine

request_log = logging.getLogger("headwater.request")

NO_ROUTE = "(none)"
"""What requests are counted under that match no route, whose paths are the client's to choose."""
_RETRY_AFTER_S = 1.0

UsageOf = Callable[[RequestRecord], Usage]


class Application:
    """Implements `Handler` and `OnAnswered`."""

    def __init__(
        self,
        routes: Iterable[Route],
        tenancy: Tenancy,
        records: OpenRequests,
        metrics: FrontendMetrics,
        usage_of: UsageOf,
        *,
        max_concurrent_requests: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draining = False
        self.check_early: Callable[[str], None] = _let_pass
        """Told the tenant before anything is done for a request. Raises `Overloaded`."""
        self.comes_back: Callable[[HttpRequest], bool] = _starts_something
        """Whether a request asks for the rest of an answer, which was let in before."""
        self._routes = RouteTable(routes)
        self._tenancy = tenancy
        self._usage_of = usage_of
        self._records = records
        self._metrics = metrics
        self._limit = max_concurrent_requests
        self._num_generating = 0
        self._now = now

    @property
    def num_generating(self) -> int:
        """Requests that are being answered by workers."""
        return self._num_generating

    def __call__(self, request: HttpRequest, responder: Responder) -> Awaitable[None] | None:
        route = self._routes.find(request)
        if isinstance(route, Reply):
            self._records.begin(request, NO_ROUTE)
            route.send_to(responder)
            return None
        record = self._records.begin(request, route.path)
        try:
            self._let_in(request, route, record)
            if route.generates and not self.comes_back(request):
                self._admit(record)
        except HeadwaterError as error:
            self._note_refusal(request, error)
            reply_for(error).send_to(responder)
            return None
        return route.handler(request, responder)

    def on_answered(self, request: HttpRequest, status: int, complete: bool) -> None:
        record = self._records.end(request.request_id)
        self._metrics.answered(record.route if record is not None else NO_ROUTE, status, complete)
        if record is None:
            return
        if record.generates:
            self._num_generating -= 1
            record.when_idle(lambda: self._settle(record, status))
        duration_s = self._now() - record.received
        if record.model and complete:
            self._metrics.model(record.model).duration.observe(duration_s)
        level = logging.INFO if record.generates else logging.DEBUG
        if request_log.isEnabledFor(level):
            _write_line(level, request, record, status, complete, duration_s)

    def _let_in(self, request: HttpRequest, route: Route, record: RequestRecord) -> None:
        if route.scope is None:
            return
        principal = request.principal = self._tenancy.gate.check(request, route.scope)
        record.tenant, record.key_id = principal.tenant, principal.key_id
        record.kv_group, record.kv_share = principal.kv_group, principal.kv_share
        if route.scope == "admin" and principal.key_id:
            self._tenancy.audit.admin(request)

    def _note_refusal(self, request: HttpRequest, error: HeadwaterError) -> None:
        if isinstance(error, Unauthorized | Forbidden):
            self._tenancy.audit.refused(request, error.code)
        elif isinstance(error, QuotaExceeded):
            self._tenancy.audit.over_quota(request, error.quota)

    def _settle(self, record: RequestRecord, status: int) -> None:
        visit = record.visit
        if visit is None:
            return
        usage = self._usage_of(record)
        self._tenancy.meter.leave(visit, usage, record.num_sequences)
        if self._tenancy.usage is not None and record.worker_id:
            self._tenancy.usage.write(_usage_line(record, usage, status))

    def _admit(self, record: RequestRecord) -> None:
        if self._num_generating >= self._limit:
            raise RateLimited(
                f"{self._num_generating} requests are in progress, the limit is {self._limit}",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.check_early(record.tenant)
        record.visit = self._tenancy.meter.enter(record.tenant)
        record.generates = True
        self._num_generating += 1


def _let_pass(_tenant: str) -> None:
    """Until somebody knows better."""


def _starts_something(_request: HttpRequest) -> bool:
    return False


def _write_line(
    level: int, request: HttpRequest, record: RequestRecord, status: int, complete: bool, duration_s: float
) -> None:
    """What happened is in the fields; `headwater.logs` writes them out for people too."""
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "method": request.method,
        "path": request.path[:200],
        "client": request.client,
        "status": status,
        "e2e_ms": _ms(duration_s),
    }
    if not complete:
        fields["disconnected"] = True
    if record.tenant:
        fields["tenant"] = record.tenant
    if record.trace_id:
        fields["trace_id"] = record.trace_id
    if record.model:
        fields["model"] = record.model
        fields["worker"] = record.worker_id
        fields["prompt_tokens"] = record.prompt_tokens
        fields["cached_tokens"] = record.cached_tokens
        fields["output_tokens"] = record.output_tokens
        if record.first_token:
            fields["ttft_ms"] = _ms(record.first_token - record.received)
    if record.error_code:
        fields["error"] = record.error_code
    request_log.log(level, "answered", extra=fields)


def _usage_line(record: RequestRecord, usage: Usage, status: int) -> UsageLine:
    return UsageLine(
        at=round(time.time(), 3),
        request_id=record.request_id,
        tenant=record.tenant,
        key_id=record.key_id,
        model=record.model,
        worker=record.worker_id,
        route=record.route,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        accelerator_ms=round(usage.accelerator_ms, 3),
        status=status,
    )


def _ms(seconds: float) -> float:
    return math.floor(seconds * 1e5 + 0.5) / 100
