"""Sequences to workers, tokens back to their sinks.

One frame per engine step comes in; each output is looked up by its stream and handed on. A worker that refuses a
sequence before its first token (it drains, or is full) costs nothing but a detour: another worker is asked. Invariants:
a sink hears of its end exactly once, by an output with a finish reason or by an error, and nothing after it or after
`abort`; a stream's booking ends with the stream; the number of open streams is bounded.
"""

import itertools
import logging
from collections.abc import Sequence

from headwater.clock import Clock
from headwater.errors import Draining, HeadwaterError, InternalError, Overloaded, Unavailable, WorkerLost
from headwater.frontend.connection import WorkerConnection
from headwater.frontend.dispatch import TokenSink
from headwater.frontend.metrics import FrontendMetrics, ModelMetrics
from headwater.frontend.records import OpenRequests, RequestRecord
from headwater.frontend.remote_errors import error_from
from headwater.protocol.cluster import ModelCard
from headwater.protocol.frames import Abort, StepFrame, Submit
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.view import Booking, WorkerView
from headwater.types import TOKEN_ID_BYTES

logger = logging.getLogger(__name__)

_MAX_WORKERS_ASKED = 3
_MAX_SUBMIT_BYTES = 8 * 1024 * 1024
"""Prompts beyond this travel one sequence a frame."""


class _Stream:
    """One sequence under way."""

    __slots__ = (
        "booking",
        "card",
        "connection",
        "counts_cached",
        "last",
        "metrics",
        "num_tokens",
        "record",
        "refused_by",
        "request",
        "sink",
    )

    def __init__(
        self,
        sink: TokenSink,
        card: ModelCard,
        request: EngineRequest,
        record: RequestRecord,
        metrics: ModelMetrics,
    ) -> None:
        self.sink = sink
        self.card = card
        self.request: EngineRequest | None = request
        """Kept until the first token, while another worker may yet take it."""
        self.record = record
        self.metrics = metrics
        self.connection: WorkerConnection
        self.booking: Booking
        self.refused_by: tuple[str, ...] = ()
        self.counts_cached = False
        """Whether its cached tokens are the prompt's: those of the first sequence are."""
        self.num_tokens = 0
        self.last = 0.0
        """When the last tokens came; monotonic seconds."""


