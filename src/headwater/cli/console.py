"""Where tables are printed: on a terminal at its width, into a file or a pipe without cutting anything off."""

from rich.console import Console

_FILE_WIDTH = 250


def open_console(*, highlight: bool = True, markup: bool = True, emoji: bool = True) -> Console:
    """Of standard output."""
    width = None if Console().is_terminal else _FILE_WIDTH
    return Console(width=width, highlight=highlight, markup=markup, emoji=emoji)
