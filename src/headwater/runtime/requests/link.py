"""A frontend's end of one connection, over any transport.

A link is used once: it never reconnects by itself, because what was asked of a worker that vanished is lost. Frames
sent in one turn of the loop leave as one message. Who has said or heard nothing for a heartbeat sends a `Ping`; a
worker that stays silent beyond the limit is given up.
"""

import asyncio

import msgspec

from headwater.errors import HeadwaterError, ProtocolError, Unavailable, WorkerLost, WorkerSilent
from headwater.protocol import PROTOCOL_VERSION
from headwater.protocol.frames import (
    SINCE,
    ArtifactChunk,
    BlocksReady,
    FrontendFrame,
    Hello,
    Ping,
    PrefillWaits,
    Refused,
    StepFrame,
    Welcome,
    WorkerFrame,
)
from headwater.runtime.requests.base import OnBroken, OnWorkerFrame
from headwater.runtime.requests.transport import Dialer, QueueFull
from headwater.runtime.wire import Limits, check_size, explain_incompatible, join_frames, split_batches


class Link:
    """Implements `WorkerLink`."""

    def __init__(self, dialer: Dialer, frontend_id: str, limits: Limits) -> None:
        self._dialer = dialer
        self._frontend_id = frontend_id
        self._limits = limits
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[WorkerFrame])
        self._outbox: list[bytes] = []
        self._on_frame: OnWorkerFrame = _ignore
        self._on_broken: OnBroken = _ignore
        self._welcome: asyncio.Future[str] | None = None
        self._welcomed = False
        self._peer_version = PROTOCOL_VERSION
        self._connected = False
        """`connect` has returned: from now on a break is told to `on_broken`."""
        self._ended = False
        """Closed or broken."""
        self._error: HeadwaterError | None = None
        self._heard = False
        self._said = False
        self._silent_s = 0.0
        self._tick_handle: asyncio.TimerHandle | None = None

    async def connect(self, on_frame: OnWorkerFrame, on_broken: OnBroken, timeout_s: float) -> str:
        if self._welcome is not None:
            raise ProtocolError("a link is connected once; make a new one")
        self._loop = asyncio.get_running_loop()
        self._welcome = self._loop.create_future()
        self._on_frame, self._on_broken = on_frame, on_broken
        self._dialer.open(self._on_message, self._on_lost)
        self._enqueue(Hello(self._frontend_id, PROTOCOL_VERSION))
        try:
            worker_id = await asyncio.wait_for(self._welcome, timeout_s)
        except TimeoutError:
            self._end()
            raise WorkerLost(f"{self._dialer.address} did not answer within {timeout_s:g} s") from None
        except BaseException:
            self._end()
            raise
        if self._error is not None:
            raise self._error
        self._connected = True
        self._tick_handle = self._loop.call_later(self._limits.heartbeat_s, self._tick)
        return worker_id

    def send(self, frame: FrontendFrame) -> None:
        since = SINCE.get(type(frame))
        if since is not None and self._peer_version < since:
            theirs, needed = (f"{major}.{minor}" for major, minor in (self._peer_version, since))
            what = type(frame).__name__.lower()
            raise Unavailable(f"the worker speaks protocol {theirs} and is not understood to {what}, which is {needed}")
        if self._welcomed and not self._ended:
            self._enqueue(frame)

    async def close(self) -> None:
        if not self._ended and self._outbox:
            self._flush()
        self._end()

    def _enqueue(self, frame: FrontendFrame) -> None:
        self._outbox.append(check_size(self._encoder.encode(frame)))
        if len(self._outbox) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._ended or not self._outbox:
            return
        frames, self._outbox = self._outbox, []
        self._said = True
        try:
            for batch in split_batches(frames):
                self._dialer.transmit(join_frames(batch))
        except QueueFull:
            self._break(
                WorkerLost(f"{self._dialer.address} does not read: {self._limits.queue_messages} messages wait")
            )

    def _on_message(self, message: bytes) -> None:
        self._heard = True
        try:
            frames = self._decoder.decode(message)
        except msgspec.DecodeError as error:
            self._break(ProtocolError(f"{self._dialer.address} sent a message that cannot be understood: {error}"))
            return
        for frame in frames:
            if self._ended:
                return
            if isinstance(frame, StepFrame | ArtifactChunk | BlocksReady | PrefillWaits) and self._welcomed:
                self._on_frame(frame)
            else:
                self._on_control(frame)

    def _on_control(self, frame: WorkerFrame) -> None:
        match frame:
            case Refused(error) if error.code == WorkerLost.code:
                self._break(WorkerSilent(f"{self._dialer.address}: {error.message}"))
            case Refused(error):
                self._break(ProtocolError(f"{self._dialer.address} refused: {error.message}"))
            case Welcome(worker_id, version) if not self._welcomed and self._welcome is not None:
                reason = explain_incompatible(version)
                if reason is not None:
                    self._break(ProtocolError(f"{self._dialer.address}: {reason}"))
                elif not self._welcome.done():
                    self._welcomed = True
                    self._peer_version = version
                    self._welcome.set_result(worker_id)
            case _ if not self._welcomed:
                self._break(ProtocolError(f"{self._dialer.address} began without a welcome"))

    def _on_lost(self, reason: str) -> None:
        """A process that dies breaks its connections at once; one that is cut off or frozen has been silent before."""
        silent = self._silent_s + 2 * self._limits.heartbeat_s >= self._limits.silence_s
        self._break((WorkerSilent if silent else WorkerLost)(f"{self._dialer.address}: {reason}"))

    def _tick(self) -> None:
        self._silent_s = 0.0 if self._heard else self._silent_s + self._limits.heartbeat_s
        if self._silent_s >= self._limits.patience_s:
            self._break(WorkerSilent(f"{self._dialer.address} has been silent for {self._silent_s:g} s"))
            return
        if not self._heard or not self._said:
            self._enqueue(Ping(round(self._silent_s * 1000)))
        self._heard = self._said = False
        self._tick_handle = self._loop.call_later(self._limits.heartbeat_s, self._tick)

    def _break(self, error: HeadwaterError) -> None:
        """Report once: to who waits for the welcome, or to who uses the link."""
        if self._ended:
            return
        self._end()
        self._error = error
        if self._connected:
            self._on_broken(error)
        elif self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            if self._tick_handle is not None:
                self._tick_handle.cancel()
            self._dialer.close()


def _ignore(_: object) -> None:
    """Before `connect`."""
