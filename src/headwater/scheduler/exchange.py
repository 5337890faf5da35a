"""The KV blocks that a scheduler exchanges with agents outside the engine. See `headwater.scheduler.outside`.

Nothing here waits, and nobody else waits for what happens here: a sequence that loads has all its blocks from the
start, and whoever reads or writes outside holds blocks for a bounded time or until it says so.
"""

from collections.abc import Callable

from headwater.kv.holds import Holds
from headwater.kv.pool import BlockPool
from headwater.scheduler.entry import Entry, State
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.outside import (
    BlocksCommitted,
    BlocksExported,
    Export,
    ExportWaits,
    Held,
    KvNews,
    LoadEnd,
    LoadEnded,
    LoadStarted,
)
from headwater.scheduler.roster import Roster
from headwater.types import BLOCK_ID_BYTES

WORD_S = 0.5
"""Between two words to the readers of what waits in line."""

Commit = Callable[[Entry, int], None]
"""Let the blocks of an entry be found that are full now, from a number on."""


class Exchange:
    """Events of outside agents in, news for them out."""

    def __init__(self, roster: Roster, limits: SchedulerLimits, commit: Commit) -> None:
        self.watched = False
        """Whether somebody wants to know of every committed block."""
        self._roster = roster
        self._block_size = limits.block_size
        self._block_ids = limits.prefix_caching
        self._commit = commit
        self._news: list[KvNews] = []
        self._num_holds = 0
        self._next_word = 0.0

    @property
    def holds(self) -> Holds:
        return self._roster.holds

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def take_news(self) -> list[KvNews]:
        """What happened since the last call, in order."""
        news, self._news = self._news, []
        return news

    # ---- loading

    def arrived(self, stream: int, num_blocks: int) -> None:
        """The first blocks of a loading sequence, counted from its start, have their content."""
        entry = self._loading(stream)
        if entry is None:
            return
        first = entry.num_computed_tokens // self._block_size
        num_blocks = min(num_blocks, (entry.num_tokens - 1) // self._block_size)
        if num_blocks > first:
            self._roster.leaders.stop(entry)
            entry.num_computed_tokens = num_blocks * self._block_size
            self._commit(entry, first)
            self._roster.leaders.lead(entry)

    def loaded(self, stream: int, num_blocks: int, *, cached: bool = True) -> None:
        """So many have arrived, and no more will: the rest is computed here. `cached`: they come out of a cache."""
        self.arrived(stream, num_blocks)
        entry = self._loading(stream)
        if entry is not None:
            if cached:
                self._note_cached(entry, entry.num_computed_tokens)
            self._roster.prefill(entry)

    def prefilled(self, stream: int, num_cached_tokens: int) -> Entry | None:
        """All blocks have arrived: the sequence decodes, and lacks only its first token."""
        entry = self._loading(stream)
        if entry is None:
            return None
        first = entry.num_computed_tokens // self._block_size
        entry.num_computed_tokens = entry.num_tokens
        self._note_cached(entry, num_cached_tokens)
        self._commit(entry, first)
        self._roster.decode(entry)
        return entry

    def stopped(self, stream: int) -> None:
        """Whoever loaded for this sequence writes no more."""
        self.holds.release(("load", stream))

    def started(self, entry: Entry, now: float) -> None:
        """Told by the scheduler: a sequence was admitted."""
        if entry.state is State.LOADING and entry.load_s is not None:
            entry.load_until = now + entry.load_s
            first = entry.num_computed_tokens // self._block_size
            self._news.append(LoadStarted(entry.stream, first, tuple(entry.block_table[first:]), entry.num_tokens))
        if entry.export is not None:
            self.announce(entry, entry.export)

    def leave(self, entry: Entry, reason: LoadEnd) -> None:
        """Told by the scheduler: a sequence is about to leave the state it is in."""
        if entry.load_s is not None:
            self._news.append(LoadEnded(entry.stream, reason))

    def refused(self, stream: int) -> None:
        """A sequence that was to load was not taken."""
        self._news.append(LoadEnded(stream, "aborted"))

    def late(self, now: float) -> list[Entry]:
        """Sequences that have been loading for too long."""
        return [entry for entry in self._roster.loading if entry.load_until <= now]

    def _loading(self, stream: int) -> Entry | None:
        entry = self._roster.by_stream.get(stream)
        return entry if entry is not None and entry.state is State.LOADING else None

    def _note_cached(self, entry: Entry, num_tokens: int) -> None:
        """Tokens of the prompt that were not computed anew, here or elsewhere."""
        cached = min(num_tokens, entry.num_prompt_tokens)
        if entry.unreported_cached_tokens is not None and cached > entry.num_cached_tokens:
            entry.num_cached_tokens = entry.unreported_cached_tokens = cached

    # ---- reading

    def committed(self, entry: Entry, first: int, last: int) -> None:
        """Told by the scheduler: blocks of a sequence are full."""
        if self.watched:
            ids = entry.block_ids[first * BLOCK_ID_BYTES : last * BLOCK_ID_BYTES] if self._block_ids else b""
            self._news.append(BlocksCommitted(entry.stream, first, tuple(entry.block_table[first:last]), bytes(ids)))
        if entry.export is not None:
            self.announce(entry, entry.export)

    def announce(self, entry: Entry, export: Export, *, all_blocks: bool = False) -> None:
        """Tell the reader of an exported sequence what it can read now; `all_blocks`: up to its last token."""
        computed = entry.num_computed_tokens
        last = -(-computed // self._block_size) if all_blocks else computed // self._block_size
        first = max(export.first_block, export.num_announced)
        if last > first:
            export.num_announced = last
            self._news.append(BlocksExported(entry.stream, first, tuple(entry.block_table[first:last])))

    def tell_waiting(self, now: float) -> None:
        """Tell the readers of exported sequences that these are in line, if it is time to."""
        if now < self._next_word:
            return
        self._next_word = now + WORD_S
        ahead, tokens = len(self._roster.prefilling), 0
        for entry in self._roster.prefilling:
            tokens += entry.num_tokens - entry.num_computed_tokens
        for entry in self._roster.waiting:
            tokens += entry.num_tokens
            if entry.export is not None:
                self._news.append(ExportWaits(entry.stream, ahead, tokens))
            ahead += 1

    def hold(self, block_id: bytes, until: float) -> Held:
        """Keep a block and all before it; none when it is not here (any more)."""
        blocks = self._pool.ancestry(block_id)
        self._num_holds += 1
        self.holds.hold(("read", self._num_holds), blocks, until)
        return Held(self._num_holds, tuple(blocks))

    def drop(self, hold: int) -> None:
        self.holds.release(("read", hold))

    @property
    def _pool(self) -> BlockPool:
        return self._roster.pool
