"""The decode worker's side: has prompts computed elsewhere, reads their KV, and computes here what does not come.

    claim -> admitted: ask the prefill worker -> `Intake` -> the engine decodes, or prefills the rest itself

Every hand-off is bounded by its patience; the engine has a bound of its own a little later, should all else fail. What
was read is believed only while this worker can be sure that it was still kept for it: the connection stands, the time
that was agreed on is not over, and this process has not been asleep (a prefill worker gives up who is silent).
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from math import inf

from headwater.engines.base import KvPort
from headwater.errors import HeadwaterError, ProtocolError, TransferTimeout, WorkerError
from headwater.handoff.intake import Action, Arrived, CancelRead, Complete, FallBack, Intake, Read, Release, Stop
from headwater.handoff.mover import Move, Mover, ReadOrder
from headwater.handoff.order import prefill_order
from headwater.handoff.patience import Paces, Prospects, patience
from headwater.handoff.peers import OpenLink, PrefillPeers
from headwater.handoff.wait import OwnWork, Wait
from headwater.protocol.cluster import ModelCard
from headwater.protocol.frames import BlocksReady, PrefillWaits
from headwater.protocol.request import EngineRequest, RemotePrefill, SequenceOutput
from headwater.scheduler.outside import FirstToken, LoadEnded, LoadStarted
from headwater.types import TOKEN_ID_BYTES

_log = logging.getLogger(__name__)

_TICK_S = 0.25
_ASLEEP_S = 2.0
"""Between two ticks: longer than this, and a prefill worker may have given this one up (it waits 5 s)."""
_ENGINE_SLACK_S = 5.0


@dataclass(slots=True)
class _Handoff:
    """One request that another worker prefills, from its admission here on."""

    request: EngineRequest
    where: RemotePrefill
    num_tokens: int
    """To be computed there."""
    wait: Wait
    """By the event loop's time."""
    first_block: int
    blocks: tuple[int, ...]
    intake: Intake
    card: bytes = b""
    ready: list[bytes] = field(default_factory=list[bytes])
    """What was announced and is not being read yet."""
    move: Move | None = None


