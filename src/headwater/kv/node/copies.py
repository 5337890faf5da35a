"""What a client does on its threads: copies between buffers and the node's memory, each summed on the way."""

import asyncio
import os
from collections.abc import Sequence

from headwater.kv.stores.copying import copy_summed

_MANY_PROCESSORS = 5


def num_copiers() -> int:
    """Two threads where there are processors to spare, else one."""
    return 2 if len(os.sched_getaffinity(0)) >= _MANY_PROCESSORS else 1


def copy_out(
    memory: memoryview,
    size: int,
    ids: Sequence[bytes],
    offsets: Sequence[int],
    checksums: Sequence[int],
    into: Sequence[memoryview],
) -> int:
    """How many blocks of this size were whole, up to the first that was not. Raises `ValueError` for other buffers."""
    for number, (block_id, offset, expected, view) in enumerate(zip(ids, offsets, checksums, into, strict=False)):
        if copy_summed(view, memory[offset : offset + size], block_id) != expected:
            return number
    return len(offsets)


def copy_in(
    memory: memoryview, size: int, ids: Sequence[bytes], offsets: Sequence[int], payloads: Sequence[memoryview]
) -> list[int]:
    """The checksums of blocks of this size. Raises `ValueError` for another one: it has no place."""
    return [
        copy_summed(memory[offset : offset + size], payload, block_id)
        for block_id, offset, payload in zip(ids, offsets, payloads, strict=True)
    ]


async def called_off(tasks: "Sequence[asyncio.Task[int]]") -> None:
    """On return none of them uses a buffer any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
