"""Hand-offs of prompts between simulated workers, by the production rules (`headwater.handoff`), on virtual links.

    decode worker admits the request: it has blocks for all of it, and finds what of it is in its cache
      -> the prefill worker is asked for the rest, finds what is in its cache, and announces blocks as it commits them
      -> what is announced is read while more is computed, one read at a time (`headwater.handoff.intake`)
      -> all is read, and the first token known: the decode worker goes on
    what takes too long, or is better computed here than in line there (`headwater.handoff.wait`), is computed here from
    the last block that has come

Made up is the network alone. Every word between two workers takes the latency of the link, and so does every read.
Bytes follow each other out of the one worker and into the other, and have come when both are done with them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from headwater.errors import HeadwaterError, TransferCancelled, WorkerError
from headwater.handoff.intake import Action, Arrived, CancelRead, Complete, FallBack, Intake, Read, Release, Stop
from headwater.handoff.order import prefill_order
from headwater.handoff.patience import patience
from headwater.handoff.wait import Line, OwnWork, Wait
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest, RemotePrefill, SequenceOutput
from headwater.router.disagg import DisaggSettings
from headwater.scheduler.outside import Export, ExportWaits, FirstToken, LoadStarted
from headwater.types import TOKEN_ID_BYTES

_WORD = 7
_TICK_S = 0.25
_ENGINE_SLACK_S = 5.0


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
    line: Line
    own_work: OwnWork

    def tell_waiting(self, now: float) -> None:
        """Say what waits in line for others, if it is time to."""
        ...

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
    intake: Intake
    wait: Wait
    read: int = 0
    """Number of the last read; an earlier one was called off."""
    sending_s: float = 0.0
    """Time of its bytes on a link, ..."""
    sent_at: tuple[float, float] = (0.0, 0.0)
    """... and when they are out and in."""


def longest_s(request: EngineRequest, where: RemotePrefill) -> float:
    """How long blocks may take to come from there, at most."""
    return patience(where.expected_ms, len(request.prompt) // TOKEN_ID_BYTES).hold_s + _ENGINE_SLACK_S


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
        self._asking: dict[int, tuple[EngineRequest, RemotePrefill, Side, Side]] = {}
        """Not admitted yet."""
        self._open: dict[int, _Handoff] = {}
        self._words: list[tuple[ExportWaits, float, float]] = []
        """About lines, on their way: with the times they mean, in seconds."""
        self._ticking = False

    def begin(self, request: EngineRequest, where: RemotePrefill, decoder: Side, prefiller: Side) -> None:
        """A request that names a prefill worker goes to the one that decodes."""
        self._asking[request.stream] = request, where, decoder, prefiller

    # -- from the decode worker

    def on_load(self, started: LoadStarted, now: float) -> bool:
        """Admitted. False: what is missing is not worth asking for."""
        request, where, decoder, prefiller = self._asking.pop(started.stream)
        missing = started.num_tokens - started.first_block * self._card.block_size
        if missing <= self._card.block_size:
            return False
        patient, num_blocks = patience(where.expected_ms, missing), len(started.blocks)
        intake = Intake(started.first_block, started.first_block + num_blocks)
        handoff = _Handoff(request, where, decoder, prefiller, intake, Wait(patient, num_blocks, now))
        self._open[started.stream] = handoff
        order = prefill_order(request, where, self._card, started.first_block, patient.hold_s)
        export = Export(started.first_block, now + self._latency_s + patient.hold_s)
        self._stage.later(now + self._latency_s, partial(self._ask, handoff, order, export))
        self._watch(now)
        return True

    def on_load_ended(self, stream: int, now: float) -> bool:
        """Preempted, or too late: what is computed from here on is computed there. False: nothing was under way."""
        handoff = self._open.get(stream)
        if handoff is None:
            return False
        self.totals.fell_back += 1
        self._act(handoff, handoff.intake.ended(), now)
        return True

    # -- from the prefill worker

    def on_exported(self, stream: int, first_block: int, num_blocks: int, now: float) -> None:
        def announced(handoff: _Handoff, at_s: float) -> list[Action]:
            handoff.wait.announced(num_blocks, at_s)
            return handoff.intake.announced(first_block, num_blocks)

        self._tell(stream, announced, now)

    def on_output(self, output: SequenceOutput, now: float) -> None:
        """The one output of a sequence that was prefilled for another worker."""
        error = output.error
        failure = None if error is None else WorkerError(f"{error.code}: {error.message}")
        first = FirstToken(_WORD, None, output.num_cached_tokens or 0)

        def told(handoff: _Handoff, at_s: float) -> list[Action]:
            handoff.wait.hear(at_s)
            return handoff.intake.token(first) if failure is None else handoff.intake.failed(failure)

        self._tell(output.stream, told, now)

    def on_waits(self, waits: ExportWaits, line: Line, now: float) -> None:
        """It is in line there. All words of one moment come together."""
        self._words.append((waits, line.expected_ms(waits.tokens_ahead) / 1000, line.silence_ms / 1000))
        if len(self._words) == 1:
            self._stage.later(now + self._latency_s, self._hear_waits)

    # -- words on their way

    def _ask(self, handoff: _Handoff, order: EngineRequest, export: Export, now: float) -> None:
        if not handoff.intake.closed:
            self._stage.change(handoff.prefiller, partial(handoff.prefiller.export, order, export, now), now)

    def _tell(self, stream: int, word: Callable[[_Handoff, float], list[Action]], now: float) -> None:
        """Let the decode worker hear something."""

        def heard(at_s: float) -> None:
            handoff = self._open.get(stream)
            if handoff is not None:
                self._act(handoff, word(handoff, at_s), at_s)

        self._stage.later(now + self._latency_s, heard)

    def _hear_waits(self, now: float) -> None:
        words, self._words = self._words, []
        for waits, there_s, silence_s in words:
            handoff = self._open.get(waits.stream)
            if handoff is None:
                continue
            handoff.wait.hear(now)
            own_work = handoff.decoder.own_work
            prospects = own_work.prospects(handoff.wait, there_s, handoff.where.here_ms, now)
            error = own_work.taken_back(waits.num_ahead, prospects, now)
            if error is not None:
                self._act(handoff, handoff.intake.failed(error), now)
            else:
                handoff.wait.in_line(silence_s, now)

    # -- time

    def _watch(self, now: float) -> None:
        if not self._ticking:
            self._ticking = True
            self._stage.later(now + _TICK_S, self._tick)

    def _tick(self, now: float) -> None:
        self._ticking = False
        for handoff in list(self._open.values()):
            if (error := handoff.wait.overdue(now)) is not None:
                self._act(handoff, handoff.intake.failed(error), now)
        for prefiller in dict.fromkeys([handoff.prefiller for handoff in self._open.values()]):
            prefiller.tell_waiting(now)
        if self._open:
            self._watch(now)

    # -- what the decode worker does

    def _act(self, handoff: _Handoff, actions: list[Action], now: float) -> None:
        stream, decoder = handoff.request.stream, handoff.decoder
        for action in actions:
            match action:
                case Read(num_blocks=num_blocks):
                    self._read(handoff, num_blocks, now)
                case CancelRead():
                    self._call_off(handoff, now)
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
        handoff.sending_s = sending_s = num_blocks * self._block_s
        there.outbound_free_at = max(now, there.outbound_free_at) + sending_s
        here.inbound_free_at = max(now, here.inbound_free_at) + sending_s
        handoff.sent_at = there.outbound_free_at, here.inbound_free_at
        handoff.read += 1
        moved = partial(self._moved, handoff, handoff.read, num_blocks, None)
        self._stage.later(max(handoff.sent_at) + self._latency_s, moved)

    def _call_off(self, handoff: _Handoff, now: float) -> None:
        """What it has not used of the links is free again, for reads that are yet to come."""
        out_at, in_at = handoff.sent_at
        handoff.prefiller.outbound_free_at -= min(handoff.sending_s, max(0.0, out_at - now))
        handoff.decoder.inbound_free_at -= min(handoff.sending_s, max(0.0, in_at - now))
        handoff.read += 1
        error = TransferCancelled("called off")
        self._stage.later(now, partial(self._moved, handoff, handoff.read, 0, error))

    def _moved(self, handoff: _Handoff, read: int, num_blocks: int, error: HeadwaterError | None, now: float) -> None:
        intake = handoff.intake
        if read != handoff.read or intake.closed:
            return
        if error is not None:
            self._act(handoff, intake.read_failed(error), now)
            return
        handoff.wait.hear(now)
        self.totals.moved_bytes += num_blocks * self._block_bytes
        self._act(handoff, intake.read(), now)

    def _stop(self, decoder: Side, stream: int, now: float) -> None:
        self._stage.change(decoder, partial(decoder.stopped, stream), now)

    def _release(self, prefiller: Side, stream: int, now: float) -> None:
        self._stage.change(prefiller, partial(prefiller.release, stream), now)
