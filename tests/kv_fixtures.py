"""Chains of blocks with payloads that can be told from their ids: used by tests and by children that are killed."""

from headwater.kv.block import ROOT, Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.identity import chain_block_ids, split_block_ids


def family_of(payload_bytes: int, tenant: str = "") -> Family:
    return Family("model", "layout", tenant, payload_bytes)


def chain(name: str, count: int) -> list[bytes]:
    return split_block_ids(chain_block_ids(name.encode().ljust(32, b".")[:32], bytes(4 * count), 1))


def payload_of(block_id: bytes, size: int) -> bytes:
    return (block_id * (size // len(block_id) + 1))[:size]


def blocks_of(ids: list[bytes], size: int) -> tuple[list[Block], list[memoryview]]:
    payloads = [memoryview(payload_of(block_id, size)) for block_id in ids]
    parents = [ROOT, *ids]
    blocks = [
        Block(block_id, parents[i], i, checksum(block_id, payload))
        for i, (block_id, payload) in enumerate(zip(ids, payloads, strict=True))
    ]
    return blocks, payloads


def buffers(count: int, size: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]
