"""Hand-offs of prompts between simulated workers, by the production rules (`headwater.handoff`), on virtual links.

    decode worker admits the request: it has blocks for all of it, and finds what of it is in its cache
      -> the prefill worker is asked for the rest, finds what is in its cache, and announces blocks as it commits them
      -> what is announced is read while more is computed, one read at a time (`headwater.handoff.intake`)
      -> all is read, and the first token known: the decode worker goes on
    a sequence that cannot be prefilled there is computed here from the last block that has come

Made up is the network alone. Every word between two workers takes the latency of the link, and so does every read; the
bytes of a read take the inbound link of the reader and the outbound link of the other one for themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from headwater.errors import HeadwaterError, TransferCancelled, WorkerError
from headwater.handoff.intake import Action, Arrived, CancelRead, Complete, FallBack, Intake, Read, Release, Stop
from headwater.handoff.order import prefill_order
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest, RemotePrefill, SequenceOutput
from headwater.router.disagg import DisaggSettings
from headwater.scheduler.outside import Export, FirstToken, LoadStarted

_WORD = 7
PATIENCE_S = 1e9


@dataclass(frozen=True, slots=True)
class KvLink:
    """Between workers, in each direction of each of them."""

    bytes_per_s: float = 25e9
    """0: in no time."""
    latency_s: float = 0.001


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Workers by what they do: those that prefill come first."""

    num_prefill: int
    num_decode: int
    kv_bytes_per_token: int
    settings: DisaggSettings = field(default_factory=DisaggSettings)
    """Of the router: when prompts are computed elsewhere."""
    link: KvLink = field(default_factory=KvLink)
    loose: bool = False
    """Requests may leave the plan of roles where that is cheaper."""

    def __str__(self) -> str:
        return f"{self.num_prefill}P+{self.num_decode}D"


@dataclass(slots=True)
class HandoffTotals:
    done: int = 0
    fell_back: int = 0
    """Computed where they decode after all, in part at least."""
    moved_bytes: int = 0


class Side(Protocol):
    """A worker, as hand-offs use it. What is done to it may let it go on: it is told to by `Stage.changed`."""

    inbound_free_at: float
    outbound_free_at: float

    def export(self, request: EngineRequest, export: Export, now: float) -> None:
        """Compute a prompt for another worker."""
        ...

    def release(self, stream: int) -> None: ...

    def arrived(self, stream: int, num_blocks: int) -> None: ...

    def prefilled(self, stream: int, first: FirstToken) -> None: ...

    def loaded(self, stream: int, num_blocks: int) -> None: ...

    def stopped(self, stream: int) -> None: ...


class Stage(Protocol):
    """Where it all happens: time, and workers that have to be looked at."""

    def later(self, at_s: float, action: Callable[[float], None]) -> None: ...

    def change(self, worker: Side, what: Callable[[], None], now: float) -> None:
        """Do something to a worker, and let it go on if it can now."""
        ...

    def handed_over(self, stream: int) -> None:
        """A prompt has come whole."""
        ...


@dataclass(slots=True, eq=False)
class _Handoff:
    request: EngineRequest
    where: RemotePrefill
    decoder: Side
    prefiller: Side
    intake: Intake | None = None
    """From its admission at the decode worker on."""
    read: int = 0
    """Number of the last read; an earlier one was called off."""


