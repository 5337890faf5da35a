"""What a client does on its threads: copies between buffers and the node's memory, each summed on the way."""

import asyncio
import os
from collections.abc import Sequence

from headwater.kv.identity import split_block_ids
from headwater.kv.node.store import Piece
from headwater.kv.stores.copying import copy_summed
from headwater.kv.stores.shared_pool import SharedPool
from headwater.kv.table import BlockTable

_MANY_PROCESSORS = 5


def num_copiers() -> int:
    """Two threads where there are processors to spare, else one."""
    return 2 if len(os.sched_getaffinity(0)) >= _MANY_PROCESSORS else 1


def shared_places(
    table: BlockTable | None, pool: SharedPool | None, piece: Piece, family: int, oldest_s: float
) -> tuple[list[memoryview], list[int]] | None:
    """Where the shared table says that the blocks of the piece lie, and their checksums; None unless it has them all.

    Another process writes the table meanwhile: what it says is a guess, to be proved by the checksum.
    """
    if table is None or pool is None:
        return None
    size = piece.family.payload_bytes
    places: list[memoryview] = []
    checksums: list[int] = []
    for number in table.find_all(piece.ids):
        record = table.read(number) if number >= 0 else None
        alike = record is not None and (record.family, record.payload_bytes) == (family, size)
        if record is None or not alike or record.stored_at_s < oldest_s:
            return None
        place = pool.view(record.offset, size)
        if len(place) != size:
            return None
        places.append(place)
        checksums.append(record.block.checksum)
    return places, checksums


def copy_out(ids: bytes, places: Sequence[memoryview], checksums: Sequence[int], into: Sequence[memoryview]) -> int:
    """How many were whole, up to the first that was not."""
    for number, (block_id, place, expected, view) in enumerate(
        zip(split_block_ids(ids), places, checksums, into, strict=False)
    ):
        if copy_summed(view, place, block_id) != expected:
            return number
    return len(places)


def copy_in(ids: bytes, places: Sequence[memoryview | None], payloads: Sequence[memoryview]) -> list[int]:
    """Their checksums; 0 for what has no place."""
    return [
        0 if place is None else copy_summed(place, payload, block_id)
        for block_id, place, payload in zip(split_block_ids(ids), places, payloads, strict=True)
    ]


async def called_off(tasks: "Sequence[asyncio.Task[int]]") -> None:
    """On return none of them uses a buffer any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
