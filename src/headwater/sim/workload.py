"""Simulated requests: lengths, arrival and block identity, no text."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import pack

from headwater.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceRow
from headwater.types import BLOCK_ID_BYTES, TOKEN_ID_BYTES

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: multiplying by it spreads consecutive numbers evenly (Knuth)."""
_LOW = (1 << 20) - 1
_HIGH = ((1 << 64) - 1) ^ _LOW


@dataclass(frozen=True, slots=True)
class SimRequest:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: bytes
    """Of the full blocks of the prompt."""
    session_id: str | None = None
    answer_ids: bytes = b""
    """Of the blocks that the answer fills, as far as a later request may ask for them. Engines find them in the cache
    like any other; without them nothing of the answer is found."""

    tenant: str = ""

    def prompt(self) -> bytes:
        """Token ids that mean nothing: blocks have their ids already."""
        return bytes(TOKEN_ID_BYTES * self.prompt_tokens)


def from_trace(rows: Iterable[TraceRow], block_size: int) -> Iterator[SimRequest]:
    """Rows with hash ids share the blocks those name; rows without share nothing. Lengths of 0 become 1."""
    for number, row in enumerate(rows):
        prompt_tokens = max(1, row.input_tokens)
        yield SimRequest(
            row.at_s, prompt_tokens, max(1, row.output_tokens), _block_ids(number, row, prompt_tokens, block_size)
        )


def _block_ids(number: int, row: TraceRow, prompt_tokens: int, block_size: int) -> bytes:
    num_blocks = prompt_tokens // block_size
    if not row.hash_ids:
        return b"".join([_block_id(number, number * num_blocks + block, 1) for block in range(num_blocks)])
    # The id of a block is where its end falls: the trace's ids are chained, so the last one names the whole prefix.
    hash_ids, last = row.hash_ids, len(row.hash_ids) - 1
    ends = range(block_size - 1, num_blocks * block_size, block_size)
    return b"".join([_end_id(hash_ids[min(end // MOONCAKE_BLOCK_TOKENS, last)], end, block_size) for end in ends])


def _end_id(hash_id: int, end: int, block_size: int) -> bytes:
    offset = end % MOONCAKE_BLOCK_TOKENS
    return _block_id(hash_id, hash_id * MOONCAKE_BLOCK_TOKENS // block_size + offset // block_size, offset << 1)


def _block_id(name: int, number: int, space: int) -> bytes:
    """An id for a block, spread over the whole range as hashes are, since routers divide that range among workers.

    `number`: consecutive numbers for consecutive blocks. The low bits are these, so that what comes together lies
    together in hash tables, which makes a simulated cluster faster by a tenth.
    """
    return pack("<QQ", name * _GOLDEN & _HIGH | number & _LOW, space)


assert len(pack("<QQ", 0, 0)) == BLOCK_ID_BYTES
