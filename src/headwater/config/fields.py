"""The keys of the configuration, read off the schema: one `Field` per leaf, with its three spellings.

Leaf names are unique over all sections, so that a flag or a variable needs no prefix; `fields_of` refuses a schema
where they are not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import inspect

from headwater.config.schema import ServeConfig

ENVIRONMENT_PREFIX = "HEADWATER_"

Kind = Literal["bool", "int", "float", "str"]


@dataclass(frozen=True, slots=True)
class Field:
    """One key."""

    section: str
    """`engine`, `frontend`, ...; empty for the top level."""
    name: str
    kind: Kind
    default: Any
    doc: str
    many: bool = False
    optional: bool = False
    unit: str | None = None
    """`bytes`, `count` or `seconds`."""
    secret: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


@dataclass(slots=True)
class _Shape:
    """What a walk through a type annotation found out."""

    kind: Kind = "str"
    many: bool = False
    optional: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    unit: str | None = None
    secret: bool = False
    doc: str = ""


def fields_of(schema: type[msgspec.Struct] = ServeConfig) -> dict[str, Field]:
    """All leaves by name, in the order of the schema."""
    fields: dict[str, Field] = {}
    for field in _walk(schema, ""):
        if field.name in fields:
            raise TypeError(f"{field.key} and {fields[field.name].key} would share the flag {field.flag}")
        fields[field.name] = field
    return fields


def sections_of(schema: type[msgspec.Struct] = ServeConfig) -> dict[str, str]:
    """Sections and what they are about."""
    return {name: (struct.cls.__doc__ or "").strip() for name, struct in _sections(schema)}


def secrets_of(config: msgspec.Struct) -> list[str]:
    """All secrets in a configuration, to be kept out of logs."""
    given = (value_of(config, field) for field in fields_of().values() if field.secret)
    return [secret for value in given for secret in ((value,) if isinstance(value, str) else value or ())]


def value_of(config: msgspec.Struct, field: Field) -> Any:
    owner = getattr(config, field.section) if field.section else config
    return getattr(owner, field.name)


def _walk(schema: type[msgspec.Struct], section: str) -> Iterator[Field]:
    for field in _struct(schema).fields:
        nested = _unwrapped(field.type)
        if isinstance(nested, inspect.StructType):
            yield from _walk(nested.cls, field.name)
            continue
        shape = _Shape()
        _describe(field.type, shape)
        yield Field(
            section=section,
            name=field.name,
            kind=shape.kind,
            default=field.default,
            doc=shape.doc,
            many=shape.many,
            optional=shape.optional,
            unit=shape.unit,
            secret=shape.secret,
            choices=shape.choices,
            minimum=shape.minimum,
            maximum=shape.maximum,
        )


def _sections(schema: type[msgspec.Struct]) -> Iterator[tuple[str, inspect.StructType]]:
    for field in _struct(schema).fields:
        nested = _unwrapped(field.type)
        if isinstance(nested, inspect.StructType):
            yield field.name, nested


def _struct(schema: type[msgspec.Struct]) -> inspect.StructType:
    info = _unwrapped(inspect.type_info(schema))
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{schema} is not a struct")
    return info


def _unwrapped(info: inspect.Type) -> inspect.Type:
    return _unwrapped(info.type) if isinstance(info, inspect.Metadata) else info


def _describe(info: inspect.Type, shape: _Shape) -> None:
    match info:
        case inspect.Metadata():
            extra = info.extra or {}
            shape.unit = extra.get("unit", shape.unit)
            shape.secret = extra.get("secret", shape.secret)
            shape.doc = (info.extra_json_schema or {}).get("description", shape.doc)
            _describe(info.type, shape)
        case inspect.UnionType():
            for part in info.types:
                _describe(part, shape)
        case inspect.NoneType():
            shape.optional = True
        case inspect.VarTupleType():
            shape.many = True
            _describe(info.item_type, shape)
        case inspect.LiteralType():
            shape.choices = tuple(str(value) for value in info.values)
        case inspect.BoolType():
            shape.kind = "bool"
        case inspect.IntType() | inspect.FloatType():
            shape.kind = "int" if isinstance(info, inspect.IntType) else "float"
            shape.minimum, shape.maximum = info.ge, info.le
        case inspect.StrType():
            shape.kind = "str"
        case _:
            raise TypeError(f"the configuration has no spelling for {info}")
