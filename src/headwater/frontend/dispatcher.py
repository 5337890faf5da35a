"""Sequences to workers, tokens back to their sinks.

One frame per engine step comes in; each output is looked up by its stream and handed on. A request waits in the
router's queue while no worker is open to it. A worker that refuses a sequence before its first token (it drains, or is
full) costs nothing but a detour: another worker is asked. Invariants: a sink hears of its end exactly once, by an
output with a finish reason or by an error, and nothing after it or after `abort`; a stream's booking ends with the
stream; the number of open streams is bounded.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Literal

from headwater.clock import Clock
from headwater.errors import Draining, HeadwaterError, InternalError, Overloaded, Unavailable, WorkerLost
from headwater.frontend.connection import WorkerConnection
from headwater.frontend.dispatch import TokenSink
from headwater.frontend.hints import NO_HINTS, RoutingHints
from headwater.frontend.journal import DecisionJournal
from headwater.frontend.metrics import FrontendMetrics
from headwater.frontend.records import OpenRequests, RequestRecord
from headwater.frontend.remote_errors import error_from
from headwater.frontend.request_log import RequestNotes, ended_request
from headwater.frontend.stream import Stream
from headwater.frontend.submission import Submission
from headwater.protocol.cluster import ModelCard
from headwater.protocol.frames import Abort, StepFrame, Submit
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.router.decisions import DecisionLog, DecisionRecord
from headwater.router.queue import AdmissionQueue, Outcome, Placed, QueueLimits
from headwater.router.router import Router
from headwater.router.view import WorkerView

logger = logging.getLogger(__name__)

_MAX_WORKERS_ASKED = 3
_MAX_SUBMIT_BYTES = 8 * 1024 * 1024
"""Prompts beyond this travel one sequence a frame."""
_QUEUE_TICK_S = 0.05


class ClusterDispatcher:
    """Implements `Dispatcher` over the connections of a cluster."""

    def __init__(
        self,
        router: Router,
        records: OpenRequests,
        metrics: FrontendMetrics,
        clock: Clock,
        *,
        limits: QueueLimits | None = None,
        max_streams: int = 65_536,
        notes: RequestNotes | None = None,
    ) -> None:
        self.draining = False
        self._notes = notes
        self._router = router
        self._records = records
        self._metrics = metrics
        self._clock = clock
        self._max_streams = max_streams
        self._queue = AdmissionQueue(router, limits)
        self._next_pump: asyncio.Handle | None = None
        self._journal = DecisionJournal(router, metrics.router)
        self._connections: dict[str, WorkerConnection] = {}
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def decisions(self) -> DecisionLog:
        return self._journal.log

    def has_streams(self, connection: WorkerConnection) -> bool:
        return any(stream.connection is connection for stream in self._streams.values())

    # -- Dispatcher ---------------------------------------------------------------------------------------------

    def submit(
        self,
        card: ModelCard,
        requests: Sequence[EngineRequest],
        sinks: Sequence[TokenSink],
        hints: RoutingHints = NO_HINTS,
    ) -> list[int]:
        if self.draining:
            raise Draining("this frontend is shutting down")
        if len(self._streams) + len(requests) > self._max_streams:
            raise Overloaded(f"this frontend has {len(self._streams)} sequences open, at most {self._max_streams} fit")
        now = self._clock.now()
        record = self._record(requests, card, now)
        submission = Submission.of(card, requests, hints, record.tenant, self._clock.epoch() - now)
        self._journal.begin(submission.record)
        try:
            placed = self._queue.submit(submission, now)
        except HeadwaterError as error:
            self._journal.refused(submission.record, error)
            if self._notes is not None:
                self._notes.note(ended_request(submission, "refused"))
            raise
        record.prompt_tokens += submission.request.num_prompt_tokens
        metrics = self._metrics.model(card.name)
        for request, sink in zip(requests, sinks, strict=True):
            request.stream = next(self._numbers)
            self._streams[request.stream] = Stream(sink, request, record, metrics, submission)
        streams = [request.stream for request in requests]
        if placed is None:
            self._pump_soon()
            return streams
        try:
            self._send(submission, placed, now)
        except HeadwaterError as error:
            self._journal.refused(submission.record, error)
            for number in streams:
                del self._streams[number]
            raise
        return streams

    def abort(self, streams: Sequence[int]) -> None:
        by_connection: dict[WorkerConnection, list[int]] = {}
        for number in streams:
            stream = self._streams.pop(number, None)
            if stream is None:
                continue
            self._release(stream, None, "aborted")
            if stream.connection is not None:
                by_connection.setdefault(stream.connection, []).append(number)
            else:
                self._leave_line(number, stream)
        for connection, numbers in by_connection.items():
            _send_abort(connection, numbers)
        if len(self._queue):
            self._pump_soon()

    def decision_of(self, stream: int) -> DecisionRecord | None:
        found = self._streams.get(stream)
        return found.submission.record if found is not None else None

    # -- told by the cluster ------------------------------------------------------------------------------------

    def add_connection(self, connection: WorkerConnection) -> None:
        self._connections[connection.worker_id] = connection
        if len(self._queue):
            self._pump_soon()

    def remove_connection(self, connection: WorkerConnection, error: HeadwaterError) -> None:
        """Nothing goes there any more; its open streams end with an error. Addresses and the like stay in the log."""
        if self._connections.get(connection.worker_id) is connection:
            del self._connections[connection.worker_id]
        lost = [number for number, stream in self._streams.items() if stream.connection is connection]
        if lost:
            logger.warning("worker %s was lost with %d open sequences: %s", connection.worker_id, len(lost), error)
        for number in lost:
            self._fail(number, WorkerLost(f"worker {connection.worker_id} was lost while it worked on this request"))

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
                self._release(stream, stream.num_tokens, "finished")
            try:
                stream.sink.on_output(output)
            except Exception:  # border to the API layer: one request's trouble must not hold up the step's others
                logger.exception("request %s: taking output failed", stream.record.request_id)
                self._give_up(output.stream, stream)
        if len(self._queue):
            self._pump_soon()

    def close(self) -> None:
        """End what is open. Idempotent."""
        self.draining = True
        if self._next_pump is not None:
            self._next_pump.cancel()
        for number in list(self._streams):
            self._fail(number, Draining("this frontend was shut down"))

    # -- to a worker --------------------------------------------------------------------------------------------

    def _send(self, submission: Submission, placed: Placed, now: float) -> None:
        """Raises what keeps the worker from being told; nothing is booked then."""
        worker, asked = placed.worker, submission.request
        self._journal.decided(submission.record, asked, worker, placed.decision)
        connection = self._connection_to(worker)
        cached_tokens = placed.decision.cached_tokens
        for request in submission.requests:
            request.expected_cached_tokens = cached_tokens
            cached_tokens = asked.num_prompt_tokens  # computed once, the other sequences find it there
        _send(connection, submission.requests)
        self._journal.placed(submission.record, now - submission.since)
        for request in submission.requests:
            stream = self._streams[request.stream]
            self._book(stream, connection, worker, request.expected_cached_tokens, now)
        stream.metrics.submitted(asked.num_prompt_tokens, len(submission.requests), now - stream.record.received)

    def _book(
        self, stream: Stream, connection: WorkerConnection, worker: WorkerView, cached_tokens: int, now: float
    ) -> None:
        asked = stream.submission.request
        stream.connection, stream.sent = connection, now
        stream.record.worker_id = worker.worker_id
        stream.booking = self._router.view.book(
            worker,
            asked.num_prompt_tokens,
            asked.max_tokens,
            cached_tokens,
            asked.keys,
            asked.expected_output_tokens,
        )

    def _connection_to(self, worker: WorkerView) -> WorkerConnection:
        connection = self._connections.get(worker.worker_id)
        if connection is None:
            raise InternalError(f"worker {worker.worker_id} was chosen and has no connection")
        return connection

    # -- the queue ----------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Load has changed. On a turn of its own, because sinks that are told something may call back."""
        if self._next_pump is not None:
            self._next_pump.cancel()
        self._next_pump = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Let those in line go ahead."""
        self._next_pump = None
        now = self._clock.now()
        for outcome in self._queue.pump(now):
            self._act(outcome, now)
        self._metrics.router.waiting = len(self._queue)
        if len(self._queue) and not self.draining and self._next_pump is None:
            self._next_pump = asyncio.get_running_loop().call_later(_QUEUE_TICK_S, self._pump)

    def _act(self, outcome: Outcome, now: float) -> None:
        submission = outcome.ticket
        assert isinstance(submission, Submission)
        if isinstance(outcome, Placed):
            try:
                self._send(submission, outcome, now)
                return
            except HeadwaterError as failure:
                error = failure
        else:
            error = outcome.error
        self._journal.refused(submission.record, error)
        for request in submission.requests:
            self._fail(request.stream, error)

    # -- inner life ---------------------------------------------------------------------------------------------

    def _record(self, requests: Sequence[EngineRequest], card: ModelCard, now: float) -> RequestRecord:
        first = requests[0]
        record = self._records.get(first.request_id)
        if record is None:
            record = RequestRecord(first.request_id, "", now)
        record.model = card.name
        return record

    def _on_first_tokens(self, stream: Stream, output: SequenceOutput, now: float) -> None:
        record, cached_tokens = stream.record, output.num_cached_tokens
        if stream.booking is not None:
            self._router.view.prefilled(stream.booking, now, cached_tokens)
        stream.request = None
        if record.first_token == 0.0:
            record.first_token = now
            stream.metrics.time_to_first_token.observe(now - record.received)
        if stream.submission.record.ttft_ms is None:
            self._journal.first_token(stream.submission.record, stream.sent, now, cached_tokens)
        if cached_tokens and stream.counts_cached:
            record.cached_tokens += cached_tokens
            stream.metrics.cached_tokens += cached_tokens
        if self._router.view.residency.learned.newly_silent:
            self._report_silent()

    def _report_silent(self) -> None:
        silent = self._router.view.residency.learned.newly_silent
        for worker_id in silent:
            logger.warning(
                "worker %s sends no KV events: what it has cached is guessed from what was sent there", worker_id
            )
        silent.clear()

    def _on_worker_error(self, number: int, stream: Stream, error: HeadwaterError) -> None:
        refused = isinstance(error, Unavailable) and error.retryable and stream.request is not None
        if not refused or not self._ask_another(number, stream, error):
            self._fail(number, error)

    def _ask_another(self, number: int, stream: Stream, error: HeadwaterError) -> bool:
        """A worker refused: send the sequence to one that did not. False when there is none."""
        request, submission = stream.request, stream.submission
        if request is None or stream.connection is None or stream.booking is None or self.draining:
            return False
        stream.refused_by += (stream.connection.worker_id,)
        if submission.request.pinned_to is not None or len(stream.refused_by) >= _MAX_WORKERS_ASKED:
            return False
        now = self._clock.now()
        route = submission.again(now)
        try:
            worker, decision = self._router.route(route, submission.model, stream.refused_by)
            connection = self._connection_to(worker)
            request.expected_cached_tokens = decision.cached_tokens
            connection.send(Submit([request]))
        except HeadwaterError:
            return False
        self._router.view.release(stream.booking)
        self._journal.detour(submission.record, stream.refused_by[-1], error.message)
        self._journal.decided(submission.record, route, worker, decision)
        self._book(stream, connection, worker, decision.cached_tokens, now)
        return True

    def _release(
        self, stream: Stream, num_generated: int | None, end: Literal["finished", "aborted", "failed"]
    ) -> None:
        stream.record.output_tokens += stream.num_tokens
        waited_s = self._clock.now() - stream.submission.since
        self._journal.ended(stream.submission.record, end, stream.num_tokens, waited_s)
        if self._notes is not None:
            outcome = "refused" if stream.connection is None and end == "failed" else end
            self._notes.note(ended_request(stream.submission, outcome, stream.num_tokens, waited_s * 1e3))
        if stream.booking is not None:
            stream.metrics.ended(stream.num_tokens)
            self._router.view.release(stream.booking, num_generated)

    def _give_up(self, number: int, stream: Stream) -> None:
        """A sink cannot take output: whoever is behind it is told, rather than left waiting."""
        self.abort((number,))
        _tell(stream, InternalError("the answer could not be written; the log of the server says why"))

    def _fail(self, number: int, error: HeadwaterError) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        stream.record.error_code = stream.record.error_code or error.code
        stream.submission.record.error_code = stream.submission.record.error_code or error.code
        self._release(stream, None, "failed")
        if stream.connection is None:
            self._leave_line(number, stream)
        _tell(stream, error)

    def _leave_line(self, number: int, stream: Stream) -> None:
        if stream.submission.withdraw(number):
            self._queue.cancel(stream.submission)


def _tell(stream: Stream, error: HeadwaterError) -> None:
    try:
        stream.sink.on_error(error)
    except Exception:  # border to the API layer
        logger.exception("request %s: taking an error failed", stream.record.request_id)


def _send(connection: WorkerConnection, requests: Sequence[EngineRequest]) -> None:
    if len(requests) == 1 or sum(len(request.prompt) for request in requests) <= _MAX_SUBMIT_BYTES:
        connection.send(Submit(list(requests)))
        return
    for request in requests:
        connection.send(Submit([request]))


def _send_abort(connection: WorkerConnection, streams: list[int]) -> None:
    if connection.connected:
        connection.send(Abort(streams))
