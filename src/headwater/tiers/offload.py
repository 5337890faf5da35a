"""What an engine has computed goes to the store.

Blocks are gathered for a moment, so that a step costs no more than noting them, then held, copied and let go, some at a
time. What cannot be copied soon is not copied: it is dropped and counted, and computing never waits.

A store that came late, or came back empty, lacks what the engine has had all along: such blocks are offered when a
request finds them on the device, once per connection to the store.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from headwater.engines.base import KvPort
from headwater.kv.block import Family
from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import Piece, pieces_of
from headwater.scheduler.outside import BlocksCommitted, Held
from headwater.types import BLOCK_ID_BYTES

_log = logging.getLogger(__name__)

_GATHER_S = 0.05
_MAX_GATHERED = 256
"""Blocks; with more, they are copied at once."""
_MAX_UNDER_WAY = 32
"""Pieces that are held."""
_AGAIN_BYTES = 32 << 20
"""Of a chain that the engine has had all along, at once; ..."""
_MAX_AGAIN = 4
"""... and so many of these at a time."""
_MAX_KNOWN = 1 << 16
_HOLD_S = 3600.0
"""Far longer than any copy: a block must never be given to another while it is being read."""


class Offloader:
    """Implements `KvWatcher`. Lives on the event loop of the engine."""

    def __init__(self, port: KvPort, client: StoreClient, on_stored: Callable[[Family], None]) -> None:
        """`on_stored`: blocks of this family are about to be offered."""
        self.num_blocks = 0
        """New in the store."""
        self.num_dropped = 0
        self._port, self._client, self._on_stored = port, client, on_stored
        self._loop = asyncio.get_running_loop()
        self._families: dict[int, tuple[Family, bytes]] = {}
        """Of open streams; with the ids of their blocks as they arrived."""
        self._tails: dict[int, bytes] = {}
        """The last block of an open stream that has become full."""
        self._gathered: dict[int, Piece] = {}
        self._num_gathered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._num_held = 0
        self._known: dict[bytes, None] = {}
        """Last blocks of parts of chains that the store has, or was offered, since this connection to it began."""
        self._known_of = 0
        self._num_again = 0
        self._closed = False
        port.watch(self)

    def opened(self, stream: int, chain: Piece) -> None:
        self._families[stream] = (chain.family, chain.ids)

    def closed(self, stream: int) -> None:
        """What it has filled is still kept."""
        self._families.pop(stream, None)
        self._tails.pop(stream, None)

    def found(self, chain: Piece) -> None:
        """A request needs these blocks, from its first on, and they are on the device: those that the store lacks
        although it was never offered them are offered now."""
        if self._closed:
            return
        if self._known_of != self._client.num_connections or len(self._known) > _MAX_KNOWN:
            self._known.clear()
            self._known_of = self._client.num_connections
        new = [part for part in pieces_of(chain, _AGAIN_BYTES) if part.ids[-BLOCK_ID_BYTES:] not in self._known]
        if not new:
            return
        in_store = self._client.num_in_host(chain.ids)
        for part in new:
            lacking = part.part(max(0, in_store - part.first), part.num_blocks)
            busy = self._num_again >= _MAX_AGAIN or self._num_held >= _MAX_UNDER_WAY
            if lacking.num_blocks and busy:
                return
            self._known[part.ids[-BLOCK_ID_BYTES:]] = None
            if lacking.num_blocks:
                self._num_again += 1
                self._hold(lacking, again=True)

    async def close(self) -> None:
        """Nothing is read from the engine's memory afterwards."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    # ---- from the engine

    def on_committed(self, committed: list[BlocksCommitted]) -> None:
        if self._client.problem or self._closed:
            return
        for blocks in committed:
            known = self._families.get(blocks.stream)
            if known is not None and blocks.block_ids:
                self._gather(blocks, *known)
        if self._num_gathered >= _MAX_GATHERED:
            self._flush()
        elif self._gathered and self._timer is None:
            self._timer = self._loop.call_later(_GATHER_S, self._flush)

    def _gather(self, blocks: BlocksCommitted, family: Family, ids: bytes) -> None:
        stream, first = blocks.stream, blocks.first_block
        before = ids[(first - 1) * BLOCK_ID_BYTES : first * BLOCK_ID_BYTES] if first else bytes(BLOCK_ID_BYTES)
        parent = before or self._tails.get(stream, b"")
        self._tails[stream] = blocks.block_ids[-BLOCK_ID_BYTES:]
        if not parent:
            return
        self._num_gathered += len(blocks.blocks)
        former = self._gathered.get(stream)
        if former is not None and former.first + former.num_blocks == first:
            self._gathered[stream] = Piece(family, former.ids + blocks.block_ids, former.first, former.parent)
            return
        if former is not None:
            self._hold(former)
        self._gathered[stream] = Piece(family, blocks.block_ids, first, parent)

    # ---- to the store

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pieces, self._gathered, self._num_gathered = list(self._gathered.values()), {}, 0
        for piece in pieces:
            self._hold(piece)

    def _hold(self, piece: Piece, *, again: bool = False) -> None:
        if self._num_held >= _MAX_UNDER_WAY:
            self.num_dropped += piece.num_blocks
            return
        self._num_held += 1
        self._port.hold(piece.ids[-BLOCK_ID_BYTES:], _HOLD_S, partial(self._held, piece, again))

    def _held(self, piece: Piece, again: bool, held: Held) -> None:
        blocks = held.blocks[piece.first : piece.first + piece.num_blocks]
        if self._closed or len(blocks) < piece.num_blocks:
            self.num_dropped += piece.num_blocks
            self._let_go(held, again)
            return
        self._on_stored(piece.family)
        task = asyncio.create_task(self._offer(piece, blocks, again, held))
        self._under_way.add(task)
        task.add_done_callback(self._done)

    async def _offer(self, piece: Piece, blocks: tuple[int, ...], again: bool, held: Held) -> None:
        memory = self._port.blocks
        try:
            self.num_blocks += await self._client.offer(piece, [memory.block(number) for number in blocks])
        finally:
            self._let_go(held, again)

    def _let_go(self, held: Held, again: bool) -> None:
        self._num_held -= 1
        self._num_again -= again
        self._port.drop(held.hold)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("storing KV blocks failed", exc_info=error)
