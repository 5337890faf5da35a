"""A few bytes for every KV block of the mocker that say which prefix it holds.

So the mocker has KV that matters: a block that was not moved, or was damaged on its way, changes what comes out. A mark
is made from the mark of the block before it and the tokens in the block, so it stands for the whole prefix.
"""

from zlib import crc32

from headwater.engines.base import KvMemory
from headwater.scheduler.plan import Sequence
from headwater.transfer.memory import allocate

MARK_BYTES = 8


class KvMarks:
    """One number per block: the sum of the prefix, and how many tokens of the block it covers."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._memory = allocate(num_blocks * MARK_BYTES, lazily=True)
        assert self._memory.view is not None
        self._bytes = memoryview(self._memory.view)
        self._marks = self._bytes.cast("Q")

    def memory(self, modelled_block_bytes: int, modelled_bytes_per_s: float) -> KvMemory:
        """For the KV port: as if the blocks had so many bytes."""
        return KvMemory(
            self._num_blocks, MARK_BYTES, self._memory, self._bytes, modelled_block_bytes, modelled_bytes_per_s
        )

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """Tokens from `start` to `end` were computed."""
        size, marks, table, token_ids = self._block_size, self._marks, sequence.block_table, sequence.token_ids
        first = start // size
        total = marks[table[first - 1]] & 0xFFFFFFFF if first else 0
        for number in range(first, -(-end // size)):
            tokens = token_ids[number * size : min((number + 1) * size, end)]
            total = crc32(tokens.tobytes(), total)
            marks[table[number]] = total | len(tokens) << 32

    def agree(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the blocks hold the first tokens of the sequence."""
        size, marks, table, token_ids = self._block_size, self._marks, sequence.block_table, sequence.token_ids
        total = 0
        for number in range(-(-num_tokens // size)):
            tokens = token_ids[number * size : min((number + 1) * size, num_tokens)]
            total = crc32(tokens.tobytes(), total)
            if marks[table[number]] != total | len(tokens) << 32:
                return False
        return True

    def close(self) -> None:
        self._marks.release()
        self._bytes.release()
        self._memory.release()
