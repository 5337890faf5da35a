"""The table of one tier's committed blocks: a record of 64 bytes per block and a hash index from id to record.

Both live in buffers that the caller gives: plain memory, shared memory (where other processes read them while the one
writer writes), or a mapped file (where records outlive the process). A record counts only while its state byte says
so, and that byte is written last and cleared first: a writer that dies between any two instructions leaves a record
that is either whole or absent.

Readers in other processes take no lock. What they see may be out of date, or for an instant lack a block that is
there; it is never trusted for more than a forecast.

Records are little-endian and numbered from 0. The index holds record number + 1 in open addressing, at most half
full; ids are hashes already, so their first bytes pick the place. Costs per block: 64 + 8 to 16 bytes.
"""

from array import array
from collections.abc import Container, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from headwater.kv.block import Block
from headwater.types import BLOCK_ID_BYTES

RECORD_BYTES = 64
_RECORD = Struct("<16s16sQQIIIHBx")
_PAYLOAD = Struct("<32xQQI4xIHBx")
"""Of a record: checksum, offset, size, when it was stored, family, state."""
_ID_WORDS = RECORD_BYTES // 8
_OFFSET = Struct("<Q")
_WORD = Struct("=Q")
_OFFSET_AT = 40
_FAMILY_AT = 60
_STATE_AT = 62
_COMMITTED = 0xC7
"""Not a value that cleared or foreign memory is likely to hold."""
_MAX_PROBES = 512


class Record(NamedTuple):
    """What is known about one committed block and where it lies."""

    block: Block
    offset: int
    payload_bytes: int
    stored_at_s: int
    """Seconds since 1970."""
    family: int
    """A number that the owner of the table gives out."""


def index_bytes(capacity: int) -> int:
    """Size of the index buffer for so many records."""
    return 4 << max(4, (2 * capacity - 1).bit_length())