class Handoffs:
    """All of a run."""

    def __init__(self, config: PoolConfig, card: ModelCard, stage: Stage) -> None:
        self.totals = HandoffTotals()
        self._card = card
        self._stage = stage
        self._latency_s = config.link.latency_s
        self._block_bytes = config.kv_bytes_per_token * card.block_size
        bytes_per_s = config.link.bytes_per_s
        self._block_s = self._block_bytes / bytes_per_s if bytes_per_s else 0.0
        self._open: dict[int, _Handoff] = {}

    def begin(self, request: EngineRequest, where: RemotePrefill, decoder: Side, prefiller: Side) -> None:
        """A request that names a prefill worker goes to the one that decodes."""
        self._open[request.stream] = _Handoff(request, where, decoder, prefiller)

    # -- from the decode worker

    def on_load(self, started: LoadStarted, now: float) -> bool:
        """Admitted. False: what is missing is not worth asking for."""
        stream, handoff = started.stream, self._open[started.stream]
        missing = started.num_tokens - started.first_block * self._card.block_size
        if missing <= self._card.block_size:
            del self._open[stream]
            return False
        handoff.intake = Intake(started.first_block, started.first_block + len(started.blocks))
        order = prefill_order(handoff.request, handoff.where, self._card, started.first_block, PATIENCE_S)
        self._stage.later(now + self._latency_s, partial(self._ask, handoff, order, started.first_block))
        return True

    def on_load_ended(self, stream: int, now: float) -> None:
        """Preempted, or waited for too long. What is computed from here on is computed there."""
        handoff = self._open.get(stream)
        if handoff is not None and handoff.intake is not None:
            self.totals.fell_back += 1
            self._act(handoff, handoff.intake.ended(), now)

    # -- from the prefill worker

    def on_exported(self, stream: int, first_block: int, num_blocks: int, now: float) -> None:
        self._tell(stream, lambda intake: intake.announced(first_block, num_blocks), now)

    def on_output(self, output: SequenceOutput, now: float) -> None:
        """The one output of a sequence that was prefilled for another worker."""
        if output.error is not None:
            error = WorkerError(f"{output.error.code}: {output.error.message}")
            self._tell(output.stream, lambda intake: intake.failed(error), now)
        else:
            first = FirstToken(_WORD, None, output.num_cached_tokens or 0)
            self._tell(output.stream, lambda intake: intake.token(first), now)

    # -- words on their way

    def _ask(self, handoff: _Handoff, order: EngineRequest, first_block: int, now: float) -> None:
        if handoff.intake is not None and not handoff.intake.closed:
            export = Export(first_block, now + PATIENCE_S)
            self._stage.change(handoff.prefiller, partial(handoff.prefiller.export, order, export, now), now)

    def _tell(self, stream: int, word: Callable[[Intake], list[Action]], now: float) -> None:
        """Let the decode worker hear something."""

        def heard(at_s: float) -> None:
            handoff = self._open.get(stream)
            if handoff is not None and handoff.intake is not None:
                self._act(handoff, word(handoff.intake), at_s)

        self._stage.later(now + self._latency_s, heard)

    # -- what the decode worker does

    def _act(self, handoff: _Handoff, actions: list[Action], now: float) -> None:
        stream, decoder = handoff.request.stream, handoff.decoder
        for action in actions:
            match action:
                case Read(num_blocks=num_blocks):
                    self._read(handoff, num_blocks, now)
                case CancelRead():
                    handoff.read += 1
                    error = TransferCancelled("called off")
                    self._stage.later(now, partial(self._moved, handoff, handoff.read, 0, error))
                case Arrived(num_blocks):
                    self._stage.change(decoder, partial(decoder.arrived, stream, num_blocks), now)
                case Complete(first):
                    self.totals.done += 1
                    self._stage.handed_over(stream)
                    self._stage.change(decoder, partial(decoder.prefilled, stream, first), now)
                case FallBack(num_blocks):
                    self.totals.fell_back += 1
                    self._stage.change(decoder, partial(decoder.loaded, stream, num_blocks), now)
                case Stop():
                    self._stage.later(now, partial(self._stop, decoder, stream))
                case Release():
                    del self._open[stream]
                    self._stage.later(now + self._latency_s, partial(self._release, handoff.prefiller, stream))

    def _read(self, handoff: _Handoff, num_blocks: int, now: float) -> None:
        here, there = handoff.decoder, handoff.prefiller
        sent_at = max(now, here.inbound_free_at, there.outbound_free_at) + num_blocks * self._block_s
        here.inbound_free_at = there.outbound_free_at = sent_at
        handoff.read += 1
        self._stage.later(sent_at + self._latency_s, partial(self._moved, handoff, handoff.read, num_blocks, None))

    def _moved(self, handoff: _Handoff, read: int, num_blocks: int, error: HeadwaterError | None, now: float) -> None:
        intake = handoff.intake
        if intake is None or read != handoff.read or intake.closed:
            return
        if error is not None:
            self._act(handoff, intake.read_failed(error), now)
            return
        self.totals.moved_bytes += num_blocks * self._block_bytes
        self._act(handoff, intake.read(), now)

    def _stop(self, decoder: Side, stream: int, now: float) -> None:
        self._stage.change(decoder, partial(decoder.stopped, stream), now)

    def _release(self, prefiller: Side, stream: int, now: float) -> None:
        self._stage.change(prefiller, partial(prefiller.release, stream), now)
