"""The handshake: both ends prove the secret, name themselves and their lives, and refuse those of the past.

    connects                         accepts
    Hello(names, nonce)        ->
                               <-    Challenge(its life, nonce, proof)
    Answer(proof, own card)    ->
                               <-    Welcome | Refused(with the present card)

Until the answer is proved the accepting side holds a few kilobytes and no thread for whoever calls, and tells nothing
but its generation. If both encrypt, all from the answer on is sealed (`headwater.transfer.sealing`).
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headwater.errors import PeerLost, ProtocolError, StaleGeneration, TransferError, TransferRefused
from headwater.transfer.auth import new_nonce, proof, proves
from headwater.transfer.card import MAX_CARD_BYTES, AgentCard, decode_card
from headwater.transfer.connection import Connection
from headwater.transfer.outcome import Stop
from headwater.transfer.sealing import Exchange, Opener, SealedSocket, Sealer, StreamSocket
from headwater.transfer.streams import receive_frame, send_all
from headwater.transfer.wire import (
    GREETINGS,
    MAX_GREETING_BYTES,
    WIRE_VERSION,
    Answer,
    Challenge,
    Greeting,
    Hello,
    Purpose,
    Refused,
    Welcome,
    error_of,
    frame,
    refusal,
)


class Outdated(StaleGeneration):
    """The peer lives anew and sent its present card."""

    def __init__(self, message: str, card: bytes) -> None:
        super().__init__(message)
        self.card = card


@dataclass(frozen=True, slots=True)
class Identity:
    """This side. `card` is asked for when needed, since regions come and go."""

    name: str
    generation: int
    secret: bytes
    card: Callable[[], bytes]
    encrypts: bool = False
    """What goes over TCP."""

    def seals(self, family: int) -> bool:
        return self.encrypts and family != socket.AF_UNIX


@dataclass(frozen=True, slots=True)
class Greeted:
    """The socket is to be used from now on in place of the bare one."""

    stream: StreamSocket
    sealing: tuple[Sealer, Opener] | None
    welcome: Welcome


def greet(sock: socket.socket, me: Identity, peer: AgentCard, secret: bytes, purpose: Purpose, stop: Stop) -> Greeted:
    """Blocking, on the side that connects. Raises `Outdated`, `StaleGeneration`, `TransferRefused` or `PeerLost`."""
    exchange = Exchange() if me.seals(sock.family) else None
    nonce = new_nonce() if exchange is None else exchange.public
    sealed = exchange is not None
    hello = Hello(WIRE_VERSION, me.name, me.generation, peer.name, peer.generation, purpose, nonce, sealed)
    challenge = _ask(sock, hello, stop)
    if not isinstance(challenge, Challenge):
        raise _unexpected(challenge)
    said = _said(hello, challenge)
    if not proves(challenge.proof, secret, "accepts", *said):
        if challenge.generation != peer.generation:
            raise StaleGeneration(f"{peer.name} lives anew and its card is needed again")
        raise TransferRefused(f"{peer.name} does not prove the key: is it the same on both sides?")
    sealing: tuple[Sealer, Opener] | None = None
    stream: StreamSocket = sock
    if exchange is not None:
        keys = exchange.keys(challenge.nonce, secret, *said)
        sealing = Sealer(keys.connects), Opener(keys.accepts)
        stream = SealedSocket(sock, *sealing)
    welcome = _ask(stream, Answer(proof(secret, "connects", *said), me.card()), stop)
    if not isinstance(welcome, Welcome):
        raise _unexpected(welcome)
    return Greeted(stream, sealing, welcome)


def _ask(sock: StreamSocket, message: Greeting, stop: Stop) -> Greeting:
    try:
        send_all(sock, [memoryview(frame(message))], stop)
        return GREETINGS.decode(receive_frame(sock, stop, MAX_GREETING_BYTES + MAX_CARD_BYTES))
    except (msgspec.MsgspecError, ProtocolError) as error:
        raise PeerLost(f"what answers is no transfer agent: {error}") from None


def _unexpected(answer: Greeting) -> TransferError:
    if not isinstance(answer, Refused):
        return PeerLost(f"the peer broke the protocol: {type(answer).__name__} out of turn")
    if answer.card:
        return Outdated(answer.message, answer.card)
    return error_of(answer)


def _said(hello: Hello, challenge: Challenge) -> tuple[bytes, ...]:
    return (
        msgspec.msgpack.encode(hello),
        challenge.nonce,
        challenge.generation.to_bytes(8, "little", signed=True),
    )


@dataclass(frozen=True, slots=True)
class Guest:
    """Who connected, proved."""

    card: AgentCard
    purpose: Purpose


class Doorman:
    """The accepting side of one connection. `admit` may raise; what it raises is what the guest is told."""

    def __init__(
        self,
        me: Identity,
        welcome: Welcome,
        admit: Callable[[Guest], None],
        entered: Callable[[Connection, Guest], None],
    ) -> None:
        self._me = me
        self._welcome = welcome
        self._admit = admit
        self._entered = entered
        self._hello: Hello | None = None
        self._challenge: Challenge | None = None

    def on_frame(self, connection: Connection, body: bytes) -> None:
        try:
            message = GREETINGS.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"no greeting: {error}") from None
        try:
            self._next(connection, message)
        except TransferError as error:
            card = error.card if isinstance(error, Outdated) else b""
            connection.send(msgspec.structs.replace(refusal(error), card=card))
            connection.close()

    def on_broken(self, connection: Connection, error: TransferError) -> None:
        """Nobody has entered."""

    def _next(self, connection: Connection, message: Greeting) -> None:
        if isinstance(message, Hello) and self._hello is None:
            self._greeted(connection, message)
        elif isinstance(message, Answer) and self._hello is not None and self._challenge is not None:
            self._answered(connection, message, self._hello, self._challenge)
        else:
            raise ProtocolError(f"{type(message).__name__} out of turn")

    def _greeted(self, connection: Connection, hello: Hello) -> None:
        if hello.version != WIRE_VERSION:
            raise TransferRefused(f"version {hello.version} is not spoken here, {WIRE_VERSION} is")
        seals = self._me.seals(connection.family)
        if hello.sealed != seals:
            us, them = ("encrypts", "does not") if seals else ("does not encrypt", "does")
            raise TransferRefused(f"{self._me.name} {us}, {hello.agent} {them}: set `encrypt` alike on both")
        if hello.target != self._me.name:
            raise TransferRefused(f"no agent {hello.target!r} lives here")
        self._hello = hello
        exchange = Exchange() if seals else None
        bare = Challenge(self._me.generation, new_nonce() if exchange is None else exchange.public, b"")
        said = _said(hello, bare)
        self._challenge = msgspec.structs.replace(bare, proof=proof(self._me.secret, "accepts", *said))
        connection.send(self._challenge)
        if exchange is not None:
            keys = exchange.keys(hello.nonce, self._me.secret, *said)
            connection.seal(Sealer(keys.accepts), Opener(keys.connects))
        connection.max_frame_bytes = MAX_GREETING_BYTES + MAX_CARD_BYTES

    def _answered(self, connection: Connection, answer: Answer, hello: Hello, challenge: Challenge) -> None:
        if not proves(answer.proof, self._me.secret, "connects", *_said(hello, challenge)):
            raise TransferRefused("the key is wrong")
        card = decode_card(answer.card)
        if (card.name, card.generation) != (hello.agent, hello.generation):
            raise TransferRefused("the card belongs to someone else")
        if hello.target_generation != self._me.generation:
            raise Outdated(f"{self._me.name} lives anew: descriptors of its former life are void", self._me.card())
        guest = Guest(card, hello.purpose)
        self._admit(guest)
        connection.send(self._welcome)
        self._entered(connection, guest)
