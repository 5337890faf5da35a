"""Gives sequences to workers: the frame that asks, the booking in the view, the account of the decision."""

from collections.abc import Sequence
from dataclasses import replace

from headwater.errors import InternalError
from headwater.frontend.connection import WorkerConnection
from headwater.frontend.journal import DecisionJournal
from headwater.frontend.prefills import Prefills
from headwater.frontend.stream import Stream
from headwater.frontend.submission import Submission
from headwater.protocol.frames import Submit
from headwater.protocol.request import EngineRequest
from headwater.router.queue import AHEAD_PRIORITY
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.ticket import Placed
from headwater.router.worker import WorkerView

_MAX_SUBMIT_BYTES = 8 * 1024 * 1024
"""Prompts beyond this travel one sequence a frame."""


class Placer:
    """Knows the connections that may be used now."""

    def __init__(self, router: Router, journal: DecisionJournal, prefills: Prefills) -> None:
        self._prefills = prefills
        self.connections: dict[str, WorkerConnection] = {}
        self._router = router
        self._journal = journal

    def place(self, submission: Submission, placed: Placed, streams: Sequence[Stream], now: float) -> None:
        """As the queue decided. Raises what keeps the worker from being told; nothing is booked then."""
        worker, asked = placed.worker, submission.request
        self._journal.decided(submission.record, asked, worker, placed.decision)
        connection = self._connection_to(worker)
        choice = self._prefills.choose(asked, worker)
        self._prefills.name(choice, submission.requests)
        submission.record.prefill = choice
        cached_tokens = placed.decision.cached_tokens
        for request in submission.requests:
            request.expected_cached_tokens = cached_tokens
            request.step_tokens = submission.step_tokens
            if submission.ahead:
                request.priority += AHEAD_PRIORITY
            cached_tokens = asked.num_prompt_tokens  # computed once, the other sequences find it there
        _send(connection, submission.requests)
        self._journal.placed(submission.record, now - submission.since)
        for stream in streams:
            self._book(stream, connection, worker, asked, now)
        first = streams[0]
        first.prefill_booking = self._prefills.book(choice, asked)
        first.metrics.submitted(asked.num_prompt_tokens, len(streams), now - first.record.received)

    def place_again(self, stream: Stream, now: float) -> None:
        """A sequence whose worker was lost or refused it, at any other. Raises `NoWorkers` when there is none."""
        submission = stream.submission
        route = _route_of_rest(stream, now)
        worker, decision = self._router.route(route, submission.model, stream.refused_by)
        connection = self._connection_to(worker)
        choice = self._prefills.choose(route, worker, stream.refused_by)
        self._prefills.name(choice, [stream.request])
        submission.record.prefill = choice
        stream.request.expected_cached_tokens = decision.cached_tokens
        connection.send(Submit([stream.request_to_send()]))
        self._journal.decided(submission.record, route, worker, decision)
        if stream.sent == 0.0:
            stream.metrics.submitted(0, 1, now - stream.record.received)
        self._book(stream, connection, worker, route, now)
        stream.prefill_booking = self._prefills.book(choice, route)

    def prefilled(self, stream: Stream) -> None:
        """Its first token at this worker is there: no other worker has to do with it any more."""
        if stream.prefill_booking is not None:
            self._router.view.release(stream.prefill_booking)
            stream.prefill_booking = None

    def leave(self, stream: Stream, num_generated: int | None = None) -> None:
        """It is not at its worker any more; `num_generated` if it ended by itself."""
        self.prefilled(stream)
        if stream.booking is not None:
            self._router.view.release(stream.booking, num_generated)
        stream.connection = stream.booking = None

    def has_other(self, stream: Stream) -> bool:
        """Whether a worker that has not refused it could take it."""
        workers = self._router.view.eligible(stream.submission.request.fingerprint)
        return any(worker.worker_id not in stream.refused_by for worker in workers)

    def _book(
        self, stream: Stream, connection: WorkerConnection, worker: WorkerView, asked: RouteRequest, now: float
    ) -> None:
        stream.connection, stream.sent, stream.begun = connection, now, False
        stream.record.worker_id = worker.worker_id
        stream.booking = self._router.view.book(
            worker,
            asked.num_prompt_tokens,
            asked.max_tokens,
            asked.num_prompt_tokens
            if stream.request.prefill is not None
            else min(stream.request.expected_cached_tokens, asked.num_prompt_tokens),
            asked.keys,
            asked.expected_output_tokens,
        )

    def _connection_to(self, worker: WorkerView) -> WorkerConnection:
        connection = self.connections.get(worker.worker_id)
        if connection is None:
            raise InternalError(f"worker {worker.worker_id} was chosen and has no connection")
        return connection


def _route_of_rest(stream: Stream, now: float) -> RouteRequest:
    """What is left to do: all tokens so far are to be computed, those to come are fewer. No worker is insisted on."""
    asked, done = stream.submission.request, stream.num_tokens
    return replace(
        asked,
        now=now,
        num_sequences=1,
        num_prompt_tokens=asked.num_prompt_tokens + done,
        max_tokens=max(1, asked.max_tokens - done),
        expected_output_tokens=max(1.0, asked.expected_output_tokens - done),
        pinned_to=None if stream.moves else asked.pinned_to,
    )


def _send(connection: WorkerConnection, requests: Sequence[EngineRequest]) -> None:
    if len(requests) == 1 or sum(len(request.prompt) for request in requests) <= _MAX_SUBMIT_BYTES:
        connection.send(Submit(list(requests)))
        return
    for request in requests:
        connection.send(Submit([request]))
