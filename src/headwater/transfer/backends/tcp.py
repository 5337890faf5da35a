"""Scatter-gather over TCP streams: works everywhere, needs nothing. Each stream is authenticated like a session.

The side that begins sends `Fetch` or `Store` with packed spans; the owner's thread gathers from or scatters into its
memory with one system call per thousand blocks. The owner checks every span against its region; a refused `Store` is
read to its end and thrown away, so that the stream stays in step.
"""

import threading
from array import array
from operator import add
from sys import byteorder
from typing import NamedTuple

import msgspec

from headwater.errors import LinkUnavailable, PeerLost, ProtocolError, TransferError, TransferRefused
from headwater.transfer.base import Grant, PeerSession, RemoteRegion
from headwater.transfer.blocks import MAX_CHUNK_BYTES, Chunk, joined
from headwater.transfer.card import RegionKind
from headwater.transfer.outcome import Stop
from headwater.transfer.regions import Region, RegionTable
from headwater.transfer.sealing import StreamSocket
from headwater.transfer.streams import is_idle, look_often, receive_all, receive_frame, send_all, shut
from headwater.transfer.wire import DATAS, MAX_FRAME_BYTES, Fetch, Ready, Refused, Store, error_of, frame, refusal

_LANES = 2
_WAIT_S = 0.2
_CPU_KINDS: tuple[RegionKind, ...] = ("shared", "memory")


class TcpBackend:
    """See the module docstring."""

    name = "tcp"

    def unavailable(self) -> str:
        return ""

    def serves(self, local: RegionKind, remote: RegionKind) -> bool:
        return local in _CPU_KINDS and remote in _CPU_KINDS

    def connect(self, session: PeerSession, stop: Stop) -> "StreamLink":
        if not session.peer.host:
            raise LinkUnavailable(f"{session.peer.name} listens on no TCP address")
        link = StreamLink(session)
        link.give_back(link.take(stop))
        return link

    def grant(self, region: Region, offer: bytes) -> Grant:
        return Grant()

    def forget(self, region: Region) -> None:
        """Nothing is kept per region."""

    def close(self) -> None:
        """Streams belong to links."""


class _Step(NamedTuple):
    request: memoryview
    views: list[memoryview]
    expected: bytes
    """The reply, if all is well."""
    write: bool
    region: Region
    remote: RemoteRegion


class StreamLink:
    """A few streams to one peer, made when needed."""

    lanes = _LANES

    def __init__(self, session: PeerSession) -> None:
        self._session = session
        self._free = threading.Condition()
        self._idle: list[StreamSocket] = []
        self._open: set[StreamSocket] = set()
        self._dialling = 0
        self._closed = False

    def attach(self, remote: RemoteRegion) -> None:
        """Requests name the region; nothing to do."""

    def prepare(self, region: Region, remote: RemoteRegion, chunk: Chunk, *, write: bool) -> _Step:
        spans = _pack_spans(*joined(chunk.remote, chunk.lengths))
        view = region.view
        views = [view[at : at + size] for at, size in zip(*joined(chunk.local, chunk.lengths), strict=True)]
        message = Store(remote.card.id, spans, chunk.num_bytes) if write else Fetch(remote.card.id, spans)
        expected = frame(Ready(chunk.num_bytes))
        return _Step(memoryview(frame(message)), views, expected, write, region, remote)

    def move(self, step: _Step, stop: Stop) -> None:
        stream = self.take(stop)
        try:
            with step.region.hold, step.remote.hold:
                refused = _exchange(stream, step, stop)
        except BaseException:
            # Bytes are under way in one direction or the other: the stream is of no more use.
            self._drop(stream)
            raise
        self.give_back(stream)
        if refused is not None:
            raise error_of(refused)

    def take(self, stop: Stop) -> StreamSocket:
        """A stream that is up and idle; waits until one is, or dials."""
        while True:
            with self._free:
                stop.check()
                if self._closed:
                    raise PeerLost("the link was closed")
                if self._idle:
                    stream = self._idle.pop()
                elif len(self._open) + self._dialling < _LANES:
                    self._dialling += 1
                    break
                else:
                    self._free.wait(min(_WAIT_S, stop.remaining_s))
                    continue
            if is_idle(stream):
                return stream
            self._drop(stream)
        return self._dial(stop)

    def give_back(self, stream: StreamSocket) -> None:
        with self._free:
            self._idle.append(stream)
            self._free.notify()
        if self._closed:
            self.close()

    def close(self) -> None:
        with self._free:
            self._closed = True
            idle, self._idle = self._idle, []
            for stream in self._open:
                shut(stream)
            self._free.notify_all()
        for stream in idle:
            self._drop(stream)

    def _dial(self, stop: Stop) -> StreamSocket:
        try:
            stream = self._session.dial_data(stop)
            look_often(stream)
        except BaseException:
            with self._free:
                self._dialling -= 1
                self._free.notify()
            raise
        with self._free:
            self._dialling -= 1
            self._open.add(stream)
        if self._closed:
            shut(stream)
        return stream  # type: ignore[no-any-return]

    def _drop(self, stream: StreamSocket) -> None:
        with self._free:
            self._open.discard(stream)
            self._free.notify()
        stream.close()


