"""Streams that cannot stay where they are go on at another worker, from the tokens already delivered.

A worker is killed, hung, cut off or out of memory, refuses a sequence, or is told to leave. What happens then:

    refused, nothing sent yet       another worker at once, a few times; then the refusal is the answer
    told to leave                   another worker; when there is none, wait for one
    not prefilled elsewhere         the same, with another one to prefill
    lost                            the same, unless the request is what workers die of (`headwater.frontend.suspects`)

Each stream may move so many times and wait so long; then it ends with an error that says so. Whoever waits is looked
at again when the cluster changes and at every tick, in order. Whoever is told of an end may end other streams: those
are passed over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.errors import Draining, EngineFailed, HandoffFailed, HeadwaterError, NoWorkers, WorkerError, WorkerLost
from headwater.frontend.fault_metrics import FaultMetrics
from headwater.frontend.journal import DecisionJournal
from headwater.frontend.placing import Placer
from headwater.frontend.stream import Stream, Streams
from headwater.frontend.suspects import Suspects

_MAX_WORKERS_ASKED = 3
"""By a sequence that no worker has taken yet."""


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """Per stream."""

    max_moves: int = 8
    max_wait_s: float = 30.0
    """Without any worker."""


class Moves:
    def __init__(
        self,
        streams: Streams,
        placer: Placer,
        journal: DecisionJournal,
        metrics: FaultMetrics,
        fail: Callable[[Stream, HeadwaterError], None],
        limits: MoveLimits,
    ) -> None:
        self._streams = streams
        self._placer = placer
        self._journal = journal
        self._metrics = metrics
        self._fail = fail
        self._limits = limits
        self._suspects = Suspects()
        self._waiting: dict[Stream, None] = {}

    def __len__(self) -> int:
        """Streams that wait for a worker."""
        return len(self._waiting)

    # Events

    def lost(
        self, worker_id: str, streams: Sequence[Stream], error: HeadwaterError, now: float, *, hung: bool = False
    ) -> None:
        """The worker of these has died or hangs."""
        guilty = self._suspects.died(worker_id, streams, hung=hung)
        for stream in streams:
            if stream not in self._streams:
                continue
            if stream is guilty:
                self._metrics.poisonous += 1
                self._fail(stream, _poison(stream, error))
            else:
                self._move(stream, error, now)

    def refused(self, stream: Stream, error: HeadwaterError, now: float) -> None:
        """Its worker ended it with an error, and lives."""
        if stream not in self._streams:
            return
        if isinstance(error, Draining | HandoffFailed):
            self._move(stream, error, now)
        elif not error.retryable:
            self._fail(stream, error)
        elif stream.moves:
            self._move(stream, error, now)
        else:
            self._ask_another(stream, error, now)

    def began(self, stream: Stream) -> None:
        """Its worker sent something."""
        stream.refused_by = ()
        self._suspects.clear(stream)

    def returned(self, worker_id: str) -> None:
        """A worker that hung, or was cut off, lives."""
        self._suspects.absolve(worker_id, self._streams)

    def ended(self, stream: Stream) -> None:
        """For whatever reason."""
        self._suspects.clear(stream)
        self._waiting.pop(stream, None)

    def pump(self, now: float) -> None:
        """The cluster has changed, or time has passed."""
        for stream in list(self._waiting):
            if stream not in self._waiting:
                continue
            if not self._suspects.may_go(stream) and stream.wait_until is not None:
                stream.wait_until = max(stream.wait_until, now + self._limits.max_wait_s / 2)  # it waits for others
            if stream.wait_until is not None and now >= stream.wait_until:
                self._fail(stream, _nowhere(stream, self._limits.max_wait_s))
            else:
                stream.refused_by = ()
                self._try(stream, now)

    # Inner life

    def _ask_another(self, stream: Stream, error: HeadwaterError, now: float) -> None:
        self._leave(stream, error)
        pinned = stream.submission.request.pinned_to is not None
        if pinned or len(stream.refused_by) >= _MAX_WORKERS_ASKED or not self._placer.has_other(stream):
            self._fail(stream, error)
        else:
            self._try(stream, now)

    def _move(self, stream: Stream, error: HeadwaterError, now: float) -> None:
        self._leave(stream, error)
        if stream.moves >= self._limits.max_moves:
            self._fail(stream, _too_often(stream, error))
            return
        stream.moves += 1
        stream.wait_until = now + self._limits.max_wait_s
        self._try(stream, now)

    def _leave(self, stream: Stream, error: HeadwaterError) -> None:
        if stream.connection is not None:
            culprit = _culprit(stream, stream.connection.worker_id, error)
            stream.refused_by += (culprit,)
            self._journal.detour(stream.submission.record, culprit, error.message)
        self._placer.leave(stream)
        stream.why_moved = error.message
        self._streams.renumber(stream)

    def _try(self, stream: Stream, now: float) -> None:
        self._waiting[stream] = None
        if not self._suspects.may_go(stream):
            return
        try:
            self._placer.place_again(stream, now)
        except NoWorkers:
            if stream.wait_until is None:
                self._fail(stream, _nowhere(stream, 0.0))
            return
        except WorkerError:
            return  # its connection is going: there is news of it in a moment
        except HeadwaterError as error:
            self._fail(stream, error)
            return
        del self._waiting[stream]
        stream.wait_until = None
        self._metrics.moved += stream.moves > 0


def _culprit(stream: Stream, worker_id: str, error: HeadwaterError) -> str:
    """The worker that is not to be asked again: of a hand-off that failed it is the one that was to prefill."""
    if isinstance(error, HandoffFailed) and stream.request.prefill is not None:
        return stream.request.prefill.worker_id
    return worker_id


def _nowhere(stream: Stream, waited_s: float) -> HeadwaterError:
    return NoWorkers(f"{stream.why_moved}; no other worker took over within {waited_s:g} s", retry_after_s=5.0)


def _too_often(stream: Stream, error: HeadwaterError) -> HeadwaterError:
    return WorkerLost(f"{error.message}; the request had moved {stream.moves} times, the most it may")


def _poison(stream: Stream, error: HeadwaterError) -> HeadwaterError:
    times = len(stream.deaths)
    told = (
        f"{times} workers died while they" if len({*stream.deaths}) == times else f"{times} times a worker failed as it"
    )
    return EngineFailed(
        f"{told} worked on this request at the same place, after {stream.num_tokens} tokens; "
        f"it is not given to another one: {error.message}"
    )
