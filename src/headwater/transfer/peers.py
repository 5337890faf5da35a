"""What an agent knows of its peers, and how it reaches them: dialling, choosing a back-end, noticing new lives."""

import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.errors import LinkUnavailable, PeerLost, StaleGeneration, TransferError, TransferRefused
from headwater.transfer.base import Backend, Link, RemoteRegion
from headwater.transfer.card import AgentCard, RegionKind, decode_card
from headwater.transfer.connection import Connection
from headwater.transfer.greeting import Greeted, Identity, Outdated, greet
from headwater.transfer.outcome import Stop, held
from headwater.transfer.sealing import StreamSocket
from headwater.transfer.sessions import Outbound
from headwater.transfer.streams import connect, tune
from headwater.transfer.wire import Purpose, Welcome

_CONNECT_S = 3.0


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Which back-end serves a pair of region kinds with a peer, and why."""

    peer: str
    generation: int
    local: RegionKind
    remote: RegionKind
    backend: str
    reason: str


class Session:
    """An outbound session with what back-ends need to know of it, its links and the regions they reached."""

    def __init__(self, dialler: "Dialler", outbound: Outbound, sock: socket.socket, welcome: Welcome) -> None:
        self.outbound = outbound
        self.same_host = sock.family == socket.AF_UNIX
        self.peer_pid = _peer_pid(sock) if self.same_host else 0
        self.landmark = (welcome.landmark_address, welcome.landmark)
        self._asking = threading.Lock()
        """Held while the peer is waited for; never by the reactor."""
        self._closed = False
        self.links: dict[str, Link] = {}
        self.refusals: dict[str, str] = {}
        """Why a back-end does not work with this peer."""
        self.reports: dict[tuple[RegionKind, RegionKind], LinkReport] = {}
        self._remotes: dict[tuple[str, int], RemoteRegion] = {}
        self._kinds: dict[int, RegionKind] = {}
        self._dialler = dialler

    @property
    def peer(self) -> AgentCard:
        return self.outbound.peer

    def dial_data(self, stop: Stop) -> StreamSocket:
        _, greeted = self._dialler.dial((self.peer.host, self.peer.port), self.peer, "data", stop)
        return greeted.stream

    def remote(self, backend: Backend, link: Link, region: int, stop: Stop) -> RemoteRegion:
        """A region of the peer as a back-end reaches it; asked for once."""
        with held(self._asking, stop):
            known = self._remotes.get((backend.name, region))
            if known is not None and not known.hold.revoked:
                return known
            remote = self.outbound.attach(region, backend.name, b"", stop)
            with remote.hold:
                link.attach(remote)
            self._remotes[backend.name, region] = remote
            return remote

    def link(self, backends: list[Backend], kinds: tuple[RegionKind, RegionKind], stop: Stop) -> tuple[Backend, Link]:
        """The best back-end that works. Raises `LinkUnavailable` with all the reasons."""
        skipped: list[str] = []
        for backend in backends:
            if not backend.serves(*kinds):
                continue
            why = self.refusals.get(backend.name) or self._try(backend, stop)
            if not why:
                reason = "; ".join(["the best that works", *skipped])
                self.reports[kinds] = LinkReport(self.peer.name, self.peer.generation, *kinds, backend.name, reason)
                return backend, self.links[backend.name]
            skipped.append(f"not {backend.name}: {why}")
        why = "; ".join(skipped or [f"{backend.name} cannot, on this host" for backend in backends] or ["no back-end"])
        raise LinkUnavailable(f"nothing moves {kinds[0]} <-> {kinds[1]} of {self.peer.name}: {why}")

    def kind(self, region: int, stop: Stop) -> RegionKind:
        """What a region of the peer is: from its card, else by asking."""
        for card in self.peer.regions:
            if card.id == region:
                return card.kind
        with held(self._asking, stop):
            if region not in self._kinds:
                self._kinds[region] = self.outbound.inspect(region, stop).kind
            return self._kinds[region]

    def refuse(self, backend: str, why: str) -> None:
        """It turned out not to work: the next one is taken from now on."""
        self.refusals[backend] = why
        link = self.links.pop(backend, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        """From any thread; does not wait."""
        self._closed = True
        for link in list(self.links.values()):
            link.close()

    def _try(self, backend: Backend, stop: Stop) -> str:
        with held(self._asking, stop):
            if backend.name in self.links or backend.name in self.refusals:
                return self.refusals.get(backend.name, "")
            why = backend.unavailable()
            if not why and backend.name not in self.peer.backends:
                why = "the peer does not offer it"
            if not why:
                try:
                    self.links[backend.name] = backend.connect(self, stop)
                except LinkUnavailable as error:
                    why = error.message
            if why:
                self.refusals[backend.name] = why
            elif self._closed:
                self.links[backend.name].close()
            return why


class Dialler:
    """Makes authenticated sockets."""

    def __init__(self, me: Identity, key: bytes | None) -> None:
        self._me = me
        self._key = key

    def dial(
        self, address: str | tuple[str, int], peer: AgentCard, purpose: Purpose, stop: Stop
    ) -> tuple[socket.socket, Greeted]:
        sock = connect(address, stop, _CONNECT_S)
        try:
            if purpose == "data":
                tune(sock)
            greeted = greet(sock, self._me, peer, self._key or peer.token, purpose, stop)
        except BaseException:
            sock.close()
            raise
        return sock, greeted


@dataclass(slots=True)
class _Peer:
    card: AgentCard
    session: Session | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


Start = Callable[[socket.socket, Greeted, Outbound], Connection]
Lookup = Callable[[str], bytes | None]


class Peers:
    """By name. A card replaces the former one; a new generation ends what the old one had."""

    def __init__(self, dialler: Dialler, boot_id: str, start: Start, lookup: Lookup | None) -> None:
        self._dialler = dialler
        self._boot_id = boot_id
        self._start = start
        self._lookup = lookup
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def add(self, card: AgentCard, *, heard: bool = False) -> None:
        """`heard`: the peer itself said so, and must not be older than what is known."""
        with self._lock:
            known = self._peers.get(card.name)
            if heard and known is not None and known.card.generation > card.generation:
                raise StaleGeneration(f"a later life of {card.name} is known here")
            if known is not None and known.card.generation == card.generation:
                known.card = card
                return
            self._peers[card.name] = _Peer(card)
        if known is not None:
            self._end(known, StaleGeneration(f"{card.name} lives anew"))

    def remove(self, name: str) -> None:
        with self._lock:
            known = self._peers.pop(name, None)
        if known is not None:
            self._end(known, PeerLost(f"{name} was forgotten"))

    def card(self, name: str) -> AgentCard:
        return self._find(name).card

    def generation(self, name: str) -> int | None:
        known = self._peers.get(name)
        return None if known is None else known.card.generation

    def lost(self, outbound: Outbound) -> None:
        """A session broke; the next use makes a new one."""
        known = self._peers.get(outbound.peer.name)
        if known is not None and known.session is not None and known.session.outbound is outbound:
            session, known.session = known.session, None
            session.close()

    def session(self, name: str, generation: int, stop: Stop) -> Session:
        """A live session with that very life of the peer. Raises `StaleGeneration`, and then knows the new life."""
        known = self._find(name)
        if known.card.generation != generation:
            self._renew(name)
            known = self._find(name)
        if known.card.generation != generation:
            raise StaleGeneration(f"the descriptor is of a life of {name} that is not the present one")
        with held(known.lock, stop):
            session = known.session  # the reactor may take it away meanwhile
            if session is None or not session.outbound.is_up():
                session = known.session = self._open(known.card, stop)
            return session

    def reports(self) -> list[LinkReport]:
        sessions = [known.session for known in list(self._peers.values()) if known.session is not None]
        return [report for session in sessions for report in list(session.reports.values())]

    def close(self) -> None:
        for name in list(self._peers):
            self.remove(name)

    def _find(self, name: str) -> _Peer:
        known = self._peers.get(name)
        if known is None:
            self._renew(name)
            known = self._peers.get(name)
        if known is None:
            raise PeerLost(f"no agent {name!r} is known here: add its card")
        return known

    def _renew(self, name: str) -> None:
        data = self._lookup(name) if self._lookup is not None else None
        if data is not None:
            card = decode_card(data)
            if card.name != name:
                raise TransferRefused(f"the card looked up for {name} is of {card.name}")
            self.add(card)

    def _open(self, card: AgentCard, stop: Stop) -> Session:
        try:
            sock, greeted = self._dial(card, stop)
        except Outdated as error:
            self.add(decode_card(error.card))
            raise StaleGeneration(error.message) from None
        except (StaleGeneration, PeerLost):
            self._renew(card.name)
            if self.generation(card.name) != card.generation:
                raise StaleGeneration(f"{card.name} lives anew: descriptors of its former life are void") from None
            raise
        outbound = Outbound(card, lambda lost, _: self.lost(lost))
        session = Session(self._dialler, outbound, sock, greeted.welcome)
        outbound.connection = self._start(sock, greeted, outbound)
        return session

    def _dial(self, card: AgentCard, stop: Stop) -> tuple[socket.socket, Greeted]:
        """Over the Unix socket if it can be reached, else over TCP."""
        if card.unix and card.boot_id == self._boot_id:
            try:
                return self._dialler.dial(card.unix, card, "control", stop)
            except PeerLost:
                if not card.host:
                    raise
        if not card.host:
            raise PeerLost(f"{card.name} is on another host and listens on no TCP address")
        return self._dialler.dial((card.host, card.port), card, "control", stop)

    def _end(self, known: _Peer, error: TransferError) -> None:
        session, known.session = known.session, None
        if session is not None:
            session.outbound.end(error)
            session.close()


def _peer_pid(sock: socket.socket) -> int:
    """Of the process that listens, as seen from here; 0 if it is in a namespace out of sight."""
    size = struct.calcsize("3i")
    pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]
    return pid


def new_token() -> bytes:
    return secrets.token_bytes(32)
