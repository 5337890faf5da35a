"""A command line of another server, flag by flag, and the `headwater serve` line that stands for it."""

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from headwater.errors import ConfigError

Verdict = Literal["same", "renamed", "passed", "always", "none", "unknown"]

VERDICTS: dict[Verdict, str] = {
    "same": "the same flag",
    "renamed": "another flag",
    "passed": "passed on to the engine",
    "always": "not needed: always so, or found out",
    "none": "no equivalent",
    "unknown": "unknown: passed on, and refused by the engine if it does not know it either",
}


@dataclass(frozen=True, slots=True)
class Translation:
    """What becomes of one flag."""

    given: list[str]
    verdict: Verdict
    words: list[str] = field(default_factory=list[str])
    note: str = ""


@dataclass(frozen=True, slots=True)
class TranslatedCommand:
    """The whole line."""

    model: str
    flags: list[Translation]
    engine: str

    @property
    def command(self) -> str:
        words = ["headwater", "serve", self.model, "--engine", self.engine]
        return shlex.join([*words, *(word for flag in self.flags for word in flag.words)])

    @property
    def complete(self) -> bool:
        """Whether every flag has an equivalent, as far as is known."""
        return all(flag.verdict not in ("none", "unknown") for flag in self.flags)


@dataclass(frozen=True, slots=True)
class FlagTable:
    """What becomes of flags that are not passed on to the engine as they are."""

    same: Collection[str]
    renamed: Mapping[str, str]
    """To our flag."""
    always: Mapping[str, str]
    """To how it is so anyway."""
    none: Mapping[str, str]
    """To what to do instead."""
    is_engines: Callable[[str], bool] = lambda _flag: True
    """Whether a flag that is in none of these is one of the engine's."""

    @property
    def flags(self) -> list[str]:
        """Those that it speaks of."""
        return sorted({*self.same, *self.renamed, *self.always, *self.none})

    def verdict_of(self, flag: str) -> tuple[Verdict, str]:
        """What becomes of a flag, and a note."""
        if flag in self.same:
            return "same", ""
        if flag in self.renamed:
            return "renamed", self.renamed[flag]
        if flag in self.always:
            return "always", self.always[flag]
        if flag in self.none:
            return "none", self.none[flag]
        return ("passed", "") if self.is_engines(flag) else ("unknown", "")

    def translation(self, group: list[str]) -> Translation:
        """Of a flag and its values."""
        flag = spelled(group[0])
        verdict, note = self.verdict_of(flag)
        match verdict:
            case "renamed":
                return Translation(group, verdict, [note, *group[1:]])
            case "same" | "passed" | "unknown":
                return Translation(group, verdict, [flag, *group[1:]])
            case _:
                return Translation(group, verdict, [], note)


def translated_command(
    engine: str,
    groups: Iterable[list[str]],
    translation: Callable[[list[str]], Translation],
    expected: str,
    *,
    model_flags: Collection[str] = (),
    bare_model: bool = True,
) -> TranslatedCommand:
    """Flag by flag. The model is the value of a flag, or a word by itself. Raises `ConfigError`."""
    model = ""
    flags: list[Translation] = []
    for group in groups:
        if group[0] in model_flags:
            if model:
                raise ConfigError(f"two models: {model} and {_value(group)}", hint=expected)
            model = _value(group)
        elif group[0].startswith("-"):
            flags.append(translation(group))
        elif not bare_model:
            raise ConfigError(f"{group[0]} is no flag", hint=expected)
        elif model:
            raise ConfigError(f"two models: {model} and {group[0]}", hint=expected)
        else:
            model = group[0]
    if not model:
        raise ConfigError("the command names no model", hint=expected)
    return TranslatedCommand(model, flags, engine)


def _value(group: list[str]) -> str:
    if len(group) != 2:
        raise ConfigError(f"{group[0]} wants one value, not {len(group) - 1}")
    return group[1]


def spelled(flag: str) -> str:
    """With dashes, as flags are told apart by."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def split_values(words: Iterable[str]) -> list[str]:
    """`--flag=value` as two words."""
    split: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        split += [name, value] if equals and name.startswith("--") else [word]
    return split
