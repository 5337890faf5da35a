"""Blocking sockets that gather from and scatter into many places in one call."""

import contextlib
import select
import socket
import struct

from headwater.errors import PeerLost
from headwater.transfer.outcome import Stop
from headwater.transfer.sealing import StreamSocket
from headwater.transfer.wire import length_of

_LOOK_S = 0.2
"""How long a blocked call may overlook that its transfer was stopped."""
_MAX_VECTORS = 1024
_SOCKET_BUFFER_BYTES = 4 << 20


def tune(sock: StreamSocket) -> None:
    """For bulk data in bounded waits."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def look_often(sock: StreamSocket) -> None:
    """Wake calls that wait, so that they can see whether they should go on."""
    sock.settimeout(None)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, int(_LOOK_S * 1e6)))


def send_all(sock: StreamSocket, views: list[memoryview], stop: Stop | None) -> None:
    """Send all bytes, whatever it takes; `stop` ends the wait. Raises `PeerLost`."""
    at = 0
    while at < len(views):
        if stop is not None:
            stop.check()
        batch = views[at : at + _MAX_VECTORS]
        try:
            sent = sock.sendmsg(batch)
        except BlockingIOError:
            continue
        except OSError as error:
            raise PeerLost(f"the stream broke while sending: {error.strerror}") from None
        at = _advance(views, at, sent)


def receive_all(sock: StreamSocket, views: list[memoryview], stop: Stop | None) -> None:
    """Fill all views. `views` is used up."""
    at = 0
    while at < len(views):
        if stop is not None:
            stop.check()
        try:
            got = sock.recvmsg_into(views[at : at + _MAX_VECTORS], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            continue
        except OSError as error:
            raise PeerLost(f"the stream broke while receiving: {error.strerror}") from None
        if not got:
            raise PeerLost("the stream ended early")
        at = _advance(views, at, got)


def receive_frame(sock: StreamSocket, stop: Stop | None, most: int) -> bytes:
    """The body of one frame. Raises `ProtocolError` for a length beyond `most`."""
    header = bytearray(4)
    receive_all(sock, [memoryview(header)], stop)
    body = bytearray(length_of(header, most))
    receive_all(sock, [memoryview(body)], stop)
    return bytes(body)


def is_idle(sock: StreamSocket) -> bool:
    """Whether a stream between two requests is still up: nothing came and nothing ended it."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)


def shut(sock: StreamSocket) -> None:
    """End a stream from another thread: whoever waits on it wakes."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def connect(address: str | tuple[str, int], stop: Stop, most_s: float) -> socket.socket:
    """A connected socket: `str` is the name of an abstract Unix socket. Raises `PeerLost`."""
    stop.check()
    timeout_s = min(most_s, stop.remaining_s)
    try:
        return (
            _connect_unix(address, timeout_s)
            if isinstance(address, str)
            else socket.create_connection(address, timeout_s)
        )
    except OSError as error:
        raise PeerLost(f"cannot reach {_shown(address)}: {error.strerror or error}") from None


def _connect_unix(name: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(f"\0{name}")
    except BaseException:
        sock.close()
        raise
    return sock


def _shown(address: str | tuple[str, int]) -> str:
    return "its Unix socket" if isinstance(address, str) else f"{address[0]}:{address[1]}"


def _advance(views: list[memoryview], at: int, moved: int) -> int:
    """Where to go on; a view that was moved in part is cut."""
    while at < len(views) and moved >= len(views[at]):
        moved -= len(views[at])
        at += 1
    if moved:
        views[at] = views[at][moved:]
    return at
