"""Request bodies to typed structs, and every way to fail to a message that helps.

The body is decoded once into plain objects (kept, because the chat template wants them and errors quote them) and then
checked against a struct. Refused: malformed JSON, names that occur twice, NUL characters, nesting and counts beyond
what a request needs, and with `strict` unknown fields.
"""

import difflib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from headwater.errors import InvalidRequest
from headwater.frontend.openai.fields import IGNORED, UnsupportedField

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
Plain = dict[str, Any]

_MAX_DEPTH = 64
_MAX_CONTAINERS = 250_000
_MAX_COMMAS = 2_000_000
_MAX_STRINGS = 250_000
_COUNT_ABOVE_BYTES = 1_000_000
_MAX_WARNINGS = 16
"""Looking for similar names is slow, and nobody reads more."""
_SLICE_BYTES = 256 * 1024

_ESCAPES = re.compile(rb'\\[\\"]')

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Shape(Generic[RequestT]):
    """One endpoint's body."""

    struct: type[RequestT]
    known: frozenset[str]
    unsupported: Mapping[str, UnsupportedField]

    @classmethod
    def of(cls, struct: type[RequestT], unsupported: Mapping[str, UnsupportedField]) -> "Shape[RequestT]":
        return cls(struct, frozenset(struct.__struct_fields__), unsupported)


class Parsed(msgspec.Struct, Generic[RequestT], frozen=True):
    fields: RequestT
    plain: Plain
    """The body as JSON objects."""
    warnings: list[str]
    """Notes about what was ignored."""


def parse_body(shape: Shape[RequestT], body: bytes, *, strict: bool) -> Parsed[RequestT]:
    """Raises `InvalidRequest`."""
    plain = _decode_object(body)
    warnings: list[str] = []
    if not plain.keys() <= shape.known:
        warnings = _check_other_fields(shape, plain, strict)
    try:
        fields = msgspec.convert(plain, shape.struct)
    except msgspec.ValidationError as error:
        raise _explain(str(error), plain, shape.struct) from error
    return Parsed(fields, plain, warnings)


def _decode_object(body: bytes) -> Plain:
    if len(body) > _COUNT_ABOVE_BYTES:
        _check_counts(body)
    try:
        plain = _decode(body)
        num_strings = _count_strings(plain, _MAX_DEPTH)
    except RecursionError as error:
        raise InvalidRequest(f"the body is nested more than {_MAX_DEPTH} levels deep") from error
    except msgspec.ValidationError as error:
        raise _explain_number(body) from error
    except msgspec.DecodeError as error:
        raise _explain_malformed(body, str(error)) from error
    if not isinstance(plain, dict):
        raise InvalidRequest(f"the body is {_kind(plain)}, expected a JSON object")
    num_extra_quotes = _count(body, b'"') - 2 * num_strings
    if num_extra_quotes and num_extra_quotes != _num_escaped_quotes(body):
        _check_names_unique(body)
    if b"\\" in body and _count(body, b"\\u0000"):
        _check_no_nul(plain, "")
    return plain


def _check_counts(body: bytes) -> None:
    """Small pieces in huge numbers would take gigabytes as objects, and hold up everything else while they are made."""
    containers = _count(body, b"[") + _count(body, b"{")
    if containers > _MAX_CONTAINERS:
        raise InvalidRequest(f"the body has about {containers:,} arrays and objects, at most {_MAX_CONTAINERS:,} fit")
    commas = _count(body, b",")
    if commas > _MAX_COMMAS:
        raise InvalidRequest(f"the body has about {commas:,} values, at most {_MAX_COMMAS:,} fit")
    strings = (_count(body, b'"') - _count(body, b'\\"')) // 2
    if strings > _MAX_STRINGS:
        raise InvalidRequest(f"the body has about {strings:,} texts and names, at most {_MAX_STRINGS:,} fit")


def _num_escaped_quotes(body: bytes) -> int:
    """Those inside of strings; -1 where finding out would take longer than reading the body again."""
    if b"\\\\" not in body:
        return _count(body, b'\\"')
    return _ESCAPES.findall(body).count(b'\\"') if len(body) <= _SLICE_BYTES else -1


def _count(body: bytes, needle: bytes) -> int:
    """Occurrences; in slices of a large body, so that other threads get their turn in between."""
    if len(body) <= _SLICE_BYTES:
        return body.count(needle)
    reach = _SLICE_BYTES + len(needle) - 1
    return sum(body.count(needle, at, at + reach) for at in range(0, len(body), _SLICE_BYTES))


def _count_strings(value: Any, depth: int) -> int:
    """Strings inside, names included. Raises `RecursionError` beyond `depth`."""
    if depth == 0:
        raise RecursionError
    if type(value) is dict:
        total = len(value)
        value = value.values()
    elif type(value) is list:
        total = 0
    else:
        return 1 if type(value) is str else 0
    for item in value:
        kind = type(item)
        if kind is str:
            total += 1
        elif kind is dict or kind is list:
            total += _count_strings(item, depth - 1)
    return total


