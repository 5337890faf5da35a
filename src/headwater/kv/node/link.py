"""A client's hold on its node's store: the connection, and while it lasts, the node's memory.

A lost connection is made again for as long as the link is open; whatever came with the old one is let go. Copies under
way keep the memory until they are done, for they hold a view of it.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from headwater.errors import HeadwaterError, StoreClosed
from headwater.kv.block import Family
from headwater.kv.families import MAX_FAMILIES
from headwater.kv.node import wire
from headwater.kv.node.connection import Connection, Greeted, greet
from headwater.kv.node.store import Piece
from headwater.kv.stores.finishing import finished
from headwater.kv.stores.shared_pool import SharedPool
from headwater.kv.table import BlockTable
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored

logger = logging.getLogger(__name__)

OnEvents = Callable[[Sequence[BlocksStored | BlocksRemoved | BlocksCleared]], None]
A = TypeVar("A", bound=wire.Answer)

_GREET_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.1
_MOST_PAUSE_S = 5.0


class Link:
    """See the module docstring. Lives on one event loop."""

    def __init__(self, path: Path, name: str, on_events: OnEvents | None) -> None:
        self._path, self._name, self._on_events = path, name, on_events
        self.connection: Connection | None = None
        self.pool: SharedPool | None = None
        self.table: BlockTable | None = None
        self._ttl_s = float("inf")
        self.families: dict[Family, int] = {}
        """Their numbers in the shared table, as far as they are known here."""
        self._keeper: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self.num_connections = 0
        self.problem = "no answer yet"

    async def start(self, *, patience_s: float) -> None:
        """Connect, and stay connected. Waits so long for a store that is not there yet, then returns all the same."""
        self._keeper = asyncio.create_task(self._keep_connected())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._connected.wait()

    async def close(self) -> None:
        """Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        self._lose("closed")

    def tell(self, message: wire.Request) -> None:
        if self.connection is not None:
            self.connection.tell(message)

    async def ask(self, message: wire.Request, kind: type[A], timeout_s: float = 0.0) -> A:
        if self.connection is None:
            raise StoreClosed(f"no store at {self._path}: {self.problem}")
        return await self.connection.ask(message, kind, timeout_s + _ANSWER_TIMEOUT_S)

    def memory(self) -> memoryview:
        """Payloads. Whoever keeps the view keeps the memory."""
        if self.pool is None:
            raise StoreClosed(f"the store at {self._path} is gone")
        return self.pool.view(0, self.pool.layout.data_bytes)

    def places(self, piece: Piece) -> tuple[list[int], list[int]] | None:
        """Where the shared table says that all blocks of the piece lie, and their checksums; None if it lacks one.

        Another process writes the table meanwhile: what it says is a guess, to be proved by the checksum.
        """
        if self.table is None or self.pool is None:
            return None
        number, size = self.families.get(piece.family, -1), piece.family.payload_bytes
        found = self.table.payloads(piece.ids, number, size, time.time() - self._ttl_s)
        if found is None or max(found[0]) + size > self.pool.layout.data_bytes:
            return None
        return found

    def note_family(self, family: Family, number: int) -> None:
        if len(self.families) >= MAX_FAMILIES:
            self.families.clear()
        self.families[family] = number

    async def _keep_connected(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._connect()
                pause_s = _FIRST_PAUSE_S
                assert self.connection is not None
                await self.connection.ended.wait()
                self._lose("the connection was broken")
            except (OSError, HeadwaterError) as error:
                self.problem = str(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    async def _connect(self) -> None:
        greeted = await self._greet()
        try:
            pool = SharedPool.attach(greeted.fd, greeted.welcome.layout)
            self.pool, self.table = pool, BlockTable(pool.records, pool.index)
            self._ttl_s = greeted.welcome.ttl_s or float("inf")
            connection = Connection(greeted, self._told)
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=greeted.socket)
        except BaseException:
            greeted.socket.close()
            raise
        self.connection = connection
        self.num_connections += 1
        connection.start()
        self.problem = ""
        self._connected.set()
        logger.info("connected to the KV store at %s", self._path)

    async def _greet(self) -> Greeted:
        """On a thread. Whoever does not wait for the end leaves nothing open."""
        hello = wire.Hello(0, wire.VERSION, self._name, self._on_events is not None)
        greeting = asyncio.get_running_loop().run_in_executor(None, greet, self._path, hello, _GREET_TIMEOUT_S)
        try:
            return await finished(greeting)
        except asyncio.CancelledError:
            if not greeting.cancelled() and greeting.exception() is None:
                greeting.result().socket.close()
                os.close(greeting.result().fd)
            raise

    def _told(self, events: wire.Events) -> None:
        if self._on_events is not None:
            self._on_events(events.events)

    def _lose(self, problem: str) -> None:
        """Let everything of that connection go."""
        self.problem = problem
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
            if self._on_events is not None:
                self._on_events([BlocksCleared(tier) for tier in ("host", "disk", "peer", "object")])
        self.families.clear()
        table, self.table = self.table, None
        pool, self.pool = self.pool, None
        if table is not None and pool is not None:
            table.close()
            pool.close()
