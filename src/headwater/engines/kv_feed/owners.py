"""Whose blocks are, for engines that keep salts and adapters apart and do not name them in their KV events. Pure.

A sequence's first block belongs to the request that begins with its tokens, and further blocks to who has their parent.
Requests of several namespaces may begin alike; each of them has a hash of its own for that block, so the one that has
none yet is meant. Where two have none, nobody gets the block: no tenant is told of what may be another one's. Where an
event names the adapter, only requests for that one can be meant.
"""

from array import array
from collections import OrderedDict, deque
from typing import NamedTuple

from headwater.engines.kv_feed.wire import ForeignHash

_LINGER_S = 5.0
"""Blocks may be told of so long after their request has ended."""
_MAX_KNOWN = 65_536


class Owner(NamedTuple):
    """A request's."""

    namespace: bytes
    adapter: str | None


class BlockOwners:
    """`now`: seconds of any clock that does not go back."""

    def __init__(self, block_size: int, default: bytes) -> None:
        self._block_size = block_size
        self._only: bytes | None = default
        """The namespace of all requests so far; None once there were several."""
        self._begun: dict[int, bytes] = {}
        """By stream: the first block, or as much of it as the prompt has."""
        self._by_block: dict[bytes, dict[int, Owner]] = {}
        """By first block and stream."""
        self._short: dict[int, tuple[bytes, Owner]] = {}
        """Of prompts without a whole block."""
        self._ended: deque[tuple[float, int]] = deque()
        self._known: OrderedDict[ForeignHash, tuple[bytes, bytes]] = OrderedDict()
        self._hashes: dict[tuple[bytes, bytes], ForeignHash] = {}

    def begin(self, stream: int, tokens: "array[int]", namespace: bytes, adapter: str | None = None) -> None:
        """The engine is given this prompt."""
        if namespace != self._only:
            self._only = None
        first, owner = tokens[: self._block_size].tobytes(), Owner(namespace, adapter)
        self._begun[stream] = first
        if len(tokens) >= self._block_size:
            self._by_block.setdefault(first, {})[stream] = owner
        else:
            self._short[stream] = first, owner

    def end(self, stream: int, now: float) -> None:
        self._ended.append((now, stream))
        while self._ended[0][0] < now - _LINGER_S:
            self._forget(self._ended.popleft()[1])

    def of(
        self, foreign: ForeignHash, first: bytes, adapter: str | None = None, *, nobodys: bytes | None = None
    ) -> bytes | None:
        """The namespace of a first block; None when it cannot be told. `adapter`: as far as the event names one;
        `nobodys`: the answer where none of our requests can be meant."""
        if self._only is not None:
            return nobodys or self._only
        if foreign in self._known:
            self._known.move_to_end(foreign)
            return self._known[foreign][1]
        owners = {owner.namespace for owner in self._beginning_with(first) if adapter in (None, owner.adapter)}
        if not owners:
            return nobodys
        waiting = {owner for owner in owners if (first, owner) not in self._hashes}
        if len(waiting) != 1:
            return None
        (owner,) = waiting
        self.learn(foreign, first, owner)
        return owner

    def learn(self, foreign: ForeignHash, first: bytes, owner: bytes) -> None:
        """Also what an event did say."""
        if foreign in self._known:
            self._known.move_to_end(foreign)
            return
        self._known[foreign] = first, owner
        self._hashes[first, owner] = foreign
        if len(self._known) > _MAX_KNOWN:
            _, pair = self._known.popitem(last=False)
            self._hashes.pop(pair, None)

    def _beginning_with(self, first: bytes) -> set[Owner]:
        """A prompt shorter than a block may have grown into it, but counts only where no other one is meant."""
        owners = set(self._by_block.get(first, {}).values())
        return owners or {owner for prompt, owner in self._short.values() if first.startswith(prompt)}

    def _forget(self, stream: int) -> None:
        if (first := self._begun.pop(stream, None)) is None:
            return
        self._short.pop(stream, None)
        if (others := self._by_block.get(first)) is not None:
            others.pop(stream, None)
            if not others:
                del self._by_block[first]
