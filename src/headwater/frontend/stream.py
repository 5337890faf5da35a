"""One sequence under way, as the dispatcher keeps it, and the table of all of them.

A stream keeps its request and every token that was delivered, so that it can go on elsewhere at any time. It has the
number that its caller knows and, for each worker it is given to, another one: what an earlier worker may still send
finds nobody.
"""

import itertools
from array import array
from collections.abc import Iterator

import msgspec

from headwater.frontend.connection import WorkerConnection
from headwater.frontend.dispatch import TokenSink
from headwater.frontend.fault_metrics import Stage
from headwater.frontend.metrics import ModelMetrics
from headwater.frontend.records import RequestRecord
from headwater.frontend.submission import Submission
from headwater.protocol.request import EngineRequest
from headwater.router.worker import Booking


class Stream:
    __slots__ = (
        "begun",
        "booking",
        "connection",
        "counts_cached",
        "deaths",
        "last",
        "metrics",
        "moves",
        "number",
        "prefill_booking",
        "record",
        "refused_by",
        "request",
        "sent",
        "sink",
        "submission",
        "tokens",
        "wait_until",
        "waits",
        "why_moved",
    )

    def __init__(
        self,
        sink: TokenSink,
        request: EngineRequest,
        record: RequestRecord,
        metrics: ModelMetrics,
        submission: Submission,
    ) -> None:
        self.sink = sink
        self.request = request
        self.record = record
        self.metrics = metrics
        self.submission = submission
        self.number = 0
        """What the caller knows it by."""
        self.connection: WorkerConnection | None = None
        """None while it waits for a worker, as is its booking."""
        self.booking: Booking | None = None
        self.prefill_booking: Booking | None = None
        """At the worker that computes its prompt for the other one, until its first token is there."""
        self.refused_by: tuple[str, ...] = ()
        """Workers that did not take it since it was last at one that did."""
        self.counts_cached = submission.requests[0] is request
        """Whether its cached tokens are the prompt's: those of the first sequence are."""
        self.tokens = array("I")
        """All that were delivered."""
        self.begun = False
        """Whether its present worker has sent anything."""
        self.sent = 0.0
        """When a worker was last given it; 0: never."""
        self.last = 0.0
        """When the last tokens came; monotonic seconds."""
        self.moves = 0
        self.deaths: tuple[str, ...] = ()
        """Workers that died while it was there, since it last got a token."""
        self.waits = True
        """Nothing has come for it yet, from any worker."""
        self.wait_until: float | None = None
        """While it has no worker any more: when it is given up."""
        self.why_moved = ""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def stage(self) -> Stage:
        """How far it is."""
        if self.connection is None:
            return "moving" if self.tokens or self.moves else "queued"
        return "decoding" if self.begun else "prefilling"

    def request_to_send(self) -> EngineRequest:
        """What the next worker is asked: the rest, after all that was delivered."""
        if not self.tokens:
            return self.request
        return msgspec.structs.replace(self.request, resumed_tokens=self.tokens.tobytes())


class Streams:
    """All open ones. `at_workers` is keyed by the numbers that workers know, which change with every move."""

    def __init__(self) -> None:
        self.at_workers: dict[int, Stream] = {}
        self._moved: dict[int, int] = {}
        """The present number of those that have another than they began with."""
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self.at_workers)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self.at_workers.values())

    def __contains__(self, stream: Stream) -> bool:
        """Whether it is still open: a sink that is told of one end may bring about others."""
        return stream.request.stream in self.at_workers

    def add(self, stream: Stream) -> int:
        number = stream.number = stream.request.stream = next(self._numbers)
        self.at_workers[number] = stream
        stream.record.open_sequences += 1
        return number

    def renumber(self, stream: Stream) -> None:
        """What comes for it from now on comes from another worker."""
        del self.at_workers[stream.request.stream]
        stream.request.stream = self._moved[stream.number] = next(self._numbers)
        self.at_workers[stream.request.stream] = stream

    def find(self, number: int) -> Stream | None:
        """By the number that the caller knows."""
        return self.at_workers.get(self._moved.get(number, number))

    def remove(self, stream: Stream) -> None:
        if self.at_workers.pop(stream.request.stream, None) is not None:
            stream.record.open_sequences -= 1
        if stream.request.stream != stream.number:
            self._moved.pop(stream.number, None)

    def at(self, connection: WorkerConnection) -> list[Stream]:
        return [stream for stream in self.at_workers.values() if stream.connection is connection]
