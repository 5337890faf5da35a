"""Sequences to workers, tokens back to their sinks.

One frame per engine step comes in; each output is looked up by its stream and handed on. Invariants: a sink hears of
its end exactly once, by an output with a finish reason or by an error, and nothing after it or after `abort`; a
stream's booking ends with the stream; the number of open streams is bounded.
"""

import itertools
import logging
from collections.abc import Sequence

from headwater.clock import Clock
from headwater.errors import Draining, HeadwaterError, InternalError, Overloaded, WorkerLost
from headwater.frontend.connection import WorkerConnection
from headwater.frontend.dispatch import TokenSink
from headwater.frontend.metrics import FrontendMetrics, ModelMetrics
from headwater.frontend.records import OpenRequests, RequestRecord
from headwater.frontend.remote_errors import error_from
from headwater.protocol.cluster import ModelCard
from headwater.protocol.frames import Abort, StepFrame, Submit
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.router.policy import RouteRequest
from headwater.router.router import Router
from headwater.router.view import Booking
from headwater.types import TOKEN_ID_BYTES

logger = logging.getLogger(__name__)

_MAX_SUBMIT_BYTES = 8 * 1024 * 1024
"""Prompts beyond this travel one sequence a frame."""


class _Stream:
    """One sequence under way."""

    __slots__ = (
        "booking",
        "connection",
        "counts_cached",
        "last",
        "metrics",
        "num_tokens",
        "record",
        "sink",
    )

    def __init__(
        self,
        sink: TokenSink,
        connection: WorkerConnection,
        booking: Booking,
        record: RequestRecord,
        metrics: ModelMetrics,
    ) -> None:
        self.sink = sink
        self.connection = connection
        self.booking = booking
        self.record = record
        self.metrics = metrics
        self.counts_cached = False
        """Whether its cached tokens are the request's: those of the first sequence are."""
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
        first = requests[0]
        num_prompt_tokens = len(first.prompt) // TOKEN_ID_BYTES
        now = self._clock.now()
        route = RouteRequest(
            fingerprint=card.fingerprint,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=first.sampling.max_tokens,
            num_sequences=len(requests),
            block_ids=first.block_ids,
            block_size=card.block_size,
            session_id=first.session_id,
            now=now,
        )
        worker, decision = self._router.route(route, card.name)
        connection = self._connections.get(worker.worker_id)
        if connection is None:
            raise InternalError(f"worker {worker.worker_id} was chosen and has no connection")
        record = self._record(first, card, worker.worker_id, len(requests), now)
        metrics = self._metrics.model(card.name)
        streams: list[int] = []
        for request in requests:
            request.stream = next(self._numbers)
            streams.append(request.stream)
        self._send(connection, requests)
        cached_tokens = decision.cached_tokens
        for request, sink in zip(requests, sinks, strict=True):
            booking = self._router.view.book(
                worker, num_prompt_tokens, request.sampling.max_tokens, cached_tokens, route.keys
            )
            cached_tokens = num_prompt_tokens  # the prompt is computed once, the other sequences find it there
            stream = self._streams[request.stream] = _Stream(sink, connection, booking, record, metrics)
            stream.counts_cached = request is first
        metrics.submitted(num_prompt_tokens, len(requests), now - record.received)
        return streams

    def abort(self, streams: Sequence[int]) -> None:
        by_connection: dict[WorkerConnection, list[int]] = {}
        for number in streams:
            stream = self._streams.pop(number, None)
            if stream is not None:
                self._release(stream, None)
                by_connection.setdefault(stream.connection, []).append(number)
        for connection, numbers in by_connection.items():
            self._send_abort(connection, numbers)

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
                self._fail(output.stream, error_from(output.error))
                continue
            count = len(output.token_ids)
            if count:
                if stream.num_tokens:
                    stream.metrics.inter_token_latency.observe((now - stream.last) / count, count)
                else:
                    self._first_tokens(stream, output, now)
                stream.num_tokens += count
                stream.last = now
            if output.finish_reason is not None:
                self._end(output, stream)
            try:
                stream.sink.on_output(output)
            except Exception:  # border to the API layer: one request's trouble must not hold up the step's others
                logger.exception("request %s: taking output failed", stream.record.request_id)
                self._give_up(output.stream, stream)

    def close(self) -> None:
        """End what is open. Idempotent."""
        self.draining = True
        for number in list(self._streams):
            self._fail(number, Draining("this frontend was shut down"))

    # -- inner life ---------------------------------------------------------------------------------------------

    def _record(
        self, first: EngineRequest, card: ModelCard, worker_id: str, num_sequences: int, now: float
    ) -> RequestRecord:
        record = self._records.get(first.request_id)
        if record is None:
            record = RequestRecord(first.request_id, "", now)
        record.model = card.name
        record.worker_id = worker_id
        record.num_sequences += num_sequences
        record.prompt_tokens += len(first.prompt) // TOKEN_ID_BYTES
        record.submitted = now
        return record

    def _send(self, connection: WorkerConnection, requests: Sequence[EngineRequest]) -> None:
        if len(requests) == 1 or sum(len(request.prompt) for request in requests) <= _MAX_SUBMIT_BYTES:
            connection.send(Submit(list(requests)))
            return
        for request in requests:
            connection.send(Submit([request]))

    def _send_abort(self, connection: WorkerConnection, streams: list[int]) -> None:
        if connection.connected:
            connection.send(Abort(streams))

    def _first_tokens(self, stream: _Stream, output: SequenceOutput, now: float) -> None:
        record = stream.record
        self._router.view.prefilled(stream.booking)
        if record.first_token == 0.0:
            record.first_token = now
        if output.num_cached_tokens and stream.counts_cached:
            record.cached_tokens += output.num_cached_tokens
            stream.metrics.cached_tokens += output.num_cached_tokens
        stream.metrics.time_to_first_token.observe(now - record.received)

    def _end(self, output: SequenceOutput, stream: _Stream) -> None:
        del self._streams[output.stream]
        self._release(stream, stream.num_tokens)

    def _release(self, stream: _Stream, num_generated: int | None) -> None:
        stream.record.output_tokens += stream.num_tokens
        stream.metrics.ended(stream.num_tokens)
        self._router.view.release(stream.booking, num_generated)

    def _give_up(self, number: int, stream: _Stream) -> None:
        if self._streams.pop(number, None) is not None:
            self._release(stream, None)
            self._send_abort(stream.connection, [number])

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
