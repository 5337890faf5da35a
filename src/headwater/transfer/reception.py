"""Where peers come in: listening sockets, the handshake, sessions, data streams and their heartbeats."""

import contextlib
import secrets
import socket
import threading
from typing import Protocol

from headwater.errors import ConfigError, PeerLost, TransferError, TransferRefused, TransferTimeout
from headwater.transfer.backends.tcp import StreamServer
from headwater.transfer.card import AgentCard
from headwater.transfer.connection import Connection
from headwater.transfer.greeting import Doorman, Greeted, Guest, Identity
from headwater.transfer.memory import address_of
from headwater.transfer.options import AgentOptions
from headwater.transfer.outcome import Stop
from headwater.transfer.peers import Peers
from headwater.transfer.reactor import READ, Reactor, Timer
from headwater.transfer.regions import Region
from headwater.transfer.sealing import StreamSocket
from headwater.transfer.sessions import Inbound, Outbound, Owner
from headwater.transfer.streams import tune
from headwater.transfer.wire import MAX_FRAME_BYTES, MAX_GREETING_BYTES, Ping, Welcome

_GREETING_S = 3.0
_MAX_GREETING = 128
_BACKLOG = 128
_GRACE_S = 0.3


class Host(Owner, Protocol):
    """The agent, as seen from its door."""

    @property
    def options(self) -> AgentOptions: ...

    @property
    def peers(self) -> Peers: ...

    def lose(self, peer: str, generation: int, error: TransferError) -> None: ...


