"""The configuration made visible: values with their origin, the key reference, the JSON schema. Secrets never show."""

import json
from typing import Any

import msgspec

from headwater.config.fields import Field, fields_of, sections_of, value_of
from headwater.config.load import LoadedConfig
from headwater.config.schema import ServeConfig
from headwater.config.values import REDACTED, spell

_TOP_LEVEL = "The graph as a whole."
_PAGE_HEAD = """# All configuration keys

Printed by `headwater config docs`. How values are spelled and which spelling wins: [Configure](../configure.md)."""


def show_text(loaded: LoadedConfig, *, origin: bool = False) -> str:
    """YAML that can be fed back (but for secrets), with origins as comments."""
    lines: list[str] = []
    section = ""
    for field in _top_level_first():
        if field.section != section:
            section = field.section
            lines.append(f"{section}:")
        line = f"{'  ' if section else ''}{field.name}: {_yaml(field, value_of(loaded.config, field))}"
        lines.append(f"{line:<48} # {loaded.origins[field.key]}" if origin else line)
    return "\n".join(lines)


def show_json(loaded: LoadedConfig, *, origin: bool = False) -> str:
    values = {field.key: _plain(field, value_of(loaded.config, field)) for field in fields_of().values()}
    if not origin:
        return json.dumps(values, indent=2)
    origins = {key: {"layer": found.layer, "detail": found.detail} for key, found in loaded.origins.items()}
    return json.dumps({key: {"value": value, "origin": origins[key]} for key, value in values.items()}, indent=2)


def json_schema() -> str:
    """JSON schema of a configuration file, for editors. Quantities may be spelled with units."""
    schema = msgspec.json.schema(ServeConfig)
    for field in fields_of().values():
        owner = schema["$defs"][_struct_name(field.section)]["properties"]
        if field.unit:
            owner[field.name] = {**owner[field.name], **_with_units(owner[field.name])}
    return json.dumps(schema, indent=2)


def reference_markdown() -> str:
    """One table per section: key, flag, variable, default, meaning."""
    parts: list[str] = []
    for section, doc in {"": _TOP_LEVEL, **sections_of()}.items():
        rows = [_row(field) for field in fields_of().values() if field.section == section]
        title = f"## `{section}`" if section else "## Top level"
        head = "| YAML key | Flag | Environment | Default | Meaning |\n|---|---|---|---|---|"
        parts.append(f"{title}\n\n{doc.splitlines()[0]}\n\n{head}\n" + "\n".join(rows))
    return "\n\n".join([_PAGE_HEAD, *parts]) + "\n"


def _top_level_first() -> list[Field]:
    return sorted(fields_of().values(), key=lambda field: field.section != "")


def _row(field: Field) -> str:
    flag = f"{field.flag}, --no-{field.flag[2:]}" if field.kind == "bool" else field.flag
    default = spell(field, field.default) or "(empty)"
    return f"| `{field.name}` | `{flag}` | `{field.variable}` | `{default}` | {_meaning(field)} |"


def _meaning(field: Field) -> str:
    notes = [field.doc]
    if field.choices:
        notes.append(f"One of {', '.join(field.choices)}.")
    if field.many:
        notes.append("A list: commas, or the flag several times.")
    if field.secret:
        notes.append("`@FILE` reads it from a file, one a line.")
    return " ".join(notes).replace("|", "\\|")


def _yaml(field: Field, value: Any) -> str:
    """JSON is YAML; quantities and bare words are nicer without quotes."""
    if field.unit and value is not None:
        return spell(field, value)
    return json.dumps(_plain(field, value))


def _plain(field: Field, value: Any) -> Any:
    if field.many:
        return [REDACTED if field.secret else item for item in value]
    return REDACTED if field.secret and value is not None else value


def _struct_name(section: str) -> str:
    owner = ServeConfig.__annotations__[section] if section else ServeConfig
    return str(owner.__name__)


def _with_units(spec: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in spec:
        return {"anyOf": [*spec["anyOf"], {"type": "string"}]}
    return {"type": [spec["type"], "string"]}
