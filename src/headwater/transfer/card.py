"""What an agent tells about itself: names, addresses, regions. A card connects nothing and may be sent anywhere.

A card is trusted no further than the channel it came by; without a cluster key it carries the token that lets its
holder connect, and is as secret as that.
"""

from typing import Annotated, Literal

import msgspec

from headwater.errors import TransferRefused
from headwater.transfer.blocks import Size

CARD_VERSION = 1
MAX_CARD_BYTES = 256 << 10
MAX_REGIONS = 1024

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
RegionKind = Literal["shared", "memory", "file", "device", "object"]
Access = Literal["read", "write", "both"]
"""What peers may do with a region."""


class RegionCard(msgspec.Struct, frozen=True, array_like=True):
    id: int
    name: Annotated[str, msgspec.Meta(max_length=128)]
    kind: RegionKind
    num_bytes: Size
    block_bytes: Size
    access: Access


class AgentCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything a peer needs to reach one life of an agent."""

    version: int
    name: Name
    generation: int
    boot_id: str
    """Of the kernel: equal on one host."""
    unix: str = ""
    """Name of an abstract Unix socket."""
    host: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    token: bytes = b""
    backends: list[str] = []
    regions: list[RegionCard] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AgentCard)


def encode_card(card: AgentCard) -> bytes:
    return _encoder.encode(card)


def decode_card(data: bytes) -> AgentCard:
    """Raise `TransferRefused` for anything but a card of this version."""
    if len(data) > MAX_CARD_BYTES:
        raise TransferRefused(f"a card of {len(data)} bytes; at most {MAX_CARD_BYTES} are read")
    try:
        card = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TransferRefused(f"not the card of a transfer agent: {error}") from None
    if card.version != CARD_VERSION:
        raise TransferRefused(f"the card has version {card.version}, this side speaks {CARD_VERSION}")
    return card