class Reception:
    """State is the reactor's, but for the streams, which have a lock."""

    def __init__(self, host: Host, me: Identity, reactor: Reactor) -> None:
        self.unix = f"headwater-transfer-{secrets.token_hex(16)}"
        self._host = host
        self._me = me
        self._reactor = reactor
        self._now = reactor.now
        self._listeners = [_listen_unix(self.unix), *_listen_tcp(host.options.host)]
        landmark = memoryview(bytearray(secrets.token_bytes(16)))
        self._landmark = landmark
        self._welcome = Welcome(address_of(landmark), bytes(landmark))
        self._greeting: set[Connection] = set()
        self._live: dict[Connection, Inbound | Outbound] = {}
        self._lock = threading.Lock()
        self._streams: dict[StreamServer, threading.Thread] = {}
        self._beat: Timer | None = None
        self._closed = False

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens for other hosts; ("", 0) if it does not."""
        return self._listeners[1].getsockname()[:2] if len(self._listeners) > 1 else ("", 0)

    def open(self) -> None:
        for listener in self._listeners:
            self._reactor.call(lambda listener=listener: self._watch(listener))  # type: ignore[misc]
        self._reactor.call(self._heartbeat)

    def start(self, sock: socket.socket, greeted: Greeted, outbound: Outbound) -> Connection:
        """Take over an outbound session that was greeted. From any thread."""
        connection = Connection(self._reactor, sock, outbound, now=self._now)
        if greeted.sealing is not None:
            connection.seal(*greeted.sealing)
        connection.takes_descriptors = sock.family == socket.AF_UNIX

        def begin() -> None:
            if not connection.closed:
                self._live[connection] = outbound
                connection.open()

        self._reactor.call(begin)
        return connection

    def take_back(self, region: Region, stop: Stop) -> None:
        """Make all peers let go of a region, streams that serve it included. From any thread."""
        done = threading.Event()
        self._reactor.call(lambda: self._revoke(region, done))
        self._shut_streams_after(_GRACE_S, region)
        if not done.wait(stop.remaining_s):
            self._reactor.call(lambda: self._expel(region))
            raise TransferTimeout(f"a peer did not let go of region {region.card.id}")

    def close(self) -> None:
        """From any thread; waits for the streams' threads."""
        done = threading.Event()
        self._reactor.call(lambda: self._close(done))
        done.wait(_GREETING_S)
        with self._lock:
            streams = dict(self._streams)
        for stream, thread in streams.items():
            stream.shut()
            thread.join(_GREETING_S)

    # Reactor

    def _watch(self, listener: socket.socket) -> None:
        self._reactor.watch(listener, READ, lambda _: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # it went away again, or descriptors ran out: the listener stays
        if len(self._greeting) >= _MAX_GREETING or self._closed:
            sock.close()
            return
        doorman = Doorman(self._me, self._welcome, self._admit, self._enter)
        connection = Connection(self._reactor, sock, doorman, now=self._now)
        connection.max_frame_bytes = MAX_GREETING_BYTES
        self._greeting.add(connection)
        connection.open()
        self._reactor.later(_GREETING_S, lambda: self._impatient(connection))

    def _impatient(self, connection: Connection) -> None:
        """Whoever is still greeting by now is sent away."""
        if connection in self._greeting:
            self._greeting.discard(connection)
            connection.close()

    def _admit(self, guest: Guest) -> None:
        if guest.purpose == "data":
            with self._lock:
                if len(self._streams) >= self._host.options.max_streams:
                    raise TransferRefused(f"{len(self._streams)} data streams are open here, and no more allowed")
        if guest.card.name != self._me.name:
            self._host.peers.add(guest.card, heard=True)

    def _enter(self, connection: Connection, guest: Guest) -> None:
        self._greeting.discard(connection)
        if guest.purpose == "data":
            self._serve(connection.detach(), guest.card)
            return
        self._end_former(guest.card)
        inbound = Inbound(guest.card, self._host, self._lost)
        inbound.connection = connection
        connection.handler = inbound
        connection.max_frame_bytes = MAX_FRAME_BYTES
        connection.takes_descriptors = connection.family == socket.AF_UNIX
        self._live[connection] = inbound

    def _end_former(self, card: AgentCard) -> None:
        """A peer that lives anew, or dials again, has given up its former session."""
        for connection, session in list(self._live.items()):
            if isinstance(session, Inbound) and session.peer.name == card.name:
                connection.break_off(PeerLost(f"{card.name} began a new session"))

    def _serve(self, sock: StreamSocket, card: AgentCard) -> None:
        tune(sock)
        server = StreamServer(sock, (card.name, card.generation), self._host.regions)

        def work() -> None:
            try:
                server.serve()
            finally:
                with self._lock:
                    self._streams.pop(server, None)

        thread = threading.Thread(target=work, name=f"stream-{card.name}", daemon=True)
        with self._lock:
            self._streams[server] = thread
        thread.start()

    def _lost(self, session: Inbound, error: TransferError) -> None:
        peer = (session.peer.name, session.peer.generation)
        self._shut_streams(peer)
        self._host.lose(*peer, PeerLost(f"{peer[0]}: {error.message}"))

    def _heartbeat(self) -> None:
        if self._closed:
            return
        options, now = self._host.options, self._now()
        for connection, session in list(self._live.items()):
            if connection.closed:
                del self._live[connection]
            elif now - connection.last_heard > options.peer_timeout_s:
                silent = f"{session.peer.name} was silent for {options.peer_timeout_s:g} s"
                connection.break_off(PeerLost(silent))
            elif now - connection.last_sent >= options.heartbeat_s:
                connection.send(Ping())
        self._greeting = {connection for connection in self._greeting if not connection.closed}
        self._beat = self._reactor.later(options.heartbeat_s / 2, self._heartbeat)

    def _revoke(self, region: Region, done: threading.Event) -> None:
        holders = [session for session in region.attached if isinstance(session, Inbound)]
        left = len(holders)
        if not left:
            done.set()

        def freed() -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set()

        for session in holders:
            session.revoke(region, freed)

    def _expel(self, region: Region) -> None:
        for session in list(region.attached):
            if isinstance(session, Inbound) and session.connection is not None:
                session.connection.break_off(PeerLost("did not let go of memory that was taken back"))

    def _shut_streams(self, peer: tuple[str, int]) -> None:
        with self._lock:
            for stream in self._streams:
                if stream.peer == peer:
                    stream.shut()

    def _shut_streams_after(self, delay_s: float, region: Region) -> None:
        def shut() -> None:
            with self._lock:
                for stream in self._streams:
                    if stream.serving == region.card.id:
                        stream.shut()

        self._reactor.later(delay_s, shut)

    def _close(self, done: threading.Event) -> None:
        self._closed = True
        for listener in self._listeners:
            self._reactor.unwatch(listener)
            listener.close()
        for connection in self._greeting:
            connection.close()
        for connection, session in list(self._live.items()):
            if isinstance(session, Inbound):
                session.end(PeerLost("this agent was closed"))
            connection.close()
        self._live.clear()
        self._landmark.release()
        done.set()


def _listen_unix(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    return _listening(listener)


def _listen_tcp(host: str | None) -> list[socket.socket]:
    if host is None:
        return []
    listener: socket.socket | None = None
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
    except OSError as error:
        with contextlib.suppress(AttributeError):
            listener.close()  # type: ignore[union-attr]
        raise ConfigError(f"cannot listen on {host}: {error.strerror}") from None
    return [_listening(listener)]


def _listening(listener: socket.socket) -> socket.socket:
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