class ClusterDispatcher:
    """Implements `Dispatcher` over the connections of a cluster."""

    def __init__(
        self,
        router: Router,
        records: OpenRequests,
        metrics: FrontendMetrics,
        clock: Clock,
        *,
        max_streams: int = 65_536,
    ) -> None:
        self.draining = False
        self._router = router
        self._records = records
        self._metrics = metrics
        self._clock = clock
        self._max_streams = max_streams
        self._connections: dict[str, WorkerConnection] = {}
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count(1)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def has_streams(self, connection: WorkerConnection) -> bool:
        return any(stream.connection is connection for stream in self._streams.values())

    # -- Dispatcher ---------------------------------------------------------------------------------------------

    def submit(self, card: ModelCard, requests: Sequence[EngineRequest], sinks: Sequence[TokenSink]) -> list[int]:
        if self.draining:
            raise Draining("this frontend is shutting down")
        if len(self._streams) + len(requests) > self._max_streams:
            raise Overloaded(f"this frontend has {len(self._streams)} sequences open, at most {self._max_streams} fit")
        now = self._clock.now()
        route = _route_request(card, requests, now)
        worker, decision = self._router.route(route, card.name)
        connection = self._connection_to(worker)
        record = self._record(requests, card, now)
        record.worker_id = worker.worker_id
        metrics = self._metrics.model(card.name)
        numbers: list[int] = []
        for request in requests:
            request.stream = next(self._numbers)
            numbers.append(request.stream)
        _send(connection, requests)
        cached_tokens = decision.cached_tokens
        for request, sink in zip(requests, sinks, strict=True):
            stream = self._streams[request.stream] = _Stream(sink, card, request, record, metrics)
            stream.counts_cached = request is requests[0]
            stream.connection = connection
            stream.booking = self._router.view.book(
                worker, route.num_prompt_tokens, request.sampling.max_tokens, cached_tokens, route.keys
            )
            cached_tokens = route.num_prompt_tokens  # computed once, the other sequences find it there
        metrics.submitted(route.num_prompt_tokens, len(requests), now - record.received)
        return numbers

    def abort(self, streams: Sequence[int]) -> None:
        by_connection: dict[WorkerConnection, list[int]] = {}
        for number in streams:
            stream = self._streams.pop(number, None)
            if stream is not None:
                self._release(stream, None)
                by_connection.setdefault(stream.connection, []).append(number)
        for connection, numbers in by_connection.items():
            _send_abort(connection, numbers)

    def worker_of(self, stream: int) -> str | None:
        found = self._streams.get(stream)
        return found.connection.worker_id if found is not None else None

    # -- told by the cluster ------------------------------------------------------------------------------------

    def add_connection(self, connection: WorkerConnection) -> None:
        self._connections[connection.worker_id] = connection

    def remove_connection(self, connection: WorkerConnection, error: HeadwaterError) -> None:
        """Nothing goes there any more; its open streams end with an error."""
        if self._connections.get(connection.worker_id) is connection:
            del self._connections[connection.worker_id]
        lost = [number for number, stream in self._streams.items() if stream.connection is connection]
        if lost:
            logger.warning("worker %s was lost with %d open sequences", connection.worker_id, len(lost))
        for number in lost:
            reason = f"worker {connection.worker_id} was lost while it worked on this request: {error.message}"
            self._fail(number, WorkerLost(reason))

    def on_step(self, frame: StepFrame) -> None:
        """Outputs of one engine step. The hot loop: everything here is paid per token."""
        streams = self._streams
        now = self._clock.now()
        for output in frame.outputs:
            stream = streams.get(output.stream)
            if stream is None:
                continue
            if output.error is not None:
                self._on_worker_error(output.stream, stream, error_from(output.error))
                continue
            count = len(output.token_ids)
            if count:
                if stream.num_tokens:
                    stream.metrics.inter_token_latency.observe((now - stream.last) / count, count)
                else:
                    self._on_first_tokens(stream, output, now)
                stream.num_tokens += count
                stream.last = now
            if output.finish_reason is not None:
                del streams[output.stream]
                self._release(stream, stream.num_tokens)
            try:
                stream.sink.on_output(output)
            except Exception:  # border to the API layer: one request's trouble must not hold up the step's others
                logger.exception("request %s: taking output failed", stream.record.request_id)
                self.abort((output.stream,))

    def close(self) -> None:
        """End what is open. Idempotent."""
        self.draining = True
        for number in list(self._streams):
            self._fail(number, Draining("this frontend was shut down"))

    # -- inner life ---------------------------------------------------------------------------------------------

    def _connection_to(self, worker: WorkerView) -> WorkerConnection:
        connection = self._connections.get(worker.worker_id)
        if connection is None:
            raise InternalError(f"worker {worker.worker_id} was chosen and has no connection")
        return connection

    def _record(self, requests: Sequence[EngineRequest], card: ModelCard, now: float) -> RequestRecord:
        first = requests[0]
        record = self._records.get(first.request_id)
        if record is None:
            record = RequestRecord(first.request_id, "", now)
        record.model = card.name
        record.prompt_tokens += len(first.prompt) // TOKEN_ID_BYTES
        return record

    def _on_first_tokens(self, stream: _Stream, output: SequenceOutput, now: float) -> None:
        record = stream.record
        self._router.view.prefilled(stream.booking)
        stream.request = None
        if record.first_token == 0.0:
            record.first_token = now
            stream.metrics.time_to_first_token.observe(now - record.received)
        if output.num_cached_tokens and stream.counts_cached:
            record.cached_tokens += output.num_cached_tokens
            stream.metrics.cached_tokens += output.num_cached_tokens

    def _on_worker_error(self, number: int, stream: _Stream, error: HeadwaterError) -> None:
        refused = isinstance(error, Unavailable) and error.retryable and stream.request is not None
        if not refused or not self._ask_another(number, stream):
            self._fail(number, error)

    def _ask_another(self, number: int, stream: _Stream) -> bool:
        """A worker refused: send the sequence to one that did not. False when there is none."""
        request = stream.request
        stream.refused_by += (stream.connection.worker_id,)
        if request is None or self.draining or len(stream.refused_by) >= _MAX_WORKERS_ASKED:
            return False
        route = _route_request(stream.card, (request,), self._clock.now())
        try:
            worker, decision = self._router.route(route, stream.card.name, stream.refused_by)
            connection = self._connection_to(worker)
            connection.send(Submit([request]))
        except HeadwaterError:
            return False
        view = self._router.view
        view.release(stream.booking)
        stream.connection = connection
        stream.booking = view.book(
            worker, route.num_prompt_tokens, request.sampling.max_tokens, decision.cached_tokens, route.keys
        )
        stream.record.worker_id = worker.worker_id
        return True

    def _release(self, stream: _Stream, num_generated: int | None) -> None:
        stream.record.output_tokens += stream.num_tokens
        stream.metrics.ended(stream.num_tokens)
        self._router.view.release(stream.booking, num_generated)

    def _fail(self, number: int, error: HeadwaterError) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        stream.record.error_code = stream.record.error_code or error.code
        self._release(stream, None)
        try:
            stream.sink.on_error(error)
        except Exception:  # border to the API layer
            logger.exception("request %s: taking an error failed", stream.record.request_id)


def _route_request(card: ModelCard, requests: Sequence[EngineRequest], now: float) -> RouteRequest:
    first = requests[0]
    return RouteRequest(
        fingerprint=card.fingerprint,
        num_prompt_tokens=len(first.prompt) // TOKEN_ID_BYTES,
        max_tokens=first.sampling.max_tokens,
        num_sequences=len(requests),
        block_ids=first.block_ids,
        block_size=card.block_size,
        session_id=first.session_id,
        now=now,
    )


def _send(connection: WorkerConnection, requests: Sequence[EngineRequest]) -> None:
    if len(requests) == 1 or sum(len(request.prompt) for request in requests) <= _MAX_SUBMIT_BYTES:
        connection.send(Submit(list(requests)))
        return
    for request in requests:
        connection.send(Submit([request]))


def _send_abort(connection: WorkerConnection, streams: list[int]) -> None:
    if connection.connected:
        connection.send(Abort(streams))