class BlockTable:
    """`records`: a multiple of 64 bytes; `index`: `index_bytes(capacity)` bytes."""

    def __init__(self, records: memoryview, index: memoryview) -> None:
        self.capacity = len(records) // RECORD_BYTES
        self._records = records
        self._words = records.cast("Q")
        self._index = index.cast("I")
        self._mask = len(self._index) - 1
        self._free: array[int] = array("I")
        self._high_water = 0
        self.num_blocks = 0

    # Looking up: safe in any process

    def find(self, ids: bytes, number: int = 0) -> int:
        """The record of the `number`-th joined id, or -1."""
        start = number * BLOCK_ID_BYTES
        pair = memoryview(ids[start : start + BLOCK_ID_BYTES]).cast("Q")
        return self._find(pair[0], pair[1])

    def find_all(self, ids: bytes) -> list[int]:
        """The record per joined id, or -1."""
        words = memoryview(ids).cast("Q").tolist()
        find = self._find
        return [find(first, second) for first, second in zip(words[::2], words[1::2], strict=True)]

    def known(self, ids: bytes) -> bytes:
        """One byte per joined id: 1 if there is a record, else 0."""
        return bytes(record >= 0 for record in self.find_all(ids))

    def num_leading(self, ids: bytes) -> int:
        """How many of the joined ids, from the first on, have a record without a gap."""
        words = memoryview(ids).cast("Q").tolist()
        for number in range(0, len(words), 2):
            if self._find(words[number], words[number + 1]) < 0:
                return number // 2
        return len(words) // 2

    def read(self, record: int) -> Record | None:
        """None if there is no committed block (any more)."""
        fields = _RECORD.unpack_from(self._records, record * RECORD_BYTES)
        block_id, parent, checksum, offset, payload_bytes, position, stored_at_s, family, state = fields
        if state != _COMMITTED:
            return None
        return Record(Block(block_id, parent, position, checksum), offset, payload_bytes, stored_at_s, family)

    def payloads(self, ids: bytes, family: int, size: int, oldest_s: float) -> tuple[list[int], list[int]] | None:
        """Offsets and checksums of the payloads of all these joined ids; None unless all are here, of that family and
        size, and stored since then."""
        offsets: list[int] = []
        checksums: list[int] = []
        records, unpack = self._records, _PAYLOAD.unpack_from
        for number in self.find_all(ids):
            if number < 0:
                return None
            checksum, offset, its_size, stored_at_s, its_family, state = unpack(records, number * RECORD_BYTES)
            if state != _COMMITTED or its_family != family or its_size != size or stored_at_s < oldest_s:
                return None
            offsets.append(offset)
            checksums.append(checksum)
        return offsets, checksums

    def offset_of(self, record: int) -> int:
        return int(_OFFSET.unpack_from(self._records, record * RECORD_BYTES + _OFFSET_AT)[0])

    def snapshot(self) -> bytes:
        """All records as they are at this instant, for `residents`: a plain copy, fast however many there are."""
        return bytes(self._records[: self._high_water * RECORD_BYTES])

    def families(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """(record number, family) of the committed blocks among these records."""
        end = min(end, self._high_water)
        if start >= end:
            return
        part = self._records[start * RECORD_BYTES : end * RECORD_BYTES]
        states, families = part[_STATE_AT::RECORD_BYTES], part.cast("H")[_FAMILY_AT // 2 :: RECORD_BYTES // 2]
        for number, (state, family) in enumerate(zip(states.tolist(), families.tolist(), strict=True), start):
            if state == _COMMITTED:
                yield number, family

    # Changing: one writer

    def take(self) -> int:
        """A free record number, or -1 when the table is full."""
        if self._free:
            return self._free.pop()
        if self._high_water == self.capacity:
            return -1
        self._high_water += 1
        return self._high_water - 1

    def give_back(self, record: int) -> None:
        """Undo `take` for a record that was not inserted."""
        self._free.append(record)

    def insert(self, number: int, record: Record) -> bool:
        """Make a block visible. False if the index is unreasonably crowded around its id."""
        place = self._vacancy(record.block.id)
        if place < 0:
            return False
        at = number * RECORD_BYTES
        block = record.block
        self._records[at + _STATE_AT] = 0
        packed = _RECORD.pack(
            block.id, block.parent, block.checksum, record.offset, record.payload_bytes,
            block.position, record.stored_at_s, record.family, 0,
        )  # fmt: skip
        self._records[at : at + RECORD_BYTES] = packed
        self._records[at + _STATE_AT] = _COMMITTED
        self._index[place] = number + 1
        self.num_blocks += 1
        return True

    def remove(self, number: int) -> None:
        """Make a block invisible. Its number stays taken until `give_back`."""
        self._records[number * RECORD_BYTES + _STATE_AT] = 0
        self._unlink(number)
        self.num_blocks -= 1

    def numbers(self, start: int = 0) -> Iterator[int]:
        """All records with a committed block, from number `start` on. The table may change between two steps."""
        for number in range(start, self._high_water):
            if self._records[number * RECORD_BYTES + _STATE_AT] == _COMMITTED:
                yield number

    def recover(self) -> Iterator[tuple[int, Record]]:
        """Walk the records that a former life left in the buffer; the caller answers each with `adopt` or `discard`.

        The last record in use bounds the walk, so it costs what is stored, not what could be.
        """
        states = bytes(self._records[_STATE_AT::RECORD_BYTES])
        self._high_water = states.rfind(_COMMITTED) + 1
        for number in range(self._high_water):
            record = self.read(number) if states[number] == _COMMITTED else None
            if record is None:
                self._free.append(number)
            else:
                yield number, record

    def adopt(self, number: int, record: Record) -> bool:
        """Index a recovered record; False for a second one of the same id."""
        if self.find(record.block.id) >= 0:
            return False
        place = self._vacancy(record.block.id)
        if place < 0:
            return False
        self._index[place] = number + 1
        self.num_blocks += 1
        return True

    def discard(self, number: int) -> None:
        """Clear a recovered record that cannot be used."""
        self._records[number * RECORD_BYTES + _STATE_AT] = 0
        self._free.append(number)

    def close(self) -> None:
        """Let the buffers go."""
        for view in (self._words, self._index, self._records):
            view.release()

    def check(self) -> None:
        """The index and the records say the same. Touches everything: for tests."""
        indexed = sorted(entry - 1 for entry in self._index if entry)
        committed = list(self.numbers())
        assert indexed == committed, "the index does not hold exactly the committed records"
        assert len(committed) == self.num_blocks, "the table has lost count"
        for number in committed:
            record = self.read(number)
            assert record is not None
            assert self.find(record.block.id) == number, "a committed block is not found under its id"
        free = set(self._free)
        assert len(free) == len(self._free), "a record is free twice"
        assert not free & set(committed), "a committed record is free"

    def _find(self, first: int, second: int) -> int:
        index, words, mask = self._index, self._words, self._mask
        place = first & mask
        while entry := index[place]:
            at = (entry - 1) * _ID_WORDS
            if words[at] == first and words[at + 1] == second:
                return entry - 1
            place = (place + 1) & mask
        return -1

    def _vacancy(self, block_id: bytes) -> int:
        place = self._home(block_id)
        for _ in range(_MAX_PROBES):
            if not self._index[place]:
                return place
            place = (place + 1) & self._mask
        return -1

    def _home(self, block_id: bytes) -> int:
        return int(_WORD.unpack_from(block_id)[0]) & self._mask

    def _unlink(self, number: int) -> None:
        """Take an entry out and close the gap, so that no search stops short."""
        index, words, mask = self._index, self._words, self._mask
        hole = words[number * _ID_WORDS] & mask
        while index[hole] != number + 1:
            hole = (hole + 1) & mask
        following = (hole + 1) & mask
        while entry := index[following]:
            home = words[(entry - 1) * _ID_WORDS] & mask
            if (following - home) & mask >= (following - hole) & mask:
                index[hole] = entry
                hole = following
            following = (following + 1) & mask
        index[hole] = 0


def records_in(snapshot: bytes) -> Iterator[Record]:
    """The committed blocks of a snapshot."""
    for fields in _RECORD.iter_unpack(snapshot):
        block_id, parent, checksum, offset, payload_bytes, position, stored_at_s, family, state = fields
        if state == _COMMITTED:
            yield Record(Block(block_id, parent, position, checksum), offset, payload_bytes, stored_at_s, family)


def residents(snapshot: bytes, hidden: Container[int] = ()) -> Iterator[tuple[bytes, bytes]]:
    """(id, parent) of the committed blocks of a snapshot, but for those of `hidden` families."""
    return ((record.block.id, record.block.parent) for record in records_in(snapshot) if record.family not in hidden)


def run_of(flags: Sequence[int]) -> int:
    """How many leading flags are set."""
    for number, flag in enumerate(flags):
        if not flag:
            return number
    return len(flags)
