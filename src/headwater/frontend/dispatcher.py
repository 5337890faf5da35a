"""Sequences to workers, tokens back to their sinks.

One frame per engine step comes in; each output is looked up by its stream and handed on. A request waits in the
router's queue while no worker is open to it. What a worker refuses, loses or leaves behind goes on elsewhere
(`headwater.frontend.moves`); the sink sees one unbroken sequence of tokens. Invariants: a sink hears of its end exactly
once, by an output with a finish reason or by an error, and nothing after it or after `abort`; no token is delivered
twice; a stream's booking ends with the stream; the number of open streams is bounded.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headwater.clock import Clock
from headwater.errors import Draining, EngineFailed, HeadwaterError, InternalError, Overloaded, WorkerLost, WorkerSilent
from headwater.frontend.connection import WorkerConnection
from headwater.frontend.dispatch import Admission, TokenSink
from headwater.frontend.fault_metrics import FaultMetrics
from headwater.frontend.forecast import Forecast
from headwater.frontend.hints import NO_HINTS, RoutingHints
from headwater.frontend.journal import DecisionJournal
from headwater.frontend.metrics import FrontendMetrics
from headwater.frontend.moves import MoveLimits, Moves
from headwater.frontend.placing import Placer
from headwater.frontend.prefills import Prefills
from headwater.frontend.probes import Probes
from headwater.frontend.records import OpenRequests, RequestRecord
from headwater.frontend.remote_errors import error_from
from headwater.frontend.request_log import RequestNotes, ended_request
from headwater.frontend.stream import Stream, Streams
from headwater.frontend.submission import Submission
from headwater.protocol.cluster import ModelCard
from headwater.protocol.frames import StepFrame
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.router.decisions import DecisionLog, DecisionRecord
from headwater.router.disagg import DisaggSettings
from headwater.router.queue import AdmissionQueue, QueueLimits
from headwater.router.router import Router
from headwater.router.ticket import Outcome, Placed

logger = logging.getLogger(__name__)

_QUEUE_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    queue: QueueLimits = field(default_factory=QueueLimits)
    moves: MoveLimits = field(default_factory=MoveLimits)
    max_streams: int = 65_536
    """Open sequences."""
    first_token_s: float = 0.0
    """Longest wait for a first token: what would wait longer is refused; 0: no limit."""
    disagg: DisaggSettings = field(default_factory=DisaggSettings)


class ClusterDispatcher:
    """Implements `Dispatcher` over the connections of a cluster."""

    def __init__(
        self,
        router: Router,
        records: OpenRequests,
        metrics: FrontendMetrics,
        clock: Clock,
        limits: DispatchLimits | None = None,
        notes: RequestNotes | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.draining = False
        self._notes = notes
        self._admission = admission
        self._router = router
        self._records = records
        self._metrics = metrics
        self._clock = clock
        limits = limits or DispatchLimits()
        self._max_streams = limits.max_streams
        self._first_token_s = limits.first_token_s
        self._forecast = Forecast(limits.queue.tenant_weights)
        self._queue = AdmissionQueue(router, limits.queue)
        self._next_pump: asyncio.Handle | None = None
        self._journal = DecisionJournal(router, metrics.router)
        self._streams = Streams()
        self.prefills = Prefills(router.view, limits.disagg)
        self._placer = Placer(router, self._journal, self.prefills)
        self._moves = Moves(self._streams, self._placer, self._journal, metrics.faults, self._fail, limits.moves)
        metrics.faults.waiting = lambda: len(self._moves)
        self.probes = Probes()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def faults(self) -> FaultMetrics:
        return self._metrics.faults

    @property
    def decisions(self) -> DecisionLog:
        return self._journal.log

    def has_streams(self, connection: WorkerConnection) -> bool:
        return any(stream.connection is connection for stream in self._streams)

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
        if self._admission is not None:
            self._admission.admit(record, requests)
        submission = Submission.of(card, requests, hints, record.tenant, self._clock.epoch() - now)
        placed = self._enter(submission, now)
        record.prompt_tokens += submission.request.num_prompt_tokens
        metrics = self._metrics.model(card.name)
        streams = [
            Stream(sink, request, record, metrics, submission) for request, sink in zip(requests, sinks, strict=True)
        ]
        numbers = [self._streams.add(stream) for stream in streams]
        self._forecast.came(card.fingerprint, submission.tenant, len(streams), now)
        if placed is None:
            self._pump_soon()
            return numbers
        try:
            self._placer.place(submission, placed, streams, now)
        except HeadwaterError as error:
            self._journal.refused(submission.record, error)
            for stream in streams:
                self._streams.remove(stream)
                self._forecast.left(card.fingerprint, submission.tenant, now)
            raise
        return numbers

    def check_early(self, tenant: str) -> None:
        """Before a request has been read: raises `Overloaded` if, whatever it asks for, it would come to nothing."""
        if self._first_token_s:
            self._forecast.admit_any(tenant, self._first_token_s, self._clock.now())

    def _enter(self, submission: Submission, now: float) -> Placed | None:
        """Where it goes at once; None while it waits. Raises why it may do neither."""
        self._journal.begin(submission.record)
        try:
            self._check_wait(submission, now)
            return self._queue.submit(submission, now)
        except HeadwaterError as error:
            self._journal.refused(submission.record, error)
            if self._notes is not None:
                self._notes.note(ended_request(submission, "refused"))
            raise

    def _check_wait(self, submission: Submission, now: float) -> None:
        """What cannot begin in time is not taken in: it would only make others late."""
        if self._first_token_s:
            limit = now + self._first_token_s
            submission.deadline = limit if submission.deadline is None else min(limit, submission.deadline)
        if submission.deadline is not None:
            fingerprint, allowed_s = submission.request.fingerprint, submission.deadline - now
            known = self._forecast.knows(fingerprint, now)
            expected_per_s = 0.0 if known else self._router.prompts_per_s(submission.request)
            self._forecast.admit(fingerprint, submission.tenant, allowed_s, now, expected_per_s)

    def abort(self, streams: Sequence[int]) -> None:
        by_connection: dict[WorkerConnection, list[int]] = {}
        for number in streams:
            stream = self._streams.find(number)
            if stream is None:
                continue
            self._metrics.faults.cancelled(stream.stage)
            if stream.connection is not None:
                by_connection.setdefault(stream.connection, []).append(stream.request.stream)
            self._end(stream, None, "aborted")
        for connection, numbers in by_connection.items():
            connection.abort(numbers)
        if self._busy:
            self._pump_soon()

    def decision_of(self, stream: int) -> DecisionRecord | None:
        found = self._streams.find(stream)
        return found.submission.record if found is not None else None

    # -- told by the cluster ------------------------------------------------------------------------------------

    def add_connection(self, connection: WorkerConnection) -> None:
        self._placer.connections[connection.worker_id] = connection
        if self._busy:
            self._pump_soon()

    def remove_connection(self, connection: WorkerConnection, error: HeadwaterError) -> None:
        """Nothing goes there any more; its streams go on elsewhere. Addresses and the like stay in the log."""
        told = WorkerLost(f"worker {connection.worker_id} was lost while it worked on this request")
        self._leave(connection, told, error.message, hung=isinstance(error, WorkerSilent))

    def abandon(self, connection: WorkerConnection, reason: str) -> None:
        """It hangs: as if it were gone, although it may be connected and come back (`taken_back`)."""
        self._leave(connection, WorkerLost(reason), reason, hung=True)

    def taken_back(self, connection: WorkerConnection) -> None:
        """One that hung, or was cut off, lives."""
        self._moves.returned(connection.worker_id)

    def _leave(self, connection: WorkerConnection, error: HeadwaterError, reason: str, *, hung: bool) -> None:
        """`error` is for clients, `reason` for the log."""
        if self._placer.connections.get(connection.worker_id) is connection:
            del self._placer.connections[connection.worker_id]
        lost = self._streams.at(connection)
        if not lost:
            return
        logger.warning("worker %s was lost with %d open sequences: %s", connection.worker_id, len(lost), reason)
        connection.abort([stream.request.stream for stream in lost])
        self._moves.lost(connection.worker_id, lost, error, self._clock.now(), hung=hung)
        if self._busy:
            self._pump_soon()

    def on_step(self, connection: WorkerConnection, frame: StepFrame) -> None:
        """Outputs of one engine step. The hot loop: everything here is paid per token."""
        streams = self._streams.at_workers
        now = self._clock.now()
        failed: list[tuple[Stream, HeadwaterError]] = []
        for output in frame.outputs:
            stream = streams.get(output.stream)
            if stream is None:
                self.probes.answered(output)
                continue
            if output.error is not None:
                failed.append((stream, error_from(output.error)))
                continue
            if not stream.begun:
                self._begin(stream, output, now)
            count = len(output.token_ids)
            if count:
                if stream.last:
                    stream.metrics.inter_token_latency.observe((now - stream.last) / count, count)
                stream.tokens.extend(output.token_ids)
                stream.last = now
            if output.finish_reason is not None:
                self._end(stream, stream.num_tokens, "finished")
            try:
                stream.sink.on_output(output)
            except Exception:  # border to the API layer: one request's trouble must not hold up the step's others
                logger.exception("request %s: taking output failed", stream.record.request_id)
                self._give_up(stream)
        if failed:
            self._on_worker_errors(connection, failed, now)
        if self._busy:
            self._pump_soon()

    def close(self) -> None:
        """End what is open. Idempotent."""
        self.draining = True
        if self._next_pump is not None:
            self._next_pump.cancel()
        for stream in list(self._streams):
            self._fail(stream, Draining("this frontend was shut down"))

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
        self._moves.pump(now)
        for outcome in self._queue.pump(now):
            self._act(outcome, now)
        self._metrics.router.waiting = len(self._queue)
        if self._busy and not self.draining and self._next_pump is None:
            self._next_pump = asyncio.get_running_loop().call_later(_QUEUE_TICK_S, self._pump)

    @property
    def _busy(self) -> bool:
        """Whether anybody waits."""
        return bool(len(self._queue) or len(self._moves))

    def _act(self, outcome: Outcome, now: float) -> None:
        submission = outcome.ticket
        assert isinstance(submission, Submission)
        streams = [self._streams.at_workers[request.stream] for request in submission.requests]
        if isinstance(outcome, Placed):
            try:
                self._placer.place(submission, outcome, streams, now)
                return
            except HeadwaterError as failure:
                error = failure
        else:
            error = outcome.error
        self._journal.refused(submission.record, error)
        for stream in streams:
            self._fail(stream, error)

    # -- inner life ---------------------------------------------------------------------------------------------

    def _record(self, requests: Sequence[EngineRequest], card: ModelCard, now: float) -> RequestRecord:
        first = requests[0]
        record = self._records.get(first.request_id)
        if record is None:
            record = RequestRecord(first.request_id, "", now)
        record.model = card.name
        return record

    def _begin(self, stream: Stream, output: SequenceOutput, now: float) -> None:
        """The first that its present worker sends. What it found in its cache is news to the client only once."""
        stream.begun = True
        self._moves.began(stream)
        if stream.waits:
            stream.waits = False
            self._forecast.began(stream.submission.request.fingerprint, stream.submission.tenant, now)
        cached_tokens = output.num_cached_tokens
        self._placer.prefilled(stream)
        if stream.booking is not None:
            # What another worker computed says nothing about what this one had.
            self._router.view.prefilled(stream.booking, now, None if stream.request.prefill else cached_tokens)
        if self._router.view.residency.learned.newly_silent:
            self._report_silent()
        if stream.tokens:
            output.num_cached_tokens = None
            return
        record = stream.record
        if record.first_token == 0.0:
            record.first_token = now
            stream.metrics.time_to_first_token.observe(now - record.received)
        if stream.submission.record.ttft_ms is None:
            self._journal.first_token(stream.submission.record, stream.sent, now, cached_tokens)
        if cached_tokens and stream.counts_cached:
            record.cached_tokens += cached_tokens
            stream.metrics.cached_tokens += cached_tokens

    def _report_silent(self) -> None:
        silent = self._router.view.residency.learned.newly_silent
        for worker_id in silent:
            logger.warning(
                "worker %s sends no KV events: what it has cached is guessed from what was sent there", worker_id
            )
        silent.clear()

    def _on_worker_errors(
        self, connection: WorkerConnection, failed: Sequence[tuple[Stream, HeadwaterError]], now: float
    ) -> None:
        """Those that end in one step because the engine died are one death."""
        died = [stream for stream, error in failed if isinstance(error, WorkerLost | EngineFailed)]
        for stream, error in failed:
            if stream not in died:
                self._moves.refused(stream, error, now)
        if died:
            error = next(error for stream, error in failed if stream is died[0])
            self._moves.lost(connection.worker_id, died, error, now)

    def _end(self, stream: Stream, num_generated: int | None, end: Literal["finished", "aborted", "failed"]) -> None:
        """It is open no longer."""
        self._streams.remove(stream)
        self._moves.ended(stream)
        if stream.waits:
            self._forecast.left(stream.submission.request.fingerprint, stream.submission.tenant, self._clock.now())
        if stream.submission.withdraw(stream.request.stream):
            self._queue.cancel(stream.submission)
        stream.record.output_tokens += stream.num_tokens
        waited_s = self._clock.now() - stream.submission.since
        self._journal.ended(stream.submission.record, end, stream.num_tokens, waited_s)
        if self._notes is not None:
            outcome = "refused" if stream.sent == 0.0 and end == "failed" else end
            self._notes.note(ended_request(stream.submission, outcome, stream.num_tokens, waited_s * 1e3))
        if stream.sent:
            stream.metrics.ended(stream.num_tokens)
        self._placer.leave(stream, num_generated)
        stream.record.sequence_ended()

    def _give_up(self, stream: Stream) -> None:
        """A sink cannot take output: whoever is behind it is told, rather than left waiting."""
        self.abort((stream.number,))
        _tell(stream, InternalError("the answer could not be written; the log of the server says why"))

    def _fail(self, stream: Stream, error: HeadwaterError) -> None:
        """Unless it has ended already, because whoever was told of another one's end did not want it any more."""
        if stream not in self._streams:
            return
        stream.record.error_code = stream.record.error_code or error.code
        stream.submission.record.error_code = stream.submission.record.error_code or error.code
        self._end(stream, None, "failed")
        _tell(stream, error)


def _tell(stream: Stream, error: HeadwaterError) -> None:
    try:
        stream.sink.on_error(error)
    except Exception:  # border to the API layer
        logger.exception("request %s: taking an error failed", stream.record.request_id)
