"""TensorRT-LLM's KV events, as they are taken out of its queue: JSON documents with a number each. Pure.

Whoever takes them out has them alone, so a number that is skipped is lost for good: then all is forgotten and learned
anew. Numbers that begin again are a new life of the engine. A block that is told of twice counts once; one whose tier
changes is moved. Partial blocks are left out, and so are all windows of a model but the widest. What cannot be
understood is treated as lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.engines.kv_feed.subscription import FeedSink
from headwater.engines.kv_feed.wire import (
    ForeignBatch,
    ForeignCleared,
    ForeignEvent,
    ForeignHash,
    ForeignMoved,
    ForeignRemoved,
    ForeignStored,
)
from headwater.types import Tier

_LEVELS: tuple[Tier, ...] = ("device", "host", "disk")
"""By cache level; deeper ones count as the last."""


@dataclass(slots=True)
class _Rank:
    """One attention-data-parallel rank."""

    next_number: int | None = None
    window: int = 0
    """The widest that was heard of."""
    tiers: dict[ForeignHash, Tier] = field(default_factory=dict[ForeignHash, Tier])


class DrainedEvents:
    """Hands to a sink what each drain brought."""

    def __init__(self, sink: FeedSink, block_size: int, adapters: Mapping[int, str] | None = None) -> None:
        self.num_lost = 0
        self._sink = sink
        self._block_size = block_size
        self._adapters = adapters or {}
        self._ranks: dict[int, _Rank] = {}

    def reset(self) -> None:
        """As if nothing had been heard yet."""
        self._ranks.clear()

    def take(self, documents: Sequence[Any]) -> None:
        """All of one drain, in order."""
        try:
            for document in documents:
                self._take(document)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self._lose(f"an event cannot be read: {error!r}")

    def lose(self, reason: str) -> None:
        """An answer that may have held events did not arrive."""
        if self._ranks:
            self._lose(reason)

    def _take(self, document: Any) -> None:
        number, number_of_rank = int(document["event_id"]), int(document.get("attention_dp_rank") or 0)
        known = self._rank(number_of_rank).next_number
        if known is not None and number != known:
            self._lose(f"{number - known} events are missing" if number > known else "the engine was started anew")
        self._rank(number_of_rank).next_number = number + 1
        if not self._is_widest(number_of_rank, document.get("window_size")):
            return
        events = self._events(self._rank(number_of_rank), document["data"])
        if events:
            self._sink.on_batch(ForeignBatch(0.0, events, number_of_rank))

    def _is_widest(self, number: int, window: int | None) -> bool:
        rank = self._rank(number)
        if window is None or window == rank.window:
            return True
        if window < rank.window:
            return False
        if rank.tiers:
            following = rank.next_number
            self._lose(f"a wider attention window of {window} tokens appeared")
            self._rank(number).next_number = following
        self._rank(number).window = window
        return True

    def _events(self, rank: _Rank, data: Mapping[str, Any]) -> list[ForeignEvent]:
        match data["type"]:
            case "stored":
                return self._stored(rank, data)
            case "removed":
                return _removed(rank, data["block_hashes"])
            case "updated":
                level = data.get("cache_level")
                return _moved(rank, data["block_hash"], _tier(level["new_value"])) if level else []
            case "all_cleared":
                rank.tiers.clear()
                return [ForeignCleared()]
            case _:
                return []  # `created`, and what later releases may add

    def _stored(self, rank: _Rank, data: Mapping[str, Any]) -> list[ForeignEvent]:
        told: list[ForeignEvent] = []
        run = _Run(data.get("parent_hash"), self._block_size)
        for block in data["blocks"]:
            if (length := len(block["tokens"])) > self._block_size:
                raise ValueError(f"a block has {length} tokens, and not {self._block_size}")
            if length < self._block_size or any(isinstance(token["token_id"], str) for token in block["tokens"]):
                break  # a partial one, which nothing follows, or one with a medium, which has no id of ours
            foreign, tier = block["block_hash"], _tier(block.get("cache_level") or 0)
            if foreign in rank.tiers:
                run.end(told)
                told += _moved(rank, foreign, tier)
                run = _Run(foreign, self._block_size)
                continue
            if tier != run.tier and run.hashes:
                run.end(told)
                run = _Run(run.hashes[-1], self._block_size)
            rank.tiers[foreign] = tier
            run.add(block, tier, self._adapter(block.get("lora_id")))
        run.end(told)
        return told

    def _adapter(self, number: int | None) -> str | None:
        return None if number is None else self._adapters.get(number, f"lora-{number}")

    def _lose(self, reason: str) -> None:
        self.num_lost += 1
        self.reset()
        self._sink.on_lost(reason)

    def _rank(self, number: int) -> _Rank:
        return self._ranks.setdefault(number, _Rank())


class _Run:
    """Consecutive new blocks of one sequence in one tier."""

    def __init__(self, parent: ForeignHash | None, block_size: int) -> None:
        self.hashes: list[ForeignHash] = []
        self.tier: Tier = "device"
        self._parent = parent
        self._block_size = block_size
        self._adapter: str | None = None
        self._token_ids: list[int] = []
        self._extra_keys: list[list[Any] | None] = []

    def add(self, block: Mapping[str, Any], tier: Tier, adapter: str | None) -> None:
        if not self.hashes:
            self.tier, self._adapter = tier, adapter
        self.hashes.append(block["block_hash"])
        self._token_ids += [token["token_id"] for token in block["tokens"]]
        self._extra_keys.append(_extra_keys(block, adapter) or None)

    def end(self, told: list[ForeignEvent]) -> None:
        if self.hashes:
            told.append(
                ForeignStored(
                    self.hashes,
                    self._parent,
                    self._token_ids,
                    self._block_size,
                    self.tier,
                    self._adapter,
                    self._extra_keys,
                )
            )


def _extra_keys(block: Mapping[str, Any], adapter: str | None) -> list[Any]:
    """What the hash of a block covers beside its tokens: adapter, media, and the salt."""
    keys: list[Any] = [] if adapter is None else [adapter]
    keys += [key for key in block.get("mm_keys") or () if key]
    extra = [token.get("token_extra_id") or 0 for token in block["tokens"]]
    if any(extra):
        keys.append(extra)
    salt = block.get("cache_salt")
    return [*keys, salt] if isinstance(salt, str) else keys


def _removed(rank: _Rank, hashes: Sequence[ForeignHash]) -> list[ForeignEvent]:
    told: list[ForeignEvent] = []
    for foreign in hashes:
        tier = rank.tiers.pop(foreign, None)
        if tier is not None:
            told.append(ForeignRemoved([foreign], tier))
    return told


def _moved(rank: _Rank, foreign: ForeignHash, tier: Tier) -> list[ForeignEvent]:
    before = rank.tiers.get(foreign)
    if before is None or before == tier:
        return []
    rank.tiers[foreign] = tier
    return [ForeignMoved(foreign, before, tier)]


def _tier(level: int) -> Tier:
    return _LEVELS[min(level, len(_LEVELS) - 1)]
