"""What nodes say to each other about the blocks of their host tiers, over TCP: 4 bytes of length, then msgpack.

    asks                            offers
    Hello(nonce)             ->
                             <-     Challenge(nonce, proof)
    Proof(proof, card)       ->
                             <-     Welcome(card)
    Ask(ids)                 ->
                             <-     Have(flags)
    Borrow(family, ids)      ->
                             <-     Lent(ticket, blocks, where they lie)
                                    ... the payloads are read over `headwater.transfer` ...
    GiveBack(ticket)         ->
                             <-     Returned(valid)

Both prove the cluster's key before anything is told. Payloads never pass through here. What does not decode or is too
long ends the connection.
"""

import asyncio
from typing import Annotated

import msgspec

from headwater.errors import ProtocolError, TransferRefused
from headwater.kv.block import Family
from headwater.transfer.auth import new_nonce, proof, proves
from headwater.transfer.blocks import Blocks
from headwater.transfer.card import MAX_CARD_BYTES

VERSION = 2
MAX_IDS = 16_384
MAX_FRAME_BYTES = 2 << 20
_MAX_GREETING_BYTES = MAX_CARD_BYTES + 4096

Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
Ids = Annotated[bytes, msgspec.Meta(max_length=16 * MAX_IDS)]
Card = Annotated[bytes, msgspec.Meta(max_length=MAX_CARD_BYTES)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    version: int
    nonce: Nonce


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=True):
    nonce: Nonce
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=True):
    proof: bytes
    card: Card
    """Of the transfer agent that will read."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    card: Card


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    serial: int
    ids: Ids


class Have(msgspec.Struct, frozen=True, array_like=True, tag=True):
    serial: int
    flags: Annotated[bytes, msgspec.Meta(max_length=MAX_IDS)]
    """One byte per id."""


class Borrow(msgspec.Struct, frozen=True, array_like=True, tag=True):
    serial: int
    family: Family
    ids: Ids


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that one descriptor names, in its order."""

    blocks: Blocks
    numbers: list[int]
    """Which of the borrowed ids these are."""


class LentBlock(msgspec.Struct, frozen=True, array_like=True):
    parent: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    position: Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
    checksum: Annotated[int, msgspec.Meta(ge=0)]


class Lent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    serial: int
    ticket: int
    blocks: list[LentBlock | None]
    """One per id; None: not here (any more), or more than is lent at once."""
    places: list[Place]


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag=True):
    serial: int
    ticket: int
    suspect: list[int]
    """Numbers of ids whose payload did not match: the owner looks for itself."""


class Returned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    serial: int
    valid: bool
    """False: the lease had run out; what was read may be of other blocks."""


Question = Ask | Borrow | GiveBack
Reply = Have | Lent | Returned
Message = Hello | Challenge | Proof | Welcome | Question | Reply

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    body = _encoder.encode(message)
    writer.write(len(body).to_bytes(4, "little") + body)


async def receive(reader: asyncio.StreamReader, most: int = MAX_FRAME_BYTES) -> Message:
    """Raises `ProtocolError` for what is no message, `EOFError` or `OSError` when the connection ends."""
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > most:
        raise ProtocolError(f"a frame of {length} bytes; at most {most} are read")
    body = await reader.readexactly(length)
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not a message between nodes: {error}") from None


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, card: bytes) -> bytes:
    """The side that connects; the other side's card. Raises `TransferRefused`, `ProtocolError`, `OSError`."""
    hello = Hello(VERSION, new_nonce())
    send(writer, hello)
    challenge = await receive(reader, _MAX_GREETING_BYTES)
    if not isinstance(challenge, Challenge):
        raise ProtocolError(f"{type(challenge).__name__} out of turn")
    if not proves(challenge.proof, key, "accepts", hello.nonce, challenge.nonce):
        raise TransferRefused("the other node does not prove the key of this cluster")
    send(writer, Proof(proof(key, "connects", hello.nonce, challenge.nonce), card))
    welcome = await receive(reader, _MAX_GREETING_BYTES)
    if not isinstance(welcome, Welcome):
        raise ProtocolError(f"{type(welcome).__name__} out of turn")
    return welcome.card


async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, card: bytes) -> bytes:
    """The side that accepts."""
    hello = await receive(reader, _MAX_GREETING_BYTES)
    if not isinstance(hello, Hello) or hello.version != VERSION:
        raise ProtocolError("no greeting of this version")
    nonce = new_nonce()
    send(writer, Challenge(nonce, proof(key, "accepts", hello.nonce, nonce)))
    answer = await receive(reader, _MAX_GREETING_BYTES)
    if not isinstance(answer, Proof):
        raise ProtocolError(f"{type(answer).__name__} out of turn")
    if not proves(answer.proof, key, "connects", hello.nonce, nonce):
        raise TransferRefused("the key is wrong")
    send(writer, Welcome(card))
    return answer.card
