"""`headwater kv bench`, at sizes where writers would run into the part of a tier that they may hold."""

import asyncio
from pathlib import Path

import pytest

from headwater.kv.node.benchmark import Buffers, measure_disk


@pytest.mark.parametrize(("block_bytes", "num_blocks"), [(64 << 10, 256), (16 << 20, 3)])
def test_the_disk_tier_has_room_for_all_that_is_written_at_once(
    tmp_path: Path, block_bytes: int, num_blocks: int
) -> None:
    buffers = Buffers(block_bytes, num_blocks)
    try:
        rows = asyncio.run(measure_disk(tmp_path, buffers, 1, direct=False))
    finally:
        buffers.release()
    assert [row.what for row in rows] == ["disk pwritev", "disk put", "disk preadv", "disk get"]
    assert all(row.gb_s > 0 for row in rows)
