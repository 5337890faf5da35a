"""Tool calls out of generated text, as they come.

Understood: calls as JSON between `<tool_call>` and `</tool_call>` (Hermes, Qwen), and text that the sampler was forced
to make a call of. The outcome depends on the text alone, not on how it was split. What turns out not to be a call is
given back as text, so nothing the model said is lost.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

ToolFormat = Literal["hermes"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')


def detect_tool_format(template: str) -> ToolFormat | None:
    """How a model with this chat template writes its calls; None when that is not understood."""
    return "hermes" if _OPEN in template and "<function=" not in template else None


@dataclass(frozen=True, slots=True)
class Words:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of the current call's arguments."""

    text: str


ToolEvent = Words | CallStart | CallArguments


class ToolParser(Protocol):
    """One sequence's parser."""

    def push(self, text: str) -> list[ToolEvent]: ...

    def flush(self) -> list[ToolEvent]:
        """At the end of the sequence: what was held back."""
        ...


class NamedFunctionParser:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        if text and self._name is not None:
            events.append(CallStart(self._name))
            self._name = None
        return [*events, CallArguments(text)] if text else events

    def flush(self) -> list[ToolEvent]:
        return []


class HermesParser:
    """State table:

    words    text is passed on; the beginning of an open tag is held back
    header   inside a call, until its name and the beginning of its arguments are known
    body     arguments are passed on until their value is complete
    tail     what follows up to the close tag is dropped
    """

    def __init__(self, *, forced: bool = False, single: bool = False) -> None:
        """`forced`: the whole text is the inside of one call. `single`: nothing after the first call counts."""
        self._forced = forced
        self._single = single
        self._state: Literal["words", "header", "body", "tail"] = "header" if forced else "words"
        self._held = ""
        self._value = JsonValueEnd()
        self._seen_call = False

    def push(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        self._held += text
        step = {"words": self._words, "header": self._header, "body": self._body, "tail": self._tail}
        while self._held and step[self._state](events):
            pass
        return events

    def flush(self) -> list[ToolEvent]:
        held, self._held = self._held, ""
        if not held or self._state in ("body", "tail"):
            return []
        if self._state == "words":
            return [] if self._seen_call and held.isspace() else [Words(held)]
        call = _whole_call(held)
        if call is not None:
            return call
        return [Words(held if self._forced else _OPEN + held)]

    def _words(self, events: list[ToolEvent]) -> bool:
        """Each step says whether there is more to do with what is held."""
        if self._single and self._seen_call:
            self._held = ""
            return False
        before, tag, after = self._held.partition(_OPEN)
        if tag:
            self._held = after
            self._state = "header"
            self._say(before, events)
            return True
        keep = _overlap(before, _OPEN)
        self._held = before[len(before) - keep :]
        shown = before[: len(before) - keep]
        if self._seen_call and (shown + self._held).isspace():
            self._held = shown + self._held
            return False
        self._say(shown, events)
        return False

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        """White space between calls means nothing."""
        if text and not (self._seen_call and text.isspace()):
            events.append(Words(text))

    def _header(self, events: list[ToolEvent]) -> bool:
        match = _HEADER.match(self._held)
        if match is not None and self._held[match.end()] in "{[":
            events.append(CallStart(msgspec.json.decode(match[1])))
            self._seen_call = True
            self._held = self._held[match.end() :]
            self._value = JsonValueEnd()
            self._state = "body"
            return True
        inside, tag, after = self._held.partition(_CLOSE)
        if not tag:
            return False
        events.extend(self._unusual_call(inside))
        self._held = after
        self._state = "words"
        return True

    def _unusual_call(self, inside: str) -> list[ToolEvent]:
        call = _whole_call(inside)
        if call is None:
            return [Words(_OPEN + inside + _CLOSE)]
        self._seen_call = True
        return call

    def _body(self, events: list[ToolEvent]) -> bool:
        end = self._value.find(self._held)
        if end is None:
            events.append(CallArguments(self._held))
            self._held = ""
            return False
        events.append(CallArguments(self._held[:end]))
        self._held = self._held[end:]
        self._state = "tail"
        return True

    def _tail(self, _events: list[ToolEvent]) -> bool:
        _, tag, after = self._held.partition(_CLOSE)
        if tag:
            self._held = after
            self._state = "words"
            return True
        self._held = self._held[len(self._held) - _overlap(self._held, _CLOSE) :]
        return False


class JsonValueEnd:
    """Finds where a JSON object or array ends, piece by piece."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """The position after the end, when it is in this piece."""
        for position, character in enumerate(text, start=1):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position
        return None


def _overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of `tag` that `text` ends with."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def _whole_call(text: str) -> list[ToolEvent] | None:
    """A complete call in any order of its members."""
    try:
        call: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return [CallStart(call["name"]), CallArguments(arguments)]
