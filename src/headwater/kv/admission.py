"""Which blocks deserve a colder tier. Most prefixes are asked for once; writing those wears out flash and pays nothing.

`SecondUse` lets a block in the second time it is seen. It remembers ids in two generations of fixed size: when the
younger is full, the older is forgotten, so memory is bounded and what was seen long ago does not count.
"""

from typing import Literal, Protocol

AdmissionName = Literal["second-use", "all"]


class Admission(Protocol):
    def admit(self, key: int) -> bool:
        """Whether the block with these 64 bits of id may be written. Counts as having seen it."""
        ...


class AdmitAll:
    def admit(self, key: int) -> bool:
        return True


class SecondUse:
    """`window`: how many different blocks a generation remembers; 100 bytes each."""

    def __init__(self, window: int = 1 << 17) -> None:
        self._window = window
        self._younger: set[int] = set()
        self._older: set[int] = set()

    def admit(self, key: int) -> bool:
        if key in self._younger:
            return True
        seen = key in self._older
        self._younger.add(key)
        if len(self._younger) >= self._window:
            self._older, self._younger = self._younger, set()
        return seen


def make_admission(name: AdmissionName, window: int = 1 << 17) -> Admission:
    return AdmitAll() if name == "all" else SecondUse(window)
