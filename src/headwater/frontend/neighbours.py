"""Other frontends of the same cluster on this host: an answer that one of them keeps can be asked for at any.

They share a port, so a client that comes back lands anywhere. Each listens on a Unix socket in a folder closed to other
users; a request for an answer that is not kept here is passed on, with the client's own key, to one after the other
until one has it. What comes over such a socket is never passed on again, and starts nothing: who does not keep the
answer says 421, and who does not know the key 401. Frontends of other hosts are not found this way.
"""

import asyncio
import contextlib
import hashlib
import logging
import socket
from pathlib import Path

import httptools

from headwater.frontend.http.base import HttpRequest, Responder
from headwater.runtime.endpoints import is_settled, remove_dead_sockets
from headwater.runtime.private_folder import ensure_private

logger = logging.getLogger(__name__)

NOT_KEPT = 421
_PREFIX = "frontends-"
_NOT_FROM_THERE = frozenset((NOT_KEPT, 401, 403))
"""Who has not read yet of a key that holds here keeps no answer of it either."""
_CLIENT = b"x-headwater-client"
_ANSWER_WITHIN_S = 5.0
_PIECE_BYTES = 64 * 1024
_MOST = 64
_SLOW_READER_S = 0.02
_BACKLOG = 128
_OURS_TO_SAY = frozenset((b"date", b"x-request-id", b"content-length", b"transfer-encoding", b"connection"))
"""Headers that every hop writes for itself."""
_NOT_PASSED_ON = _OURS_TO_SAY | {b"expect", _CLIENT}


def folder_for(run_folder: Path, registry_url: str) -> Path:
    """Where frontends of a cluster meet."""
    return run_folder / f"{_PREFIX}{hashlib.blake2b(registry_url.encode(), digest_size=4).hexdigest()}"


class Neighbours:
    """`listen`, then `relay` as often as wanted, `close`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._own = folder / f"{name[-24:]}.sock"

    def listen(self) -> socket.socket:
        """A socket for others. Raises `ConfigError` for a folder that is not ours alone, and `OSError`.

        What frontends left when they were killed goes. Folders of other clusters too, for no frontend comes there
        again; to this one others may be coming just now.
        """
        _remove_left_behind(self._folder.parent, self._folder)
        ensure_private(self._folder)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._own))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def close(self) -> None:
        """Idempotent. The last one to leave removes the folder."""
        self._own.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    async def relay(self, request: HttpRequest, responder: Responder) -> bool:
        """Answer with what another one keeps. False: nobody keeps it, and nothing was said."""
        for path in self._others():
            try:
                if await _ask(path, request, responder):
                    return True
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # its process is gone
            except (OSError, TimeoutError) as error:
                logger.warning("the frontend at %s did not answer: %s", path.name, error or type(error).__name__)
        return False

    def _others(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(path for path in self._folder.glob("*.sock") if path != self._own)[:_MOST]
        return []


def _remove_left_behind(run_folder: Path, kept: Path) -> None:
    for folder in run_folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            settled = is_settled(folder.lstat().st_mtime)
            remove_dead_sockets(folder)
            if settled and folder != kept:
                folder.rmdir()


def accept_from_neighbour(request: HttpRequest) -> None:
    """Mark what came over such a socket, and say for whom it is."""
    request.forwarded = True
    request.client = request.headers.get(_CLIENT, b"").decode("latin-1")[:64]


async def _ask(path: Path, request: HttpRequest, responder: Responder) -> bool:
    """Whether it keeps the answer, which is relayed then to its end."""
    async with asyncio.timeout(_ANSWER_WITHIN_S):
        reader, writer = await asyncio.open_unix_connection(str(path))
    relay = _Relay(responder)
    try:
        writer.write(_message(request))
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            while not relay.began and (data := await reader.read(_PIECE_BYTES)):
                relay.feed(data)
        if not relay.began:
            raise ConnectionResetError("it closed the connection")
        if not relay.kept:
            return False
        responder.on_disconnect(writer.transport.abort)
        await _relay_rest(reader, relay, responder)
        return True
    finally:
        writer.close()


async def _relay_rest(reader: asyncio.StreamReader, relay: "_Relay", responder: Responder) -> None:
    with contextlib.suppress(OSError):
        while not relay.complete and (data := await reader.read(_PIECE_BYTES)):
            relay.feed(data)
            while responder.pending_bytes > _PIECE_BYTES:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(_SLOW_READER_S)
    if not relay.complete:
        responder.abort()


def _message(request: HttpRequest) -> bytes:
    """The request again, of which the client's own words matter: its key, the id and the number it gave."""
    target = request.path.encode() + (b"?" + request.query.encode() if request.query else b"")
    kept = [(name, value) for name, value in request.headers.items() if name not in _NOT_PASSED_ON]
    kept.append((b"x-request-id", request.headers.get(b"x-request-id", b"")))
    kept.append((_CLIENT, request.client.encode()))
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), target), *(b"%b: %b" % header for header in kept)]
    lines += [b"content-length: %d" % len(request.body), b"connection: close", b"", b""]
    return b"\r\n".join(lines) + request.body


class _Relay:
    """Parses an answer and gives it to a responder; one that is not kept is only looked at."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._streamed = False
        self._body: list[bytes] = []
        self._status = 0
        self.complete = False

    @property
    def began(self) -> bool:
        return self._status > 0

    @property
    def kept(self) -> bool:
        """Whether it is an answer for the client."""
        return self._status not in _NOT_FROM_THERE

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionResetError(f"its answer is no HTTP: {error}") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"transfer-encoding":
            self._streamed = True
        if name not in _OURS_TO_SAY:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._streamed and self.kept:
            self._responder.start(self._status, tuple(self._headers))

    def on_body(self, data: bytes) -> None:
        if self._streamed and self.kept:
            self._responder.write(data)
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        self.complete = True
        if not self.kept:
            return
        if self._streamed:
            self._responder.finish()
        else:
            self._responder.send(self._status, tuple(self._headers), b"".join(self._body))
