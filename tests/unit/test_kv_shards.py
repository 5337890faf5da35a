"""Blocks of shards made of blocks of other shards, compared with slices of the whole."""

from pathlib import Path

import numpy as np
import pytest
from test_kv_node import running

from headwater.errors import ConfigError
from headwater.kv.block import ROOT, Family
from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.node.resliced import load_resliced
from headwater.kv.node.store import Piece
from headwater.kv.shards import ShardShape, heads_of, reslice, shard_layout
from headwater.runtime.conformance import run_leak_checked
from kv_fixtures import buffers

SHAPE = ShardShape(num_planes=6, num_heads=8, head_bytes=64)


def shard(whole: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", rank: int, size: int) -> bytes:
    """What a worker holds of a block with axes (plane, head, bytes)."""
    heads = heads_of(rank, size, SHAPE.num_heads)
    return whole[:, heads.start : heads.stop].tobytes()


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("stored_size", [1, 2, 4, 8, 16])
def test_a_shard_is_put_together_from_any_other_division(size: int, stored_size: int) -> None:
    whole = np.random.default_rng(1).integers(0, 256, (6, 8, 64), dtype=np.uint8)
    for rank in range(size):
        made = bytearray(SHAPE.block_bytes(size))
        for one in reslice(SHAPE, rank, size, stored_size):
            source = shard(whole, one.rank, stored_size)
            made[one.target : one.target + one.num_bytes] = source[one.source : one.source + one.num_bytes]
        assert made == shard(whole, rank, size)


def test_what_cannot_be_divided_is_refused() -> None:
    for rank, size in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ConfigError, match="cannot be divided"):
            heads_of(rank, size, 8)


def test_layouts_of_shards_have_names_of_their_own() -> None:
    assert shard_layout("f16.b16", 0, 1) == "f16.b16"
    assert len({shard_layout("f16.b16", rank, size) for size in (1, 2, 4) for rank in range(size)}) == 7


def test_one_worker_loads_what_two_have_stored(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as node:
            client = await node.client()
            blocks = np.random.default_rng(2).integers(0, 256, (12, 6, 8, 64), dtype=np.uint8)
            tokens = bytes(4 * 16 * 12)
            sources: dict[int, Piece] = {}
            for rank in range(2):
                layout = shard_layout("u8.b16", rank, 2)
                family = Family("m", layout, "", SHAPE.block_bytes(2))
                sources[rank] = Piece(family, chain_block_ids(namespace("m", layout), tokens, 16), 0, ROOT)
                payloads = [memoryview(shard(block, rank, 2)) for block in blocks[: 12 - 2 * rank]]
                stored = sources[rank].part(0, len(payloads))
                assert await client.offer(stored, payloads) == len(payloads)
            into = buffers(12, SHAPE.block_bytes(1))
            slices = reslice(SHAPE, 0, 1, 2)
            assert await load_resliced(client, sources, slices, into, timeout_s=5.0) == 10, "as far as both reach"
            assert into[:10] == [memoryview(block.tobytes()) for block in blocks[:10]]

    run_leak_checked(check())
