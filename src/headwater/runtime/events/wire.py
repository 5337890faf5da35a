"""What publishers and subscribers say to each other besides batches."""

import msgspec

from headwater.protocol.events import EventBatch, EventSnapshot

MAX_EVENT_MESSAGE_BYTES = 256 << 20
"""Snapshots of large tiers are large: 16 bytes per resident block."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Send a snapshot."""


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """Send the batches of this epoch again, from `first` on."""

    epoch: int
    first: int


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    snapshot: EventSnapshot


class Recalled(msgspec.Struct, frozen=True, tag="recalled"):
    """As many of the batches as fit into one answer, as they were published."""

    batches: list[msgspec.Raw]
    more: bool = False


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """The batches asked for are not kept any more; only a snapshot helps."""


Ask = Join | Recall
Answer = Snapshot | Recalled | Forgotten

encode = msgspec.msgpack.Encoder().encode
decode_ask = msgspec.msgpack.Decoder(Ask).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_batch = msgspec.msgpack.Decoder(EventBatch).decode
