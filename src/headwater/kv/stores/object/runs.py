"""How blocks lie in objects. Pure.

A *run* is an aligned stretch of one chain: blocks k*n to k*n+n-1. It is one object, and its name is the id of its last
block, which binds every block before it. So whoever knows the ids of a prompt knows the names of all objects that may
hold it, without a list and without an index, and two nodes that write the same run write the same object.

    header: magic, version, blocks, payload bytes, family, first position, id before it
            id and checksum of each block
            XXH3-64 of all that
    then the payloads, one after the other

Only whole runs are kept: what is left at the end of a chain is less than one object and cheap to compute again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from xxhash import xxh3_64_intdigest

from headwater.kv.block import Block, Family
from headwater.types import BLOCK_ID_BYTES

_MAGIC = b"HWKVRUN\0"
_VERSION = 2
_FIXED = Struct("<8sIIQ16sQ16s")
_ENTRY = Struct("<16sQ")
_SUM = Struct("<Q")
MIN_OBJECT_BYTES = 1 << 20
TARGET_OBJECT_BYTES = 8 << 20
USUAL_RUN_BLOCKS = 16
"""A run has more only where it would be smaller than an object should be."""
MAX_RUN_BLOCKS = 64
"""Tiny blocks make small objects rather than runs that no prompt fills."""


class DamagedRun(Exception):
    """The header of a run is not what was written."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """What all runs of a family have in common."""

    num_blocks: int
    payload_bytes: int
    family: bytes
    """See `family_digest`."""
    beside: bool = False
    """As of `Family`."""

    @property
    def header_bytes(self) -> int:
        return _FIXED.size + self.num_blocks * _ENTRY.size + _SUM.size

    @property
    def object_bytes(self) -> int:
        return self.header_bytes + self.num_blocks * self.payload_bytes

    def payload_offset(self, index: int) -> int:
        return self.header_bytes + index * self.payload_bytes

    def key(self, run: bytes) -> str:
        """The name of the object; `run` is the id of the last block."""
        return f"{self.folder}{run.hex()}"

    @property
    def folder(self) -> str:
        return f"{family_folder(self.family)}{self.num_blocks}/"


def run_shape(
    family: Family, *, min_bytes: int = MIN_OBJECT_BYTES, target_bytes: int = TARGET_OBJECT_BYTES
) -> RunShape:
    """The same on every node, so that all find the same objects."""
    payload = family.payload_bytes
    wanted = max(-(-min_bytes // payload), min(USUAL_RUN_BLOCKS, target_bytes // payload), 1)
    return RunShape(min(wanted, MAX_RUN_BLOCKS), payload, family_digest(family), family.beside)


def family_folder(digest: bytes) -> str:
    return f"runs/{digest.hex()}/"


def family_digest(family: Family) -> bytes:
    """16 bytes that stand for a family in names of objects."""
    digest = blake2b(digest_size=16, person=b"hw-kv-family")
    beside = ("beside",) if family.beside else ()
    for field in (family.model, family.layout, family.tenant, str(family.payload_bytes), *beside):
        encoded = field.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def encode_header(shape: RunShape, blocks: Sequence[Block]) -> bytes:
    """`blocks`: the whole run, in order."""
    first = blocks[0]
    fixed = _FIXED.pack(
        _MAGIC, _VERSION, shape.num_blocks, shape.payload_bytes, shape.family, first.position, first.parent
    )
    head = fixed + b"".join(_ENTRY.pack(block.id, block.checksum) for block in blocks)
    return head + _SUM.pack(xxh3_64_intdigest(head))


def decode_header(shape: RunShape, run: bytes, header: bytes | memoryview) -> list[Block]:
    """The blocks of a run. Raises `DamagedRun` unless it is the header of this very run."""
    if len(header) != shape.header_bytes:
        raise DamagedRun(f"{len(header)} bytes of header instead of {shape.header_bytes}")
    body = memoryview(header)[: -_SUM.size]
    if _SUM.unpack_from(header, len(body))[0] != xxh3_64_intdigest(body):
        raise DamagedRun("the checksum of the header differs")
    *kind, position, parent = _FIXED.unpack_from(body)
    if kind != [_MAGIC, _VERSION, shape.num_blocks, shape.payload_bytes, shape.family]:
        raise DamagedRun("the header is of another kind of run")
    blocks: list[Block] = []
    for number, (block_id, checksum) in enumerate(_ENTRY.iter_unpack(body[_FIXED.size :])):
        blocks.append(Block(block_id, parent, position + number, checksum))
        parent = block_id
    if parent != run:
        raise DamagedRun("the header is of another run")
    return blocks


def runs_within(shape: RunShape, ids: bytes, first: int) -> list[tuple[bytes, int]]:
    """The runs whose names are among `ids`, the blocks from position `first` on: (name, position where it starts)."""
    n = shape.num_blocks
    end = first + len(ids) // BLOCK_ID_BYTES
    found: list[tuple[bytes, int]] = []
    for start in range(first // n * n, end - n + 1, n):
        last = start + n - 1 - first
        found.append((ids[last * BLOCK_ID_BYTES : (last + 1) * BLOCK_ID_BYTES], start))
    return found
