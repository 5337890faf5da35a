"""The argument parser of all verbs: short help, help that can be searched, and nearest names for misspelled flags.

`--help` shows what most people need, `--help=all` everything, `--help=engine` one section, `--help=KV` every flag
whose name or words contain that. Arguments are shown in the short help unless `advanced()` marked them.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from headwater.config.load import nearest
from headwater.config.units import parse_bytes, parse_seconds
from headwater.errors import ConfigError

ALL = "all"


def advanced(action: argparse.Action) -> argparse.Action:
    """Keep an argument out of the short help."""
    setattr(action, _MARK, True)
    return action


_MARK = "headwater_advanced"


def seconds(text: str) -> float:
    """An argument type: `500ms`, `30s`, `2m`."""
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a time such as 30s or 5m, not {text!r}") from error


def number(text: str) -> float:
    """An argument type: a float that is finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number such as 2 or 0.5, not {text!r}")
    return value


def size(text: str) -> int:
    """An argument type: `64KiB`, `4GiB`."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a size such as 64KiB or 4GiB, not {text!r}: {error}") from error


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` instead of exiting, so that all usage errors look alike."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False, **kwargs)
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            const="",
            default=argparse.SUPPRESS,
            metavar="WHAT",
            help="this help; WHAT is a section, a word to search for, or `all`",
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Nothing unknown is let through, also not by the parsers of nested verbs, which argparse calls here."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        return known, []

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"`{self.prog} --help` lists the arguments")

    def _refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            raise ConfigError(f"unexpected argument {argument!r}", hint=f"usage: {self.format_usage()[7:].strip()}")
        names = {option.lstrip("-"): option for option in self._option_string_actions}  # dashes would count as likeness
        near = nearest(argument.partition("=")[0].lstrip("-"), names)
        hint = f"did you mean {names[near]}?" if near else f"`{self.prog} --help=all` lists all flags"
        raise ConfigError(f"unknown flag {argument}", hint=hint)

    def help_about(self, what: str) -> str:
        """The short help, everything, one section, or a search."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        if not what:
            formatter.add_text(self.description)
        found = hidden = 0
        for title, actions in self._sections():
            shown = [action for action in actions if _matches(action, title, what)]
            hidden += len(actions) - len(shown)
            found += len(shown)
            formatter.start_section(title)
            formatter.add_arguments(shown)
            formatter.end_section()
        if what and not found:
            raise ConfigError(f"no flag of `{self.prog}` is about {what!r}", hint=f"`{self.prog} --help=all`")
        formatter.add_text(self.epilog)
        return formatter.format_help() + (self._more() if hidden and not what else "")

    def _more(self) -> str:
        titles = [title for title, actions in self._sections() if any(getattr(a, _MARK, False) for a in actions)]
        return f"\nMore flags: --help=all, by section (--help={', --help='.join(titles)}), or by word (--help=KV).\n"

    def _sections(self) -> Iterator[tuple[str, list[argparse.Action]]]:
        for group in self._action_groups:
            if group._group_actions:
                yield group.title or "", [action for action in group._group_actions if action.help is not None]


class _Help(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if not isinstance(parser, Parser):
            raise TypeError("the help action belongs to our own parser")
        sys.stdout.write(parser.help_about(str(values or "")))
        parser.exit()


def _matches(action: argparse.Action, section: str, what: str) -> bool:
    if what in ("", ALL):
        return what == ALL or not getattr(action, _MARK, False)
    word = what.lower()
    words = " ".join([*action.option_strings, action.dest, str(action.help)]).lower()
    return section.lower() == word or word in words or word.replace(" ", "-") in words
