"""Stop strings across token borders.

The match that is complete first wins; of several complete at the same character, the longest. Text that may be the
beginning of a match is held back, so nothing is ever shown that a later token would cut off. The outcome depends on the
text alone, not on how it was split. Cost: one comparison per character and stop string (Knuth, Morris, Pratt).
"""

from collections.abc import Sequence


def _failures(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        table[position] = length
    return table


class StopStrings:
    """The stop strings of one request, prepared. Shared by its sequences."""

    __slots__ = ("first_characters", "patterns")

    def __init__(self, strings: Sequence[str]) -> None:
        self.patterns = tuple((string, _failures(string)) for string in strings)
        self.first_characters = frozenset(string[0] for string in strings)


class StopMatcher:
    """Looks for stop strings in one sequence's text."""

    __slots__ = ("_held", "_include", "_lengths", "_stops")

    def __init__(self, stops: StopStrings, *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._lengths = [0] * len(stops.patterns)
        """For each stop string, how many of its characters the text ends with. Their maximum is `len(_held)`."""
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string that ended the sequence, if one did."""
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text, None
        before = len(self._held)
        held = self._held + text
        for position, character in enumerate(text, start=before + 1):
            match = self._advance(character)
            if match is not None:
                self._held = ""
                return held[: position if self._include else position - len(match)], match
        cut = len(held) - max(self._lengths)
        self._held = held[cut:]
        return held[:cut], None

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        match: str | None = None
        lengths = self._lengths
        for number, (pattern, failures) in enumerate(self._stops.patterns):
            length = lengths[number]
            while length and pattern[length] != character:
                length = failures[length - 1]
            if pattern[length] == character:
                length += 1
            lengths[number] = length
            if length == len(pattern) and (match is None or length > len(match)):
                match = pattern
        return match
