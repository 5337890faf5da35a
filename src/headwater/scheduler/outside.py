"""What agents outside the engine do with the KV blocks of a sequence, and what they are told.

Loading: a sequence whose missing blocks come from elsewhere is admitted with blocks for all its tokens and then waits
without being computed. Whoever loads fills the blocks and says how many have arrived, counted from the start.

    LoadStarted -> arrived* -> prefilled             all is here, and the first token too: it decodes
                            -> loaded                the rest is computed here
                -> LoadEnded -> stopped              the sequence needs it no more, or it is too late

The loader may write until it says `prefilled`, `loaded` or `stopped`, and the blocks that have not arrived are given to
nobody before that.

Exporting: while a sequence waits in line, its reader is told so now and then. Then its blocks are announced as they are
committed. The reader may read what was announced until it releases the stream, or until the time given with the
request: whatever happens to the sequence meanwhile.
"""

from dataclasses import dataclass
from typing import Literal

from headwater.protocol.request import TokenLogprobs

LoadEnd = Literal["aborted", "preempted", "late"]


@dataclass(frozen=True, slots=True)
class LoadStarted:
    """A loading sequence has its blocks."""

    stream: int
    first_block: int
    """Blocks before it are here already."""
    blocks: tuple[int, ...]
    """Numbers of the missing ones, in order; the last one may be for a part of a block."""
    num_tokens: int
    """Of the whole sequence."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """Stop writing, then say `stopped`."""

    stream: int
    reason: LoadEnd


@dataclass(frozen=True, slots=True)
class BlocksCommitted:
    """Full blocks of a sequence have their content."""

    stream: int
    first_block: int
    blocks: tuple[int, ...]
    block_ids: bytes
    """Of these blocks; empty without prefix caching."""


@dataclass(frozen=True, slots=True)
class BlocksExported:
    """Blocks of an exported sequence can be read. The last ones come with the first token, or before it."""

    stream: int
    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExportWaits:
    """An exported sequence is still in line: this engine goes on, and will come to it."""

    stream: int
    num_ahead: int
    """Sequences that prefill or wait before it."""
    tokens_ahead: int
    """To be computed until its first token, its own included."""


KvNews = LoadStarted | LoadEnded | BlocksCommitted | BlocksExported | ExportWaits


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that were found and are held."""

    hold: int
    blocks: tuple[int, ...]
    """From the start of the sequence on."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What comes with a prompt that was computed elsewhere."""

    token_id: int
    logprob: TokenLogprobs | None = None
    num_cached_tokens: int = 0
    """Of the prompt, found in the cache there."""


@dataclass(slots=True)
class Export:
    """Of one sequence: what is to be announced, and how long it is kept for the reader."""

    first_block: int
    """Blocks before it are not wanted."""
    until: float
    num_announced: int = 0
    """Blocks from the sequence's start on that the reader knows of, or does not want."""
