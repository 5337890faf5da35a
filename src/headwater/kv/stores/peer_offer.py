"""Offers the blocks of this node's host tier to other nodes.

A peer borrows blocks under a lease, reads them from the pool with its own transfer agent, and gives them back; it can
neither write nor remove. When its connection ends, its leases do. What a peer says about damage is looked into, not
believed.
"""

import asyncio
import logging
from contextlib import suppress
from itertools import count

from headwater.errors import ConfigError, HeadwaterError, ProtocolError, TransferError
from headwater.kv.checksum import checksum
from headwater.kv.identity import split_block_ids
from headwater.kv.space import slot_bytes_for
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.peer_wire import (
    Ask,
    Borrow,
    GiveBack,
    Have,
    Lent,
    LentBlock,
    Message,
    Place,
    Reply,
    Returned,
    receive,
    send,
    welcome,
)
from headwater.kv.table import Record
from headwater.transfer.agent import Agent
from headwater.transfer.regions import Region
from headwater.types import BLOCK_ID_BYTES

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_LENT_BYTES = 64 << 20
"""Per borrowing."""
_MAX_TICKETS = 8
"""Per connection."""
_GREETING_S = 5.0
_MAX_UNSENT_BYTES = 4 << 20

Lease = list[tuple[int, int, Record]]
"""Number of the id, slot, record."""


class PeerOffer:
    """See the module docstring. Lives on the event loop of the host tier."""

    def __init__(self, host: HostTier, agent: Agent, pool: Region, key: bytes) -> None:
        """`pool`: the host tier's memory as the agent knows it."""
        self._host = host
        self._agent = agent
        self._pool = pool
        self._key = key
        self._holders = count(-1, -1)  # the node's own clients count upwards
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, address: str, port: int) -> int:
        """The port. Raises `ConfigError`."""
        try:
            self._server = await asyncio.start_server(self._accept, address, port)
        except OSError as error:
            raise ConfigError(f"cannot listen for peers on {address}:{port}: {error.strerror}") from None
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        holder = next(self._holders)
        try:
            await self._serve(reader, writer, holder)
        except (OSError, EOFError, TimeoutError):
            pass  # it went away
        except (ProtocolError, TransferError) as error:
            _log.warning("a peer at %s was refused: %s", writer.get_extra_info("peername"), error.message)
        except asyncio.CancelledError:
            pass  # closing: this task is nobody else's
        finally:
            with suppress(HeadwaterError):
                self._host.ledger.drop_holder(holder)
            writer.close()
            self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, holder: int) -> None:
        async with asyncio.timeout(_GREETING_S):
            self._agent.add_peer(await welcome(reader, writer, self._key, self._agent.card()))
        leases: dict[int, Lease] = {}
        while True:
            message = await receive(reader)
            send(writer, self._answer(message, holder, leases))
            if writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
                await writer.drain()

    def _answer(self, message: Message, holder: int, leases: dict[int, Lease]) -> Reply:
        if isinstance(message, Ask | Borrow) and len(message.ids) % BLOCK_ID_BYTES:
            raise ProtocolError(f"{len(message.ids)} bytes are no block ids: {BLOCK_ID_BYTES} bytes each")
        match message:
            case Ask(serial=serial, ids=ids):
                return Have(serial, self._host.known(ids))
            case Borrow():
                return self._lend(message, holder, leases)
            case GiveBack(serial=serial, ticket=ticket, suspect=suspect):
                lease = leases.pop(ticket, [])
                damaged = [slot for number, slot, record in lease if number in suspect and self._is_damaged(record)]
                return Returned(serial, self._host.release(holder, ticket, damaged))
        raise ProtocolError(f"{type(message).__name__} out of turn")

    def _lend(self, wish: Borrow, holder: int, leases: dict[int, Lease]) -> Lent:
        most = MAX_LENT_BYTES // wish.family.payload_bytes if len(leases) < _MAX_TICKETS else 0
        ids = split_block_ids(wish.ids)
        ticket, found = self._host.lease(holder, wish.family, b"".join(ids[:most]))
        lease = [(number, *hit) for number, hit in enumerate(found) if hit is not None]
        if lease:
            leases[ticket] = lease
        blocks: list[LentBlock | None] = [None] * len(ids)
        for number, _, record in lease:
            blocks[number] = LentBlock(record.block.parent, record.block.position, record.block.checksum)
        return Lent(wish.serial, ticket, blocks, self._places(lease))

    def _places(self, lease: Lease) -> list[Place]:
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, _, record in lease:
            stride = slot_bytes_for(record.payload_bytes)
            index, base = divmod(record.offset, stride)
            groups.setdefault((record.payload_bytes, base), []).append((number, index))
        return [
            Place(
                self._pool.blocks(
                    [index for _, index in group], block_bytes=payload, stride=slot_bytes_for(payload), base=base
                ),
                [number for number, _ in group],
            )
            for (payload, base), group in groups.items()
        ]

    def _is_damaged(self, record: Record) -> bool:
        view = self._host.pool.view(record.offset, record.payload_bytes)
        return checksum(record.block.id, view) != record.block.checksum
