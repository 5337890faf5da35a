"""The KV event feed of vLLM, which SGLang speaks too: three frames, topic, number (8 bytes, big-endian), payload.

The payload is msgpack: `[time, events, data-parallel rank]`. An event is a map with its class name under `type`, or,
from older releases, an array that begins with it. Hashes are unsigned, signed or bytes; nothing but equality is asked
of them. What is not understood is refused as a whole batch, never half read.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headwater.errors import ProtocolError
from headwater.types import Tier

ForeignHash = int | bytes | str

_TIERS: Mapping[str, Tier] = {
    "GPU": "device",
    "CPU": "host",
    "CPU_PINNED": "host",
    "DISK": "disk",
    "STORAGE": "disk",
    "EXTERNAL": "object",
}
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED = ("block_hashes", "medium")
_MAX_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class ForeignStored:
    """Consecutive blocks of one sequence became resident."""

    hashes: Sequence[ForeignHash]
    parent: ForeignHash | None
    token_ids: Sequence[int]
    block_size: int
    tier: Tier = "device"
    adapter: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] = ()
    """Per block what its hash covers beside the tokens: adapter, pairs for media, salt."""
    group: int = 0


@dataclass(frozen=True, slots=True)
class ForeignRemoved:
    hashes: Sequence[ForeignHash]
    tier: Tier = "device"
    group: int = 0


@dataclass(frozen=True, slots=True)
class ForeignCleared:
    """Nothing is resident any more."""


@dataclass(frozen=True, slots=True)
class ForeignMoved:
    """A block that was told of lies in another tier now."""

    hash: ForeignHash
    before: Tier
    after: Tier


ForeignEvent = ForeignStored | ForeignRemoved | ForeignMoved | ForeignCleared


@dataclass(frozen=True, slots=True)
class ForeignBatch:
    """What one step of the engine changed, in order."""

    timestamp: float
    events: Sequence[ForeignEvent]
    rank: int = 0


def decode_batch(payload: bytes) -> ForeignBatch:
    """Raises `ProtocolError`."""
    try:
        timestamp, events, *rest = msgspec.msgpack.decode(payload, type=list[Any])
        rank = rest[0] if rest and isinstance(rest[0], int) else 0
        decoded = [event for item in events if (event := _event(item)) is not None]
        return ForeignBatch(float(timestamp), decoded, rank)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ProtocolError(f"a batch of KV events cannot be read: {error!r}") from error


def _event(item: Any) -> ForeignEvent | None:
    """None for kinds that later releases may add, and for what cannot be put in our terms."""
    if isinstance(item, list):
        kind, values = item[0], item[1:]
        fields: dict[str, Any] = dict(zip(_STORED if kind == "BlockStored" else _REMOVED, values, strict=False))
    else:
        kind, fields = item["type"], item
    if kind == "AllBlocksCleared":
        return ForeignCleared()
    if kind == "BlockRemoved":
        return ForeignRemoved(_hashes(fields["block_hashes"]), _tier(fields), fields.get("group_idx") or 0)
    return _stored(fields) if kind == "BlockStored" else None


def _stored(fields: Mapping[str, Any]) -> ForeignStored | None:
    """None for blocks that cannot be named."""
    hashes = _hashes(fields["block_hashes"])
    block_size = int(fields["block_size"])
    token_ids = _token_ids(fields["token_ids"])
    if block_size < 1 or len(token_ids) != len(hashes) * block_size:
        raise ValueError(f"{len(token_ids)} token ids for {len(hashes)} blocks of {block_size}")
    if not _fit(token_ids):
        return None
    parent, adapter, extra_keys = fields["parent_block_hash"], fields.get("lora_name"), fields.get("extra_keys")
    if not isinstance(parent, int | bytes | None) or not isinstance(adapter, str | None):
        raise ValueError("a parent must be a number, bytes or none, and an adapter a name")
    if not all(isinstance(keys, list | None) for keys in extra_keys or ()):
        raise ValueError("extra keys must be lists")
    salt = fields.get("cache_salt")
    if extra_keys is None and salt:
        extra_keys = [[salt] if adapter is None else [adapter, salt]]
    return ForeignStored(
        hashes=hashes,
        parent=parent,
        token_ids=token_ids,
        block_size=block_size,
        tier=_tier(fields),
        adapter=adapter,
        extra_keys=extra_keys or (),
        group=fields.get("group_idx") or 0,
    )


def _token_ids(value: Any) -> list[int]:
    """SGLang with speculative decoding names pairs of neighbours: the first of each are the block's own tokens."""
    if not isinstance(value, list):
        raise ValueError("token ids must be a list")
    return [pair[0] for pair in value] if value and isinstance(value[0], list) else value


def _fit(token_ids: list[int]) -> bool:
    """For an image SGLang puts content hashes of 62 bits, TensorRT-LLM texts: such blocks have no id of ours."""
    try:
        array("I", token_ids)
    except OverflowError:
        return False
    except TypeError:
        if any(isinstance(token, str) for token in token_ids):
            return False
        raise
    return True


def _hashes(value: Any) -> list[ForeignHash]:
    if not isinstance(value, list) or len(value) > _MAX_BLOCKS or not all(isinstance(h, int | bytes) for h in value):
        raise ValueError("block hashes must be a list of numbers or bytes")
    return value


def _tier(fields: Mapping[str, Any]) -> Tier:
    medium = fields.get("medium")
    return "device" if medium is None else _TIERS.get(str(medium).upper(), "device")
