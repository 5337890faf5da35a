"""Messages between agents: msgpack behind a length of four bytes. Nothing in them is trusted before it is checked."""

from typing import Annotated, Literal

import msgspec

from headwater import errors
from headwater.errors import ProtocolError, TransferError
from headwater.transfer.blocks import MAX_CHUNK_BYTES, MAX_CHUNK_SPANS, Blocks, Size
from headwater.transfer.card import MAX_CARD_BYTES, RegionCard

WIRE_VERSION = 1
MAX_TAG_BYTES = 256
MAX_NOTICE_BYTES = 64 << 10
MAX_GREETING_BYTES = 4 << 10
MAX_FRAME_BYTES = 2 * MAX_CARD_BYTES + 8 * (1 << 17)

Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
Tag = Annotated[bytes, msgspec.Meta(max_length=MAX_TAG_BYTES)]
Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_NOTICE_BYTES)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Purpose = Literal["control", "data"]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    agent: Annotated[str, msgspec.Meta(max_length=128)]
    generation: int
    target: Annotated[str, msgspec.Meta(max_length=128)]
    target_generation: int
    purpose: Purpose
    nonce: Nonce
    sealed: bool = False
    """What follows the challenge is encrypted; the nonces are then public keys."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    generation: int
    nonce: Nonce
    proof: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    proof: bytes
    card: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    landmark_address: int
    """Where `landmark` lies in the memory of the side that welcomes: reading it there proves that it may be read."""
    landmark: bytes


class Refused(msgspec.Struct, frozen=True, omit_defaults=True, tag="refused"):
    code: Text
    message: Text
    request: int = 0
    card: bytes = b""
    """To whom has proved the secret: the card of the present life."""


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    request: int
    region: int


class Inspected(msgspec.Struct, frozen=True, tag="inspected"):
    request: int
    card: RegionCard


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    request: int
    region: int
    backend: str
    offer: bytes = b""


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    request: int
    card: RegionCard
    address: int
    has_descriptor: bool
    """A file descriptor travels with this message."""
    offer: bytes = b""


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """The owner wants its region back: let go and answer `Revoked`."""

    region: int


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    region: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All bytes of a transfer are in place, or user bytes without a transfer."""

    tag: Tag
    payload: Payload
    num_bytes: Size = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    tag: Tag
    code: Text
    message: Text


class Sums(msgspec.Struct, frozen=True, tag="sums"):
    request: int
    blocks: Blocks


class SumsOf(msgspec.Struct, frozen=True, tag="sums_of"):
    request: int
    sums: bytes
    """Little-endian u32 per block."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    pass


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """On a data stream: send these spans (`SPANS` packed)."""

    region: int
    spans: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16 * MAX_CHUNK_SPANS)]


class Store(msgspec.Struct, frozen=True, tag="store"):
    """On a data stream: the bytes of these spans follow."""

    region: int
    spans: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16 * MAX_CHUNK_SPANS)]
    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_CHUNK_BYTES)]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The bytes asked for follow, or those sent are in place."""

    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_CHUNK_BYTES)]


Greeting = Hello | Challenge | Answer | Welcome | Refused
Control = Inspect | Inspected | Attach | Attached | Revoke | Revoked | Done | Failed | Sums | SumsOf | Ping | Refused
Data = Fetch | Store | Ready | Refused
Message = Greeting | Control | Data

_encoder = msgspec.msgpack.Encoder()
GREETINGS: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
CONTROLS: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
DATAS: msgspec.msgpack.Decoder[Data] = msgspec.msgpack.Decoder(Data)


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def length_of(header: bytes | bytearray, most: int) -> int:
    """Of the body; raises `ProtocolError` beyond `most`."""
    length = int.from_bytes(header, "little")
    if not 0 < length <= most:
        raise ProtocolError(f"a frame of {length} bytes where at most {most} are read")
    return length


_ERRORS: dict[str, type[TransferError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TransferError)
}


def error_of(refused: Refused | Failed) -> TransferError:
    """What the other side raised."""
    return _ERRORS.get(refused.code, TransferError)(refused.message)


def refusal(error: TransferError, request: int = 0) -> Refused:
    return Refused(error.code, error.message[:1024], request)
