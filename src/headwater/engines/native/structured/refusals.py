"""Why a specification cannot be compiled, in the words of whoever sent it.

The compiler speaks of its own inside: rules it has made up, names of its states, options of its interface. A refusal
names the client's field, what was given, and where in a schema, a pattern or a grammar the trouble is. What is not
known here is passed on as the compiler says it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwater.engines.native.structured.schema_places import Schema, circle, places
from headwater.errors import InvalidRequest
from headwater.protocol.request import StructuredSpec

_MESSAGE_CHARS = 500
_SHOWN_CHARS = 60
_MAX_PLACES = 3

_NOTHING_FITS = re.compile(r"NoExtension\w*$")
"""The state of a compiled grammar from which no token leads on."""
_TOO_COMPLEX = re.compile(r"(?:lexer error: |parser error: )(?P<what>too many [a-z]+)", re.IGNORECASE)
_PATTERN = re.compile(r"regex parse error:\n    (?P<pattern>[^\n]*)\n(?P<mark> *)\^+\nerror: (?P<what>[^\n]+)")
_CIRCULAR = re.compile(r"^circular references with sibling keys are not supported: \S*?(?P<place>#\S*)")
_BOUNDARIES = re.compile(r"lookarounds not supported")
_AT_LINE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")


def refusal(spec: StructuredSpec, reason: str) -> InvalidRequest:
    """`reason`: what the compiler says."""
    reason = reason.removesuffix("<non-verbose/>").strip()
    given = f" is {_shown(spec.spec)}, which" if spec.kind == "regex" else ""
    return InvalidRequest(f"{spec.param}{given} cannot be compiled: {_shorten(_why(spec, reason))}", param=spec.param)


def in_words(reason: str) -> str:
    """What the compiler says, without its inner names."""
    reason = reason.removesuffix("<non-verbose/>").strip()
    if _NOTHING_FITS.match(reason):
        return "no text can satisfy it"
    too_complex = _TOO_COMPLEX.match(reason)
    if too_complex is not None:
        return f"it is too complex ({too_complex['what'].lower()}): fewer repetitions and alternatives fit"
    return _shorten(_AT_LINE.sub(r"at line \g<line>, column \g<column>: ", reason))


def _why(spec: StructuredSpec, reason: str) -> str:
    if spec.kind == "json_schema":
        return _why_schema(spec.spec, reason)
    if spec.kind == "regex":
        pattern = _PATTERN.search(reason)
        if pattern is not None:
            return _of_pattern(pattern, spec.spec)
        if _BOUNDARIES.search(reason):
            return "look-around and word boundaries are not supported"
    return in_words(reason)


def _why_schema(text: str, reason: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return in_words(reason)
    if schema is False:
        return "it is false, which no value fits"
    if not isinstance(schema, dict):
        return f"it is {text[:_SHOWN_CHARS]}, expected an object"
    around = circle(schema) if _NOTHING_FITS.match(reason) or _CIRCULAR.match(reason) else []
    if around:
        return _of_circle(around)
    for pattern, say in _OF_SCHEMAS:
        said = pattern.search(reason)
        if said is not None:
            return say(schema, said)
    return in_words(reason)


def _of_circle(around: Sequence[str]) -> str:
    way = "".join(f" by way of {place}" for place in around[1 : _MAX_PLACES + 1])
    return f"the $ref at {around[0]} leads only to itself{way}, expected a schema that says what a value looks like"


def _of_pattern(said: re.Match[str], given: str) -> str:
    """The compiler counts in what it has made of a pattern, which need not be what was given."""
    at = f", at character {len(said['mark']) - 3:,}" if said["pattern"] == given else ""
    return f"{said['what']}{at}"


def _unknown_keywords(schema: Schema, said: re.Match[str]) -> str:
    names: list[str] = json.loads(said["names"])
    where = _where(schema, lambda one: all(name in one for name in names))
    return f"{' and '.join(names)}{where} cannot be held to: leave out what is not supported"


def _bad_type(schema: Schema, said: re.Match[str]) -> str:
    where = _where(schema, lambda one: said["type"] in _as_list(one.get("type")))
    expected = "array, boolean, integer, null, number, object, string"
    return f"type{where} is {_shown(said['type'])}, expected one of {expected}"


def _bad_format(schema: Schema, said: re.Match[str]) -> str:
    given = said["format"]
    return f"format{_where(schema, lambda one: one.get('format') == given)} is {_shown(given)}, which is not known"


def _bad_pattern(schema: Schema, said: re.Match[str]) -> str:
    given = said["pattern"]
    where = _where(schema, lambda one: one.get("pattern") == given or given in _names(one.get("patternProperties")))
    return f"the pattern{where} is {_shown(given)}: {_of_pattern(said, given)}"


def _overlap(schema: Schema, _said: re.Match[str]) -> str:
    return f"members of oneOf{_where(schema, lambda one: 'oneOf' in one)} may both fit: use anyOf"


def _outside(schema: Schema, said: re.Match[str]) -> str:
    where = _where(schema, lambda one: one.get("$ref") == said["reference"])
    return f"$ref{where} is {_shown(said['reference'])}, expected a place in the same schema"


def _missing(schema: Schema, said: re.Match[str]) -> str:
    reference = f"#{said['pointer']}"
    return f"$ref{_where(schema, lambda one: one.get('$ref') == reference)} is {_shown(reference)}, where nothing is"


def _circle_beside(_schema: Schema, said: re.Match[str]) -> str:
    return (
        f"a $ref leads back to {said['place']} where other keywords, or those of allOf, hold as well: only alone it may"
    )


def _unsatisfiable(_schema: Schema, said: re.Match[str]) -> str:
    return f"no value fits it: {said['why']}"


_OF_SCHEMAS: tuple[tuple[re.Pattern[str], Callable[[Schema, re.Match[str]], str]], ...] = (
    (re.compile(r"^Unimplemented keys: (?P<names>\[.*\])", re.DOTALL), _unknown_keywords),
    (re.compile(r"^Invalid type: (?P<type>.*)", re.DOTALL), _bad_type),
    (re.compile(r"^Unknown format: (?P<format>.*)", re.DOTALL), _bad_format),
    (_PATTERN, _bad_pattern),
    (re.compile(r"^Unsatisfiable schema: (?P<why>.*)", re.DOTALL), _unsatisfiable),
    (re.compile(r"^oneOf constraints are not supported"), _overlap),
    (re.compile(r"^Resource '(?P<reference>[^']*)' is not present"), _outside),
    (re.compile(r"^Pointer '(?P<pointer>[^']*)' does not exist"), _missing),
    (_CIRCULAR, _circle_beside),
)


def _where(schema: Schema, fits: Callable[[Schema], bool]) -> str:
    """` at PLACE`; all places it may be, the first few of them, where there are several."""
    found = places(schema, fits, _MAX_PLACES + 1)
    if not found:
        return ""
    return f" at {' or '.join(found[:_MAX_PLACES])}{' or further on' if len(found) > _MAX_PLACES else ''}"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _names(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _shown(text: str) -> str:
    shown = json.dumps(text[:_SHOWN_CHARS], ensure_ascii=False)
    return shown if len(text) <= _SHOWN_CHARS else f'{shown[:-1]}…" ({len(text):,} characters)'


def _shorten(message: str) -> str:
    return message if len(message) <= _MESSAGE_CHARS else message[:_MESSAGE_CHARS] + " ..."
