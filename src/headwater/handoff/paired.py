"""The decode worker's side where engines move KV among themselves: both of a pair get the request at once.

    frontend --Submit(request, prefill)--> decode worker --Submit(request, pairing)--> prefill worker
                                             engine <--------- KV, as engines do it ------> engine

The pair finds each other by where the prefill worker's engine listens, and by a number that is drawn here. Such an
engine cannot compute a prompt itself, so there is nothing to fall back to: whatever fails before the first token is
told as `HandoffFailed`, and the frontend begins again with another prefill worker.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headwater.errors import ContextTooLong, HandoffFailed, HeadwaterError, InvalidRequest
from headwater.handoff.patience import MAX_HOLD_S
from headwater.handoff.peers import OpenLink, PrefillPeers
from headwater.protocol.frames import BlocksReady, PrefillWaits
from headwater.protocol.request import EngineRequest, ErrorInfo, Pairing, RemotePrefill, SequenceOutput

_log = logging.getLogger(__name__)

_ROOM_BITS = 63
_LEAST_PATIENCE_S = 30.0
_PATIENCE_FACTOR = 10.0
"""Of what was expected until the first token."""

_MAX_PORT = 65535
_FIRST_OF_SERVERS = 500
"""Statuses from here on are no fault of the client's."""

Submit = Callable[[Sequence[EngineRequest]], None]
Fail = Callable[[int, HeadwaterError], None]
"""End a stream with an error, here and at the engine."""


@dataclass(slots=True)
class _Pair:
    """One request at both workers, until its first token is there."""

    where: RemotePrefill
    timer: asyncio.TimerHandle


class PairedSide:
    """Implements `PeerOwner`. Lives on the event loop."""

    def __init__(self, submit: Submit, open_link: OpenLink, fail: Fail) -> None:
        self.done = 0
        self.failed = 0
        self._submit = submit
        self._fail = fail
        self._peers = PrefillPeers(open_link, self)
        self._open: dict[int, _Pair] = {}

    def submit(self, request: EngineRequest) -> None:
        """Take a request that names a prefill worker."""
        where = request.prefill
        assert where is not None, "the request names no prefill worker"
        stream, loop = request.stream, asyncio.get_running_loop()
        address = _host_and_port(where.bootstrap)
        if address is None:
            self.failed += 1
            error = HandoffFailed(f"worker {where.worker_id} does not say where its engine hands over")
            loop.call_soon(self._fail, stream, error)
            return
        request.pairing = Pairing(*address, secrets.randbits(_ROOM_BITS), where.frontend_id)
        patience_s = min(MAX_HOLD_S, max(_LEAST_PATIENCE_S, _PATIENCE_FACTOR * where.expected_ms / 1e3))
        self._open[stream] = _Pair(where, loop.call_later(patience_s, self._late, stream, patience_s))
        order = msgspec.structs.replace(request, prefill=None, expected_cached_tokens=where.expected_cached_tokens)
        self._peers.ask(where, order)
        self._submit([request])

    def stepped(self, outputs: Iterable[SequenceOutput]) -> None:
        """What the engine says, before it is passed on: errors of a pair become `HandoffFailed`."""
        for output in outputs:
            stream = output.stream
            if stream in self._open:
                if output.error is not None:
                    self.failed += 1
                    self._end(stream)
                    output.error = _as_handoff(output.error)
                elif output.token_ids or output.finish_reason is not None:
                    self._open.pop(stream).timer.cancel()
                    self.done += 1
            if output.finish_reason is not None:
                self._end(stream)

    def abort(self, streams: Iterable[int]) -> None:
        for stream in streams:
            self._end(stream)

    async def close(self) -> None:
        for pair in self._open.values():
            pair.timer.cancel()
        self._open.clear()
        await self._peers.close()

    # ---- from prefill workers

    def on_waits(self, waits: PrefillWaits) -> None:
        """Only of exports."""

    def on_ready(self, ready: BlocksReady) -> None:
        """Only of exports."""

    def on_output(self, output: SequenceOutput) -> None:
        if output.error is not None:
            self._refused(output.stream, output.error)
        elif output.finish_reason is not None:
            self._peers.release(output.stream)

    def on_lost(self, stream: int, error: HeadwaterError) -> None:
        self._lost(stream, error.message)

    def on_left(self, worker_id: str) -> None:
        """Nothing is kept of it."""

    # ---- inner life

    def _late(self, stream: int, patience_s: float) -> None:
        self._lost(stream, f"no first token within {patience_s:.0f} s")

    def _refused(self, stream: int, error: ErrorInfo) -> None:
        """A request at fault is at fault everywhere; of anything else another prefill worker may make more."""
        if error.http_status >= _FIRST_OF_SERVERS or error.retryable:
            self._lost(stream, f"{error.code}: {error.message}")
            return
        waited = stream in self._open
        self._end(stream)
        if waited:
            kind = ContextTooLong if error.code == ContextTooLong.code else InvalidRequest
            self._fail(stream, kind(error.message, param=error.param))

    def _lost(self, stream: int, reason: str) -> None:
        """The prefill worker has failed it; that matters only while no token is there."""
        pair = self._open.get(stream)
        self._end(stream)
        if pair is not None:
            self.failed += 1
            _log.warning("worker %s has not prefilled a request of this one: %s", pair.where.worker_id, reason)
            self._fail(stream, HandoffFailed(f"worker {pair.where.worker_id} has not prefilled it: {reason}"))

    def _end(self, stream: int) -> None:
        """Nothing more is wanted of the prefill worker."""
        pair = self._open.pop(stream, None)
        if pair is not None:
            pair.timer.cancel()
        self._peers.release(stream)


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) <= _MAX_PORT else None


def _as_handoff(error: ErrorInfo) -> ErrorInfo:
    """The decode engine's account of what may be the prefill engine's end. What cannot be helped stays as it is."""
    return ErrorInfo.of(HandoffFailed(error.message)) if error.retryable else error