def _check_names_unique(body: bytes) -> None:
    """Slow and exact; called when quotes are not accounted for by strings and escapes."""

    def unique(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequest(f"{short_json(name)} occurs twice in one JSON object", param=name[:64])
            seen.add(name)

    json.loads(body, object_pairs_hook=unique)


def _check_no_nul(value: Any, path: str) -> None:
    if isinstance(value, str):
        if "\0" in value:
            raise InvalidRequest(f"{path} contains the character U+0000, which no prompt may have", param=path)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_no_nul(name, f"{path}.{name}".strip("."))
            _check_no_nul(item, f"{path}.{name}".strip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_no_nul(item, f"{path}[{number}]")


def _check_other_fields(shape: Shape[Any], plain: Plain, strict: bool) -> list[str]:
    warnings: list[str] = []
    for name in plain.keys() - shape.known:
        unsupported = shape.unsupported.get(name)
        if unsupported is not None:
            if not unsupported.tolerates(plain[name]):
                raise InvalidRequest(
                    f"{name} is {short_json(plain[name])}, which is not supported: {unsupported.hint}", param=name
                )
        elif name not in IGNORED and len(warnings) < _MAX_WARNINGS:
            warnings.append(_unknown(name, shape, strict))
    return warnings


def _unknown(name: str, shape: Shape[Any], strict: bool) -> str:
    near = difflib.get_close_matches(name[:64], [*shape.known, *shape.unsupported, *IGNORED], n=1)
    message = f"unknown field {short_json(name)}" + (f"; did you mean {near[0]}?" if near else "")
    if strict:
        raise InvalidRequest(message, param=name[:64])
    logger.debug("ignored: %s", message)
    return message


_EXPECTED = re.compile(r"Expected `(?P<what>[^`]+)`(?P<bound>(?: [<>=]+ \S+| of length [<>=]+ \d+)?)")
_AT = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[\]]+)")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_FITTING: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


_UNFIT = object()
"""No field takes it."""


def _explain(message: str, plain: Plain, struct: type[msgspec.Struct]) -> InvalidRequest:
    """msgspec's complaint in the words of JSON, with the value that was given."""
    at = _AT.search(message)
    path = at["path"] if at else ""
    if path.endswith("[...]"):
        return _explain_member(path.removesuffix("[...]"), message, plain)
    missing = _MISSING.search(message)
    if missing:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(f"{name} is missing{_wanted(missing['name'], path, plain, struct)}", param=name)
    expected = _EXPECTED.search(message)
    if expected is None:
        return InvalidRequest(f"{path or 'the body'}: {message.split(' - at ')[0]}", param=path or None)
    given = short_json(_look_up(plain, path))
    return InvalidRequest(f"{path or 'the body'} is {given}, expected {_in_words(expected)}", param=path or None)


def _wanted(name: str, path: str, plain: Plain, struct: type[msgspec.Struct]) -> str:
    """What a missing member would have to be: msgspec says it of a wrong one."""
    parent = _look_up(plain, path)
    if not isinstance(parent, dict) or name in parent:
        return ""
    parent[name] = _UNFIT
    try:
        msgspec.convert(plain, struct)
    except msgspec.ValidationError as error:
        expected = _EXPECTED.search(str(error))
        return f", expected {_in_words(expected)}" if expected is not None else ""
    finally:
        del parent[name]
    return ""


def _explain_member(path: str, message: str, plain: Plain) -> InvalidRequest:
    """msgspec does not say which member of an object with free names it means: the first that is of no fitting kind."""
    expected = _EXPECTED.search(message)
    if expected is None:
        return InvalidRequest(f"{path} has a member that does not fit: {message.split(' - at ')[0]}", param=path)
    kinds = {kind for what in expected["what"].split(" | ") for kind in _FITTING.get(what, ())}
    for name, value in _look_up(plain, path).items():
        if type(value) not in kinds:
            return InvalidRequest(
                f"{path} has {short_json(value)} for {short_json(name)}, expected {_in_words(expected)}", param=path
            )
    return InvalidRequest(f"{path} has a member that does not fit, expected {_in_words(expected)}", param=path)


def _in_words(expected: re.Match[str]) -> str:
    kinds = [_WORDS.get(kind, kind) for kind in expected["what"].split(" | ")]
    return " or ".join(kinds) + expected["bound"].replace(".0", "")


def _look_up(plain: Any, path: str) -> Any:
    """The value at a path; where the path is vague, the smallest known part around it."""
    value = plain
    for index, name in _STEP.findall(path):
        if name and isinstance(value, dict) and name in value:
            value = value[name]
        elif index.isdigit() and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            break
    return value


def short_json(value: Any) -> str:
    """JSON of a value, cut to a length fit for a message."""
    if isinstance(value, dict | list):
        return f"{_kind(value)} of {len(value):,}"
    if isinstance(value, str):
        text = json.dumps(value[:60], ensure_ascii=False)
        return text if len(value) <= 60 else f'{text[:-1]}…" ({len(value):,} characters)'
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:6]}… ({len(text):,} digits)"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def _explain_malformed(body: bytes, reason: str) -> InvalidRequest:
    if not body.strip():
        return InvalidRequest("the body is empty, expected a JSON object")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return InvalidRequest(f"the body is not valid UTF-8: byte {body[error.start]:#04x} at position {error.start:,}")
    early = "a \\u escape near its end is half of a pair" if _HALF_PAIR.search(body[-32:]) else "it ends too early"
    reason = reason.replace("JSON is malformed: ", "").replace("Input data was truncated", early)
    return InvalidRequest(f"the body is not valid JSON: {reason}")


def _explain_number(body: bytes) -> InvalidRequest:
    """Names the field with a number that no JSON reader can hold."""
    try:
        for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
            try:
                _decode(raw)
            except msgspec.ValidationError:
                return InvalidRequest(f"{name} holds a number out of range", param=name[:64])
    except msgspec.DecodeError:
        pass
    return InvalidRequest("the body holds a number out of range")
