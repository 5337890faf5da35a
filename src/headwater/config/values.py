"""From one spelled value to the typed one: what a flag, a variable or a YAML scalar may say for a field.

Text is read with the field's unit; YAML's own types are taken as they are, never converted on a guess (a number where
text is wanted is refused: YAML has already lost how it was written). Values that say `none` mean the absent value.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headwater.config.fields import Field
from headwater.config.units import format_bytes, format_seconds, parse_bytes, parse_count, parse_seconds

NONE = "none"
REDACTED = "<redacted>"
MAX_SECRET_FILE_BYTES = 64 * 1024

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_EXAMPLES = {"bytes": "512MiB or 20GiB", "count": "4096 or 32K", "seconds": "500ms, 30s or 2m"}


class BadValue(Exception):
    """The text says why the value does not fit, without naming the key."""


def parse_value(field: Field, given: object) -> Any:
    """The typed value. Raises `BadValue`."""
    if field.many:
        return tuple(item for part in _items(given) for item in _expanded(field, _scalar(field, part)))
    if given is None or (isinstance(given, str) and field.optional and given.strip().lower() == NONE):
        if field.optional:
            return None
        raise BadValue(f"expected {expected(field)}, not nothing")
    return _scalar(field, given)


def spell(field: Field, value: Any) -> str:
    """The value as a flag would say it; secrets are redacted."""
    if value is None:
        return NONE
    if field.many:
        return ",".join(spell_one(field, item) for item in value)
    return spell_one(field, value)


def spell_one(field: Field, value: Any) -> str:
    if field.secret:
        return REDACTED
    if field.kind == "bool":
        return "true" if value else "false"
    if field.unit == "bytes":
        return format_bytes(value)
    return format_seconds(value) if field.unit == "seconds" else str(value)


def expected(field: Field) -> str:
    """What would fit, in words."""
    if field.choices:
        return f"one of {', '.join(field.choices)}"
    if field.kind == "bool":
        return "true or false"
    if field.kind == "str":
        return "text"
    noun = {"bytes": "a size", "count": "a whole number", "seconds": "a time"}.get(
        field.unit or "", "a whole number" if field.kind == "int" else "a number"
    )
    limits = _limits(field)
    example = f", such as {_EXAMPLES[field.unit]}" if field.unit else ""
    return noun + limits + example


def _limits(field: Field) -> str:
    match field.minimum, field.maximum:
        case None, None:
            return ""
        case low, None:
            return f" of at least {low:g}" if low else ""
        case None, high:
            return f" of at most {high:g}"
        case low, high:
            return f" from {low:g} to {high:g}"


def _items(given: object) -> Iterable[object]:
    """A list is a YAML list, text separated by commas, or a flag given several times."""
    if given is None:
        return ()
    if isinstance(given, str):
        return [part.strip() for part in given.split(",") if part.strip()]
    if isinstance(given, list | tuple):
        return [item for part in given for item in _items(part)] if _all_text(given) else given
    return (given,)


def _all_text(given: Iterable[object]) -> bool:
    return all(isinstance(item, str) for item in given)


def _expanded(field: Field, item: Any) -> list[Any]:
    """`@FILE` in a secret stands for the lines of the file."""
    if field.secret and item == REDACTED:
        raise BadValue("this is a redacted secret, as `config show` prints it, not a secret")
    if not (field.secret and item.startswith("@")):
        return [item]
    path = Path(item[1:]).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_FILE_BYTES + 1)
        lines = [line.strip() for line in content.decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(f"cannot read {path}: {error}") from error
    if not lines or len(content) > MAX_SECRET_FILE_BYTES:
        raise BadValue(f"{path} must hold 1 to {MAX_SECRET_FILE_BYTES} bytes of secrets, one a line")
    return lines


def _scalar(field: Field, given: object) -> Any:
    try:
        value = _READERS[field.unit or field.kind](given.strip()) if isinstance(given, str) else _typed(field, given)
    except (ValueError, OverflowError) as error:
        raise BadValue(f"expected {expected(field)}: {error}") from error
    if field.choices and value not in field.choices:
        raise BadValue(f"expected {expected(field)}")
    if field.kind in ("int", "float") and not _within(field, value):
        raise BadValue(f"expected {expected(field)}")
    return value


def _within(field: Field, value: float) -> bool:
    low = field.minimum is None or value >= field.minimum
    return low and (field.maximum is None or value <= field.maximum)


def _read_bool(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return word in _TRUE


def _read_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _read_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"{text!r} is not finite")
    return value


_READERS: dict[str, Callable[[str], Any]] = {
    "bool": _read_bool,
    "int": _read_int,
    "float": _read_float,
    "str": str,
    "bytes": parse_bytes,
    "count": parse_count,
    "seconds": parse_seconds,
}


def _typed(field: Field, given: object) -> Any:
    """A value YAML has typed already."""
    match field.kind:
        case "bool" if isinstance(given, bool):
            return given
        case "int" if isinstance(given, int) and not isinstance(given, bool):
            return given
        case "float" if isinstance(given, int | float) and not isinstance(given, bool):
            return _read_float(str(given))
        case "str":
            raise ValueError(f"YAML reads it as {type(given).__name__}; put it in quotes")
    raise ValueError(f"YAML reads it as {type(given).__name__}")