class DecodeSide:
    """Implements `KvLoader` and `PeerOwner`. Lives on the event loop."""

    def __init__(self, port: KvPort, mover: Mover, card: ModelCard, open_link: OpenLink) -> None:
        self.done = 0
        self.fell_back = 0
        self.blocks_moved = 0
        self._port = port
        self._mover = mover
        self._card = card
        self._loop = asyncio.get_running_loop()
        self._peers = PrefillPeers(open_link, self)
        self._paces = Paces()
        self._waiting: dict[int, EngineRequest] = {}
        """Not admitted yet."""
        self._own_work = OwnWork()
        self._open: dict[int, _Handoff] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._ticked = 0.0

    def submit(self, request: EngineRequest) -> None:
        """Take a request that names a prefill worker."""
        where = request.prefill
        assert where is not None, "the request names no prefill worker"
        self._waiting[request.stream] = request
        num_tokens = (len(request.prompt) + len(request.resumed_tokens)) // TOKEN_ID_BYTES
        longest_s = patience(self._paces.expected_ms(where, num_tokens), num_tokens).hold_s
        self._port.submit_loading(request, self, longest_s + _ENGINE_SLACK_S)

    async def close(self) -> None:
        """Nothing is read any more afterwards."""
        for stream, handoff in list(self._open.items()):
            self._act(stream, handoff, handoff.intake.ended())
        if self._ticker is not None:
            self._ticker.cancel()
        await self._peers.close()

    # ---- from the engine

    def on_load(self, started: LoadStarted) -> None:
        """Admitted: ask for what is missing, if it is worth asking."""
        stream = started.stream
        request = self._waiting.pop(stream)
        num_tokens = started.num_tokens - started.first_block * self._card.block_size
        if request.prefill is None or num_tokens <= self._card.block_size:
            self._port.loaded(stream, started.first_block)
            return
        now = self._loop.time()
        patient = patience(self._paces.expected_ms(request.prefill, num_tokens), num_tokens)
        num_blocks = len(started.blocks)
        handoff = self._open[stream] = _Handoff(
            request=request,
            where=request.prefill,
            num_tokens=num_tokens,
            wait=Wait(patient, num_blocks, now),
            first_block=started.first_block,
            blocks=started.blocks,
            intake=Intake(started.first_block, started.first_block + num_blocks),
        )
        self._watch(now)
        order = prefill_order(handoff.request, handoff.where, self._card, handoff.first_block, patient.hold_s)
        self._peers.ask(handoff.where, order)

    def on_load_ended(self, ended: LoadEnded) -> None:
        handoff = self._open.get(ended.stream)
        if handoff is not None:
            self._act(ended.stream, handoff, handoff.intake.ended())
        else:
            self._waiting.pop(ended.stream, None)
            self._port.stopped(ended.stream)

    # ---- from prefill workers

    def on_waits(self, waits: PrefillWaits) -> None:
        handoff = self._open[waits.stream]
        now = self._loop.time()
        handoff.wait.hear(now)
        prospects = self._prospects(handoff, now, waits.expected_ms / 1000)
        error = self._own_work.taken_back(waits.num_ahead, prospects, now)
        if error is not None:
            self._act(waits.stream, handoff, handoff.intake.failed(error))
        else:
            handoff.wait.in_line(waits.silence_ms / 1000, now)

    def on_ready(self, ready: BlocksReady) -> None:
        handoff = self._open[ready.stream]
        handoff.wait.announced(ready.num_blocks, self._loop.time())
        handoff.card = ready.card or handoff.card
        handoff.ready.append(ready.blocks)
        self._act(ready.stream, handoff, handoff.intake.announced(ready.first_block, ready.num_blocks))

    def on_output(self, output: SequenceOutput) -> None:
        handoff = self._open[output.stream]
        handoff.wait.hear(self._loop.time())
        first = _first_token(output, self._card.vocab_size)
        if isinstance(first, HeadwaterError):
            self._act(output.stream, handoff, handoff.intake.failed(first))
        else:
            self._act(output.stream, handoff, handoff.intake.token(first))

    def on_lost(self, stream: int, error: HeadwaterError) -> None:
        handoff = self._open[stream]
        self._act(stream, handoff, handoff.intake.failed(error))

    def on_left(self, worker_id: str) -> None:
        self._paces.forget(worker_id)
        self._mover.forget(worker_id)

    # ---- inner life

    def _act(self, stream: int, handoff: _Handoff, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Read(first_block, num_blocks):
                    self._read(stream, handoff, first_block, num_blocks)
                case CancelRead():
                    if handoff.move is not None:
                        handoff.move.cancel()
                case Arrived(num_blocks):
                    self._port.arrived(stream, num_blocks)
                case Complete(first):
                    self._complete(stream, handoff, first)
                case FallBack(num_blocks, reason):
                    self._fall_back(stream, handoff, num_blocks, reason)
                case Stop():
                    self._port.stopped(stream)
                case Release():
                    del self._open[stream]
                    self._peers.release(stream)

    def _read(self, stream: int, handoff: _Handoff, first_block: int, num_blocks: int) -> None:
        here = first_block - handoff.first_block
        remote, handoff.ready = handoff.ready, []
        remaining_s = handoff.wait.left_s(self._loop.time())
        order = ReadOrder(handoff.card, remote, handoff.blocks[here : here + num_blocks], max(0.1, remaining_s))

        def moved(error: HeadwaterError | None) -> None:
            """In a turn of its own, also when it fails at once: the intake is in the middle of something."""
            self._loop.call_soon(self._moved, stream, handoff, num_blocks, error)

        handoff.move = self._mover.read(order, moved)

    def _moved(self, stream: int, handoff: _Handoff, num_blocks: int, error: HeadwaterError | None) -> None:
        handoff.move = None
        now = self._loop.time()
        if error is None and now - self._ticked > _ASLEEP_S:
            error = TransferTimeout("this worker was not running for a while, and what it read may be out of date")
        if error is None:
            handoff.wait.hear(now)
            self.blocks_moved += num_blocks
            self._act(stream, handoff, handoff.intake.read())
        else:
            self._act(stream, handoff, handoff.intake.read_failed(error))

    def _complete(self, stream: int, handoff: _Handoff, first: FirstToken) -> None:
        self.done += 1
        took_ms = (self._loop.time() - handoff.wait.asked) * 1000
        self._paces.observe(handoff.where.worker_id, handoff.num_tokens, took_ms)
        self._port.prefilled(stream, first)

    def _fall_back(self, stream: int, handoff: _Handoff, num_blocks: int, reason: HeadwaterError) -> None:
        self.fell_back += 1
        _log.warning(
            "prefilling here from block %d on: worker %s did not deliver all %d: %s",
            num_blocks,
            handoff.where.worker_id,
            handoff.first_block + len(handoff.blocks),
            str(reason),  # whoever keeps the record is not to keep what the error was raised in
            extra={"request_id": handoff.request.request_id},
        )
        self._port.loaded(stream, num_blocks, cached=False)

    def _prospects(self, handoff: _Handoff, now: float, there_s: float) -> Prospects:
        deadline = handoff.request.deadline
        deadline_s = inf if deadline is None else deadline - time.time()
        return self._own_work.prospects(handoff.wait, there_s, handoff.where.here_ms, now, deadline_s)

    # ---- time

    def _watch(self, now: float) -> None:
        if self._ticker is None:
            self._ticked = now
            self._ticker = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        asleep = now - self._ticked > _ASLEEP_S
        self._ticked = now
        for stream, handoff in list(self._open.items()):
            if (error := _overdue(handoff, now, asleep)) is not None:
                self._act(stream, handoff, handoff.intake.failed(error))
        self._ticker = self._loop.call_later(_TICK_S, self._tick) if self._open else None


def _overdue(handoff: _Handoff, now: float, asleep: bool) -> HeadwaterError | None:
    return TransferTimeout("this worker was not running for a while") if asleep else handoff.wait.overdue(now)


def _first_token(output: SequenceOutput, vocab_size: int) -> FirstToken | HeadwaterError:
    """What the prefill worker's only output says."""
    if output.error is not None:
        return WorkerError(f"{output.error.code}: {output.error.message}")
    token = output.token_ids[0] if output.token_ids else output.stop_token_id
    if token is None or not 0 <= token < vocab_size:
        return ProtocolError(f"it finished with token {token}, which the vocabulary of {vocab_size} does not have")
    logprob = output.logprobs[0] if output.token_ids and output.logprobs else None
    return FirstToken(token, logprob, output.num_cached_tokens or 0)
