"""The words of a command line, in groups: a flag with what follows it."""

from collections.abc import Iterable


def flag_groups(words: Iterable[str]) -> list[list[str]]:
    """A flag with the words after it; words before the first flag each on their own."""
    groups: list[list[str]] = []
    for word in words:
        if _is_flag(word) or not groups or not _is_flag(groups[-1][0]):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _is_flag(word: str) -> bool:
    """Numbers below zero are values."""
    return word.startswith("-") and not word[1:].replace(".", "").isdigit()
