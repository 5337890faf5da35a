"""What an operator asks of a node's store: listings, a check of every byte, warming the host tier after a restart."""

import asyncio
from collections.abc import Sequence

from headwater.kv.block import Family
from headwater.kv.lifecycle import Ledger
from headwater.kv.node.store import NodeStore, Piece
from headwater.kv.node.turns import Priority
from headwater.kv.node.wire import BlockEntry
from headwater.kv.stores.base import Absent
from headwater.kv.stores.disk import DiskTier
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.quantized import bare, exact_family
from headwater.kv.table import Record, records_in

_BATCH = 16
_WARM_TIMEOUT_S = 60.0


def list_blocks(ledger: Ledger, after: int, limit: int) -> tuple[list[BlockEntry], int]:
    """Blocks with record numbers above `after`, and where to go on (-1: at the end)."""
    entries: list[BlockEntry] = []
    for slot, record in ledger.records(after + 1):
        if len(entries) == limit:
            return entries, slot - 1
        entries.append(_entry(record, ledger.families[record.family]))
    return entries, -1


def _entry(record: Record, family: Family) -> BlockEntry:
    block = record.block
    return BlockEntry(
        block.id.hex(), block.parent.hex(), block.position, record.payload_bytes, record.stored_at_s,
        family.model, family.layout, family.tenant,
    )  # fmt: skip


async def verify(tier: HostTier | DiskTier) -> tuple[int, int]:
    """Read everything against its checksum; what is damaged is dropped. (checked, damaged)."""
    checked = damaged = 0
    after = 0
    while True:
        batch: list[tuple[int, Family, bytes]] = []
        for slot, record in tier.ledger.records(after):
            batch.append((slot, tier.ledger.families[record.family], record.block.id))
            if len(batch) == _BATCH:
                break
        if not batch:
            return checked, damaged
        after = batch[-1][0] + 1
        for _, family, block_id in batch:
            found = await tier.get(family, block_id, [memoryview(bytearray(family.payload_bytes))])
            checked += found[0] is not Absent.MISSING
            damaged += found[0] is Absent.DAMAGED
        await asyncio.sleep(0)


async def warm(store: NodeStore, max_bytes: int) -> int:
    """Bring the newest blocks of the disk tier into free room of the host tier; how many came."""
    disk = next((tier for one in store.lower if isinstance(tier := bare(one.tier), DiskTier)), None)
    if disk is None:
        return 0
    space = store.host.ledger.space
    room = min(max_bytes, int(store.host.options.rules.low_watermark * space.num_bytes) - space.used_bytes)
    before = store.host.ledger.table.num_blocks
    # A large table takes seconds to sort: not on the event loop.
    runs = await asyncio.to_thread(_newest_runs, disk.ledger.table.snapshot(), list(disk.ledger.families), room)
    for run in runs:
        await store.fetch(run, Priority.BACKGROUND, _WARM_TIMEOUT_S)
    return max(0, store.host.ledger.table.num_blocks - before)


def _newest_runs(snapshot: bytes, families: Sequence[Family], room: int) -> list[Piece]:
    """The newest blocks that fit into `room` bytes, joined into chains."""
    newest = sorted(records_in(snapshot), key=lambda record: -record.stored_at_s)
    chosen: dict[bytes, Record] = {}
    for record in newest:
        room -= record.payload_bytes
        if room < 0:
            break
        chosen[record.block.id] = record
    after = {record.block.parent: record for record in chosen.values()}
    joined: set[bytes] = set()
    runs: list[Piece] = []
    for record in sorted(chosen.values(), key=lambda record: record.block.position):
        if record.block.id in joined:
            continue
        run = [record]
        while (following := after.get(run[-1].block.id)) and _follows(following, run[-1]):
            run.append(following)
        joined.update(one.block.id for one in run)
        ids = b"".join(one.block.id for one in run)
        runs.append(Piece(exact_family(families[record.family]), ids, record.block.position, record.block.parent))
    return runs


def _follows(record: Record, before: Record) -> bool:
    """Positions are compared too: on a damaged disk a block may name itself as its parent."""
    return record.family == before.family and record.block.position == before.block.position + 1