def _exchange(stream: StreamSocket, step: _Step, stop: Stop) -> Refused | None:
    """One request. A refusal leaves the stream usable."""
    send_all(stream, [step.request, *step.views] if step.write else [step.request], stop)
    # A refusal is never shorter than the reply that is expected, so this read cannot wait for what never comes.
    head = bytearray(len(step.expected))
    receive_all(stream, [memoryview(head)], stop)
    if head != step.expected:
        return _refusal_in(stream, bytes(head), stop)
    if not step.write:
        receive_all(stream, list(step.views), stop)
    return None


def _refusal_in(stream: StreamSocket, head: bytes, stop: Stop) -> Refused:
    length = int.from_bytes(head[:4], "little")
    if not len(head) - 4 <= length <= MAX_FRAME_BYTES:
        raise PeerLost("the peer broke the protocol: neither a refusal nor what was asked for")
    body = bytearray(length)
    body[: len(head) - 4] = head[4:]
    receive_all(stream, [memoryview(body)[len(head) - 4 :]], stop)
    try:
        message = DATAS.decode(body)
    except msgspec.MsgspecError as error:
        raise PeerLost(f"the peer broke the protocol: {error}") from None
    if not isinstance(message, Refused):
        raise PeerLost(f"the peer broke the protocol: {type(message).__name__} in place of what was asked for")
    return message


class StreamServer:
    """One accepted stream, served by the thread that calls `serve`."""

    def __init__(self, stream: StreamSocket, peer: tuple[str, int], regions: RegionTable) -> None:
        self.peer = peer
        self.serving: int | None = None
        """The region being moved."""
        self._stream = stream
        self._regions = regions

    def serve(self) -> None:
        """Until the stream ends or is shut. Never raises."""
        self._stream.setblocking(True)
        try:
            while True:
                self._answer(DATAS.decode(receive_frame(self._stream, None, MAX_FRAME_BYTES)))
        except (TransferError, ProtocolError, msgspec.MsgspecError):
            return
        finally:
            self._stream.close()

    def shut(self) -> None:
        """From any thread."""
        shut(self._stream)

    def _answer(self, request: Fetch | Store | Ready | Refused) -> None:
        if not isinstance(request, Fetch | Store):
            raise ProtocolError(f"{type(request).__name__} from the side that asks")
        left = request.num_bytes if isinstance(request, Store) else 0
        try:
            region = self._regions.find(request.region)
            views, num_bytes = _checked(region, request)
            self.serving = request.region
            with region.hold:
                if isinstance(request, Fetch):
                    send_all(self._stream, [memoryview(frame(Ready(num_bytes))), *views], None)
                    return
                receive_all(self._stream, views, None)
                left = 0
        except PeerLost:
            raise
        except TransferError as error:
            self._discard(left)
            send_all(self._stream, [memoryview(frame(refusal(error)))], None)
            return
        finally:
            self.serving = None
        send_all(self._stream, [memoryview(frame(Ready(num_bytes)))], None)

    def _discard(self, num_bytes: int) -> None:
        waste = memoryview(bytearray(min(num_bytes, 1 << 16)))
        while num_bytes:
            part = min(num_bytes, len(waste))
            receive_all(self._stream, [waste[:part]], None)
            num_bytes -= part


def _checked(region: Region, request: Fetch | Store) -> tuple[list[memoryview], int]:
    """What a peer asks for, as memory, if it may have it."""
    write = isinstance(request, Store)
    if region.card.access == ("read" if write else "write"):
        raise TransferRefused(f"region {region.card.id} may not be {'written' if write else 'read'} by peers")
    if len(request.spans) % 16:
        raise TransferRefused("spans come in pairs of offset and length")
    numbers = _swapped(array("Q", request.spans))
    offsets, lengths = numbers[::2], numbers[1::2]
    num_bytes = sum(lengths)
    if not all(lengths) or max(map(add, offsets, lengths)) > region.card.num_bytes:
        raise TransferRefused(f"spans beyond the {region.card.num_bytes} bytes of region {region.card.id}")
    if num_bytes > MAX_CHUNK_BYTES or (isinstance(request, Store) and num_bytes != request.num_bytes):
        raise TransferRefused(f"spans of {num_bytes} bytes in one request: at most {MAX_CHUNK_BYTES}, and as announced")
    view = region.view
    return [view[at : at + size] for at, size in zip(offsets, lengths, strict=True)], num_bytes


def _pack_spans(offsets: list[int], lengths: list[int]) -> bytes:
    numbers = array("Q", bytes(16 * len(offsets)))
    numbers[::2], numbers[1::2] = array("Q", offsets), array("Q", lengths)
    return _swapped(numbers).tobytes()


def _swapped(numbers: "array[int]") -> "array[int]":
    if byteorder == "big":
        numbers.byteswap()
    return numbers
