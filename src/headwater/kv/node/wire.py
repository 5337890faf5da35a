"""What the node's store and its clients say to each other, over a Unix socket: 4 bytes of length, then msgpack.

Payloads never pass through here; they are copied in shared memory by the client, between `Reserve` and `Commit` and
between `Lease` and `Release`. Both sides refuse frames they cannot decode or that are too long, and end the connection.
"""

from typing import Annotated

import msgspec

from headwater.errors import ProtocolError
from headwater.kv.block import MAX_PARTS, Family, Label
from headwater.kv.pricing import TierRun
from headwater.kv.shares import ShareUsage
from headwater.kv.stores.shared_pool import PoolLayout
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.types import Tier

VERSION = 2
MAX_FRAME_BYTES = 8 << 20
MAX_BLOCKS = 16_384
"""Per message."""
MAX_POSITION = (1 << 32) - 1 - MAX_BLOCKS
LENGTH_BYTES = 4

PRESENT, BUSY, FULL = -1, -2, -3
"""In the place of a slot: why there is none."""

Ids = Annotated[bytes, msgspec.Meta(max_length=16 * MAX_BLOCKS)]
Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10 * 365 * 86400)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Slot = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""Neither infinite nor undefined: prices are learned from them."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`serial` ties an answer to its request."""

    serial: int


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of one sequence."""

    family: Family
    ids: Ids
    first: Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)]
    """Position of the first one."""
    parent: Id
    """The block before it; zeros at the start of the sequence."""


# From the client


class Hello(_Message, frozen=True):
    version: int
    name: Annotated[str, msgspec.Meta(max_length=128)]
    follow: bool
    """Whether to be told events."""


class Reserve(_Message, frozen=True):
    chain: Chain


class Commit(_Message, frozen=True):
    ticket: Count
    checksums: dict[Slot, Annotated[int, msgspec.Meta(ge=0)]]
    """By slot. What was reserved and is not among them is given back."""


class Lease(_Message, frozen=True):
    chain: Chain
    timeout_s: Seconds
    """How long to wait for blocks to come up from lower tiers; 0: only what is in the host tier."""


class Release(_Message, frozen=True):
    ticket: Count
    damaged: list[Slot]
    copied_bytes: Count = 0
    copied_ms: Milliseconds = 0.0


class Used(_Message, frozen=True):
    """Blocks of the host tier were read without asking, and were whole. Not answered."""

    chain: Chain
    copied_ms: Milliseconds


class Locate(_Message, frozen=True):
    chain: Chain
    timeout_s: Seconds
    """How long to wait for tiers that have to be asked; 0: only what is known here."""
    num_parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)] = 1
    """Chains of this size that are to be loaded together."""


class Prefetch(_Message, frozen=True):
    chain: Chain
    timeout_s: Seconds


class Describe(_Message, frozen=True):
    family: Family
    token_ms: Milliseconds
    pair_ms: Milliseconds
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Limit(_Message, frozen=True):
    tenant: Label
    fraction: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """The most of each tier that its blocks may fill while others want room."""


class Pin(_Message, frozen=True):
    ids: Ids
    seconds: Seconds
    """0 unpins."""


class Remove(_Message, frozen=True):
    ids: Ids


class Clear(_Message, frozen=True):
    tenant: str | None
    model: str | None


class AskStatus(_Message, frozen=True):
    pass


class ListBlocks(_Message, frozen=True):
    tier: Tier
    after: Annotated[int, msgspec.Meta(ge=-1)]
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]


class Verify(_Message, frozen=True):
    tier: Tier


class Warm(_Message, frozen=True):
    max_bytes: Count


# From the node


class Welcome(_Message, frozen=True):
    version: int
    layout: PoolLayout
    ttl_s: float | None
    """Blocks older than this are not to be read."""


class Reserved(_Message, frozen=True):
    ticket: int
    family: int
    """Its number in the shared table."""
    slots: list[int]
    offsets: list[int]


class Committed(_Message, frozen=True):
    num_blocks: int


class Leased(_Message, frozen=True):
    ticket: int
    family: int
    """Its number in the shared table; -1 if there is nothing of it."""
    slots: list[int]
    """Of a leading run."""
    offsets: list[int]
    checksums: list[int]


class Released(_Message, frozen=True):
    valid: bool
    """False: the lease ran out before, what was copied must not be used."""


class Located(_Message, frozen=True):
    runs: list[TierRun]


class Counted(_Message, frozen=True):
    num_blocks: int


class FamilyUsage(msgspec.Struct, frozen=True):
    model: str
    layout: str
    tenant: str
    payload_bytes: int
    num_blocks: int
    used_bytes: int
    parts: int = 1
    beside: bool = False
    """As of `Family`."""


class TierStatus(msgspec.Struct, frozen=True):
    tier: Tier
    num_blocks: int
    used_bytes: int
    cap_bytes: int
    num_stored: int
    num_evicted: int
    num_refused: int
    num_hits: int
    num_misses: int
    num_damaged: int
    num_failed: int
    problem: str = ""
    """Why it cannot be used now."""
    families: list[FamilyUsage] = []
    tenants: list[ShareUsage] = []
    load_ms_per_mib: float = 0.0
    """As learned."""


class StatusReport(_Message, frozen=True):
    tiers: list[TierStatus]
    clients: list[str]
    pinned_bytes: int
    huge_bytes: int
    """Of the host tier, on huge pages."""
    num_stranded: int
    num_waiting: int
    """Loads and writes in line."""
    num_spills_dropped: int
    uptime_s: float


class BlockEntry(msgspec.Struct, frozen=True):
    id: str
    parent: str
    position: int
    payload_bytes: int
    stored_at_s: int
    model: str
    layout: str
    tenant: str


class BlockList(_Message, frozen=True):
    blocks: list[BlockEntry]
    next_after: int
    """Where to go on; -1 at the end."""


class Verified(_Message, frozen=True):
    num_checked: int
    num_damaged: int


class Events(_Message, frozen=True):
    events: list[BlocksStored | BlocksRemoved | BlocksCleared]


class Failed(_Message, frozen=True):
    code: str
    message: str


Request = (
    Hello | Reserve | Commit | Lease | Release | Used | Locate | Prefetch | Describe | Limit | Pin | Remove | Clear
    | AskStatus | ListBlocks | Verify | Warm
)  # fmt: skip
Answer = (
    Welcome | Reserved | Committed | Leased | Released | Located | Counted | StatusReport | BlockList | Verified
    | Events | Failed
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_request(body: bytes) -> Request:
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not a request to the store: {error}") from None


def decode_answer(body: bytes) -> Answer:
    try:
        return _answers.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not an answer of the store: {error}") from None


class Frames:
    """Cuts a stream of bytes into frames. Raises `ProtocolError` for one that is too long."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        frames: list[bytes] = []
        at = 0
        while len(self._buffer) - at >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[at : at + LENGTH_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are read")
            end = at + LENGTH_BYTES + length
            if end > len(self._buffer):
                break
            frames.append(bytes(self._buffer[at + LENGTH_BYTES : end]))
            at = end
        del self._buffer[:at]
        return frames
