"""Where payloads lie in one flat range of bytes: chunks of equal size, each cut into slots of one size.

Blocks of one model are all alike, so slots of the exact size (rounded up to a page) waste next to nothing and never
fragment; several models share the range by owning different chunks. A chunk whose last slot is freed belongs to
nobody again. Offsets are aligned to pages, for direct I/O.
"""

from array import array

PAGE_BYTES = 4096
_MIN_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 256 << 20
_CHUNKS_WANTED = 16


def chunk_bytes_for(num_bytes: int) -> int:
    """About a 16th of the range, a power of two from 1 to 256 MiB, at most the range itself. No block can be larger."""
    wanted = 1 << max(0, (num_bytes // _CHUNKS_WANTED).bit_length() - 1)
    chosen = max(_MIN_CHUNK_BYTES, min(_MAX_CHUNK_BYTES, wanted))
    return min(chosen, num_bytes // PAGE_BYTES * PAGE_BYTES)


def slot_bytes_for(payload_bytes: int) -> int:
    return -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


class _Chunk:
    __slots__ = ("first_untouched", "freed", "num_taken", "owners", "slot_bytes")

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.owners = array("I", bytes(4 * num_slots))
        """Per slot the number of its owner + 1; 0 is free."""
        self.freed: array[int] = array("I")
        self.first_untouched = 0
        self.num_taken = 0

    @property
    def full(self) -> bool:
        return self.num_taken == len(self.owners)

    def take(self, owner: int) -> int:
        if self.freed:
            slot = self.freed.pop()
        else:
            slot = self.owners.index(0, self.first_untouched)
            self.first_untouched = slot + 1
        self.owners[slot] = owner + 1
        self.num_taken += 1
        return slot


class Space:
    """`num_bytes` bytes; what is left over behind the last whole chunk is not used."""

    def __init__(self, num_bytes: int, chunk_bytes: int) -> None:
        if not 0 < chunk_bytes <= num_bytes or chunk_bytes % PAGE_BYTES:
            raise ValueError(f"chunks of {chunk_bytes} bytes do not fit a space of {num_bytes}")
        self.chunk_bytes = chunk_bytes
        self.num_chunks = num_bytes // chunk_bytes
        self.used_bytes = 0
        """In whole slots."""
        self._chunks: dict[int, _Chunk] = {}
        self._unowned = list(range(self.num_chunks - 1, -1, -1))
        self._roomy: dict[int, dict[int, None]] = {}
        """Per slot size, the chunks that have a free slot, as an ordered set."""

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    def allocate(self, payload_bytes: int, owner: int) -> int | None:
        """The offset of a slot that was free, or None when something has to go first."""
        slot_bytes = slot_bytes_for(payload_bytes)
        roomy = self._roomy.get(slot_bytes)
        if roomy:
            number = next(iter(roomy))
        else:
            if not self._unowned or slot_bytes > self.chunk_bytes:
                return None
            number = self._own(self._unowned.pop(), slot_bytes)
            roomy = self._roomy[slot_bytes]
        chunk = self._chunks[number]
        slot = chunk.take(owner)
        self.used_bytes += slot_bytes
        if chunk.full:
            del roomy[number]
        return number * self.chunk_bytes + slot * slot_bytes

    def free(self, offset: int) -> None:
        number, chunk, slot = self._locate(offset)
        if not chunk.owners[slot]:
            raise ValueError(f"nothing is allocated at {offset}")
        chunk.owners[slot] = 0
        chunk.freed.append(slot)
        chunk.num_taken -= 1
        self.used_bytes -= chunk.slot_bytes
        roomy = self._roomy[chunk.slot_bytes]
        roomy[number] = None
        if not chunk.num_taken:
            del roomy[number], self._chunks[number]
            self._unowned.append(number)

    def claim(self, offset: int, payload_bytes: int, owner: int) -> bool:
        """Take exactly this slot, before any `allocate`. False if it overlaps another or does not fit."""
        number, within = divmod(offset, self.chunk_bytes)
        slot_bytes = slot_bytes_for(payload_bytes)
        if number >= self.num_chunks or within % slot_bytes or within + slot_bytes > self.chunk_bytes:
            return False
        if number not in self._chunks:
            self._unowned.remove(number)
            self._own(number, slot_bytes)
        chunk, slot = self._chunks[number], within // slot_bytes
        if chunk.slot_bytes != slot_bytes or chunk.owners[slot]:
            return False
        chunk.owners[slot] = owner + 1
        chunk.num_taken += 1
        self.used_bytes += slot_bytes
        if chunk.full:
            del self._roomy[slot_bytes][number]
        return True

    def fits(self, payload_bytes: int) -> bool:
        """Whether such a payload could lie in an empty space."""
        return slot_bytes_for(payload_bytes) <= self.chunk_bytes

    def neighbours(self, offset: int) -> list[int]:
        """Owners of all slots in the same chunk, the one at `offset` included."""
        return self.owners_of_chunk(offset // self.chunk_bytes)

    def owners_of_chunk(self, number: int) -> list[int]:
        chunk = self._chunks.get(number)
        return [owner - 1 for owner in chunk.owners if owner] if chunk else []

    def slot_bytes_at(self, offset: int) -> int:
        return self._chunks[offset // self.chunk_bytes].slot_bytes

    def check(self) -> None:
        """Counts agree with what is taken. For tests."""
        assert self.used_bytes == sum(chunk.num_taken * chunk.slot_bytes for chunk in self._chunks.values())
        assert sorted([*self._unowned, *self._chunks]) == list(range(self.num_chunks))
        for number, chunk in self._chunks.items():
            assert chunk.num_taken == sum(map(bool, chunk.owners)) > 0
            assert (number in self._roomy[chunk.slot_bytes]) != chunk.full

    def _own(self, number: int, slot_bytes: int) -> int:
        self._chunks[number] = _Chunk(slot_bytes, self.chunk_bytes // slot_bytes)
        self._roomy.setdefault(slot_bytes, {})[number] = None
        return number

    def _locate(self, offset: int) -> tuple[int, _Chunk, int]:
        number, within = divmod(offset, self.chunk_bytes)
        chunk = self._chunks[number]
        slot, rest = divmod(within, chunk.slot_bytes)
        if rest:
            raise ValueError(f"{offset} is not where a slot begins")
        return number, chunk, slot
