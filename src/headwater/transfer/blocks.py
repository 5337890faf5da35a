"""Descriptors: which blocks of which region, in a few bytes. Pure.

A block with index i of a region starts at `base + i * stride` and is `block_bytes` long, so one descriptor also names
slices of blocks (a smaller `block_bytes`, a shifted `base`), as between unequal tensor-parallel sizes. Indices are
kept as runs (first, count): 8 bytes per run, whatever its length.

Both sides check: `check()` refuses what does not lie within the region, whoever wrote the descriptor.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from sys import byteorder
from typing import Annotated

import msgspec

from headwater.errors import TransferRefused

MAX_CHUNK_SPANS = 1000
"""Fits the kernel's limit of 1,024 vectors per call, with room for a header."""
MAX_CHUNK_BYTES = 8 << 20
"""What is moved between two looks at deadlines and cancellation."""
MAX_RUNS = 1 << 17

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class Blocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one region of one life of one agent. May be sent anywhere."""

    agent: str
    generation: int
    region: int
    base: Size
    stride: Size
    block_bytes: Size
    runs: bytes
    """Pairs of little-endian u32: first index, count."""

    @property
    def count(self) -> int:
        return sum(_unpack(self.runs)[1::2])

    @property
    def num_bytes(self) -> int:
        return self.count * self.block_bytes

    def indices(self) -> list[int]:
        return [index for first, count in _pairs(self.runs) for index in range(first, first + count)]

    def select(self, positions: Sequence[int]) -> "Blocks":
        """The blocks at these positions of the list, in this order."""
        indices = self.indices()
        try:
            chosen = [indices[position] for position in positions]
        except IndexError:
            raise TransferRefused(f"a position among {max(positions)} is beyond {len(indices)} blocks") from None
        return msgspec.structs.replace(self, runs=pack_runs(chosen))

    def check(self, region_bytes: int) -> None:
        """Raise `TransferRefused` unless every block lies within a region of that size."""
        if not 0 < self.block_bytes <= self.stride:
            raise TransferRefused(f"blocks of {self.block_bytes} bytes do not fit a stride of {self.stride}")
        if not self.runs or len(self.runs) % 8 or len(self.runs) > 8 * MAX_RUNS:
            raise TransferRefused(f"{len(self.runs)} bytes of runs: expected 8 to {8 * MAX_RUNS}, in steps of 8")
        numbers = _unpack(self.runs)
        if not all(numbers[1::2]):
            raise TransferRefused("a run without blocks")
        end = self.base + (max(map(add, numbers[::2], numbers[1::2])) - 1) * self.stride + self.block_bytes
        if end > region_bytes:
            raise TransferRefused(f"blocks end at byte {end}, the region at {region_bytes}")


def pack_runs(indices: Iterable[int]) -> bytes:
    """Indices in the order given, neighbours joined. Raises `TransferRefused` for what is no block index."""
    runs: list[int] = []
    after: int | None = None
    try:
        if isinstance(indices, range) and indices.step == 1 and len(indices):
            return _pack([indices.start, len(indices)])
        for index in indices:
            if index == after:
                runs[-1] += 1
            else:
                runs += (index, 1)
            after = index + 1
        return _pack(runs)
    except (OverflowError, TypeError):
        raise TransferRefused("block indices are integers from 0 to 4,294,967,295") from None


class Chunk:
    """A part of a transfer: spans of equal length at offsets into the two regions."""

    __slots__ = ("lengths", "local", "num_bytes", "remote")

    def __init__(self) -> None:
        self.local: list[int] = []
        self.remote: list[int] = []
        self.lengths: list[int] = []
        self.num_bytes = 0

    def add(self, local: int, remote: int, length: int) -> None:
        self.local.append(local)
        self.remote.append(remote)
        self.lengths.append(length)
        self.num_bytes += length


def chunks_of(local: Blocks, remote: Blocks) -> list[Chunk]:
    """Both lists side by side, neighbours joined where they are on both sides, in parts of bounded size."""
    chunks = [Chunk()]
    for local_offset, remote_offset, length in _spans(local, remote):
        done = 0
        while done < length:
            chunk = chunks[-1]
            room = MAX_CHUNK_BYTES - chunk.num_bytes
            if room == 0 or len(chunk.lengths) == MAX_CHUNK_SPANS:
                chunks.append(Chunk())
                continue
            part = min(room, length - done)
            chunk.add(local_offset + done, remote_offset + done, part)
            done += part
    return chunks


def joined(offsets: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """The same bytes of one side with neighbouring spans joined."""
    starts, sizes = [offsets[0]], [lengths[0]]
    end = offsets[0] + lengths[0]
    for offset, length in zip(offsets[1:], lengths[1:], strict=True):
        if offset == end:
            sizes[-1] += length
        else:
            starts.append(offset)
            sizes.append(length)
        end = offset + length
    return starts, sizes


def check_pair(local: Blocks, remote: Blocks) -> int:
    """Raise `TransferRefused` unless the lists match; how many blocks they have."""
    if local.block_bytes != remote.block_bytes:
        raise TransferRefused(f"blocks of {local.block_bytes} bytes here, of {remote.block_bytes} there")
    count, there = local.count, remote.count
    if count != there:
        raise TransferRefused(f"{count} blocks here, {there} there")
    return count


def _spans(local: Blocks, remote: Blocks) -> Iterator[tuple[int, int, int]]:
    size, here, there = local.block_bytes, local.stride, remote.stride
    dense = here == there == size
    theirs = _pairs(remote.runs)
    their_first, their_left = next(theirs)
    for first, left in _pairs(local.runs):
        while left:
            if not their_left:
                their_first, their_left = next(theirs)
            count = min(left, their_left)
            at, to = local.base + first * here, remote.base + their_first * there
            if dense:
                yield at, to, count * size
            else:
                for _ in range(count):
                    yield at, to, size
                    at += here
                    to += there
            first, their_first = first + count, their_first + count
            left, their_left = left - count, their_left - count


def _pairs(runs: bytes) -> Iterator[tuple[int, int]]:
    numbers = _unpack(runs)
    return zip(numbers[::2], numbers[1::2], strict=True)


def _pack(numbers: list[int]) -> bytes:
    packed = array("I", numbers)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(runs: bytes) -> "array[int]":
    numbers = array("I", runs)
    if byteorder == "big":
        numbers.byteswap()
    return numbers
