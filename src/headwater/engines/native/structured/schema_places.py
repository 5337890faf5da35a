"""Where in a JSON schema something stands, as JSON pointers (`#/properties/name`).

Names of properties and definitions are the client's, and values (`enum`, `const`) are no schemas: neither is taken for
a keyword. Schemas come from outside: nothing here recurses, work and memory grow with the size of the text alone.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
Place = tuple["Place", str] | None
"""The place of what it stands in, and its name there; None: the whole. Pointers to all of a schema with one long name
would take gigabytes."""

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "default", "examples"})


def places(root: Schema, fits: Callable[[Schema], bool], most: int) -> list[str]:
    """Pointers to schemas that fit, the first few."""
    return [_pointer(place) for place, _ in islice((found for found in _schemas(root) if fits(found[1])), most)]


def circle(root: Schema) -> list[str]:
    """Pointers to schemas that are nothing but a reference to one another, the first that are found; or none."""
    found = [(place, schema) for place, schema in _schemas(root) if isinstance(schema.get("$ref"), str)]
    references = {id(schema): place for place, schema in found}
    seen: set[int] = set()
    for _, schema in found:
        path: dict[int, Place] = {}
        while id(schema) in references and id(schema) not in seen:
            seen.add(id(schema))
            path[id(schema)] = references[id(schema)]
            schema = _at(root, unquote(schema["$ref"]))
        if id(schema) in path:
            return list(map(_pointer, list(path.values())[list(path).index(id(schema)) :]))
    return []


def _schemas(root: Schema) -> Iterator[tuple[Place, Schema]]:
    """All schemas in a schema, itself first."""
    found: list[tuple[Place, Any]] = [(None, root)]
    for place, value in found:
        if not isinstance(value, dict):
            continue
        yield place, value
        for keyword, inner in value.items():
            at = (place, keyword)
            if keyword in _BY_NAME and isinstance(inner, dict):
                found += [((at, name), schema) for name, schema in inner.items()]
            elif isinstance(inner, list) and keyword not in _VALUES:
                found += [((at, str(number)), schema) for number, schema in enumerate(inner)]
            elif keyword not in _VALUES:
                found.append((at, inner))


def _pointer(place: Place) -> str:
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(name.replace("~", "~0").replace("/", "~1"))
    return "/".join(["#", *reversed(names)])


def _at(root: Schema, pointer: str) -> Any:
    """What a pointer leads to; None: nothing, or out of the schema."""
    start, *names = pointer.split("/")
    value: Any = root if start == "#" else None
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(name)] if name.isdecimal() and len(name) < 7 and int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value
