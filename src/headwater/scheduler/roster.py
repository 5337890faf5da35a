"""Every open sequence, in the list of its state, and the blocks it holds. All transitions are here.

Blocks that a sequence gives up while somebody outside may still read or write them go to `holds`.
"""

from headwater.errors import InternalError
from headwater.kv.holds import Holds
from headwater.kv.pool import BlockPool, PrefixMatch
from headwater.scheduler.entry import Entry, State, seniority
from headwater.scheduler.leaders import Leaders
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.plan import Sequence
from headwater.scheduler.queue import RankedEntries, WaitingQueue


class Roster:
    """Sequences by stream and state. A sequence is in the list of its state, and holds blocks only while it runs."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._block_size = limits.block_size
        self.pool = BlockPool(limits.num_blocks)
        self.holds = Holds(self.pool)
        self.leaders = Leaders(limits.block_size)
        self.by_stream: dict[int, Entry] = {}
        self.waiting = WaitingQueue()
        self.loading = RankedEntries()
        self.prefilling = RankedEntries()
        self.decoding = RankedEntries()
        self._ended: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return len(self.loading) + len(self.prefilling) + len(self.decoding)

    def most_junior_running(self) -> Entry:
        juniors = [*self.loading.last(), *self.prefilling.last(), *self.decoding.last()]
        return max(juniors, key=seniority)

    def enlist(self, entry: Entry) -> None:
        """A new sequence waits."""
        self.by_stream[entry.stream] = entry
        self.waiting.add(entry)

    def start(self, entry: Entry, match: PrefixMatch) -> None:
        """WAITING -> PREFILLING or LOADING, holding the matched blocks and new ones for the rest of its tokens."""
        self.waiting.remove(entry)
        self.pool.acquire(match.blocks)
        num_blocks = -(-entry.num_tokens // self._block_size)
        entry.block_table = match.blocks + self.pool.allocate(num_blocks - len(match.blocks))
        entry.num_slots = num_blocks * self._block_size
        entry.num_computed_tokens = len(match.blocks) * self._block_size
        entry.leader = None
        if entry.load_s is None:
            entry.state = State.PREFILLING
            self.prefilling.add(entry)
        else:
            entry.state = State.LOADING
            self.loading.add(entry)
        self.leaders.lead(entry)

    def prefill(self, entry: Entry) -> None:
        """LOADING -> PREFILLING: what is still missing is computed here."""
        self.leaders.stop(entry)
        self.loading.remove(entry)
        entry.load_s = None
        entry.state = State.PREFILLING
        self.prefilling.add(entry)
        self.leaders.lead(entry)

    def grow(self, entry: Entry) -> None:
        """One more block."""
        entry.block_table += self.pool.allocate(1)
        entry.num_slots += self._block_size

    def decode(self, entry: Entry) -> None:
        """PREFILLING or LOADING -> DECODING."""
        self.leaders.stop(entry)
        (self.loading if entry.state is State.LOADING else self.prefilling).remove(entry)
        entry.load_s = None
        entry.state = State.DECODING
        self.decoding.add(entry)

    def preempt(self, entry: Entry) -> None:
        """Running -> WAITING, in its old place; it will not load again."""
        self._leave(entry)
        entry.load_s = None
        entry.num_computed_tokens = 0
        entry.num_preemptions += 1
        entry.state = State.WAITING
        self.waiting.add(entry)

    def end(self, entry: Entry) -> None:
        del self.by_stream[entry.stream]
        self._leave(entry)
        entry.state = State.ENDED
        self._ended.append(entry)

    def take_ended(self) -> list[Sequence]:
        """Sequences that are gone since the last call, for whatever reason."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Raise `InternalError` when an invariant is broken. Touches everything, so it is for tests."""
        entries = list(self.by_stream.values())
        lists = {
            State.WAITING: self.waiting,
            State.LOADING: self.loading,
            State.PREFILLING: self.prefilling,
            State.DECODING: self.decoding,
        }
        for state, ranked in lists.items():
            if not ranked.check([entry for entry in entries if entry.state is state]):
                raise InternalError(f"the list of {state.name} sequences is not what the sequences say")
        if not self.leaders.check(entries):
            raise InternalError("the registered leaders are not what the sequences say")
        for entry in entries:
            entry.check(self._block_size)
        self.pool.check([*[entry.block_table for entry in entries], *self.holds.tables()])

    def _leave(self, entry: Entry) -> None:
        """Out of the list it is in, and its blocks given up."""
        match entry.state:
            case State.WAITING:
                self.waiting.remove(entry)
            case State.LOADING:
                self.leaders.stop(entry)
                self.loading.remove(entry)
                self.holds.hold(("load", entry.stream), self._unarrived(entry))
            case State.PREFILLING:
                self.leaders.stop(entry)
                self.prefilling.remove(entry)
            case State.DECODING:
                self.decoding.remove(entry)
        if entry.export is not None:
            self.holds.hold(
                ("export", entry.stream), entry.block_table[: entry.export.num_announced], entry.export.until
            )
        self.pool.free(entry.block_table)
        entry.block_table = []
        entry.num_slots = 0

    def _unarrived(self, entry: Entry) -> list[int]:
        return entry.block_table[entry.num_computed_tokens // self._block_size :]
