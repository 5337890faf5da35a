"""Sequences by seniority: a sorted list, since insertion by bisection only moves pointers."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from headwater.scheduler.entry import Entry, seniority


class RankedEntries:
    """The most senior comes first."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def first(self, count: int | None = None) -> list[Entry]:
        """The most senior ones, as a copy."""
        return self._entries[:count]

    def add(self, entry: Entry) -> None:
        insort(self._entries, entry, key=seniority)

    def remove(self, entry: Entry) -> None:
        del self._entries[bisect_left(self._entries, entry.rank, key=seniority)]

    def last(self) -> list[Entry]:
        """The most junior, if any."""
        return self._entries[-1:]

    def check(self, members: list[Entry]) -> bool:
        """Whether these are the members, and in order."""
        return self._entries == sorted(members, key=seniority)


class WaitingQueue(RankedEntries):
    """Also counts the tokens of its members, which do not change while they wait."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self.num_tokens += entry.num_tokens

    def remove(self, entry: Entry) -> None:
        super().remove(entry)
        self.num_tokens -= entry.num_tokens

    def check(self, members: list[Entry]) -> bool:
        return super().check(members) and self.num_tokens == sum([entry.num_tokens for entry in members])
