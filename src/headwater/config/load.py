"""The loader: defaults, then the YAML file, then the environment, then flags; the later one wins, key by key.

Every value keeps its origin. Unknown keys are refused with the nearest name, wherever they are spelled. Variables that
Kubernetes makes up for a service called `headwater` (`HEADWATER_SERVICE_HOST`, `HEADWATER_PORT=tcp://...`) are not ours
and are passed over.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from headwater.config.fields import ENVIRONMENT_PREFIX, Field, fields_of, sections_of
from headwater.config.schema import ServeConfig
from headwater.config.values import BadValue, parse_value
from headwater.config.yaml_file import Entry, read_entries
from headwater.errors import ConfigError

CONFIG_FLAG = "--config"
CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"

Layer = Literal["default", "file", "environment", "flag"]

_SERVICE_LINK_NAME = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    layer: Layer
    detail: str = ""
    """`graph.yaml:7`, `HEADWATER_PORT` or `--port`."""

    def __str__(self) -> str:
        return f"{self.layer} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The configuration and, by key (`engine.max_num_seqs`), where each value came from."""

    config: ServeConfig
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])


def load_config(
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> LoadedConfig:
    """Merge the layers. `flags` holds spelled values by leaf name; raises `ConfigError`."""
    fields = fields_of()
    variables = _own_variables(environ or {})
    named_file = variables.pop(CONFIG_VARIABLE, "").strip()
    file = file or named_file
    layers = _Layers(fields)
    if file:
        layers.apply_file(Path(file))
    layers.apply_environment(variables)
    layers.apply_flags(flags or {})
    return layers.result()


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest of `names`, if any is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return close[0] if close else None


class _Layers:
    def __init__(self, fields: dict[str, Field]) -> None:
        self._fields = fields
        self._sections = sections_of()
        self._values: dict[str, Any] = {}
        self._origins: dict[str, Origin] = {field.key: Origin("default") for field in fields.values()}

    def apply_file(self, path: Path) -> None:
        for entry in read_entries(path):
            where = f"{path}:{entry.line}"
            if len(entry.path) == 1 and entry.path[0] in self._sections:
                if entry.value is not None:
                    raise ConfigError(f"{where}: {entry.path[0]} is a section: it holds keys, not a value")
                continue
            self._set(self._field_of(entry, where), entry.value, Origin("file", where), where)

    def apply_environment(self, variables: Mapping[str, str]) -> None:
        by_variable = {field.variable: field for field in self._fields.values()}
        for name, text in variables.items():
            if not text.strip():
                continue
            field = by_variable.get(name)
            if field is None:
                raise ConfigError(f"unknown environment variable {name}", hint=_meant(name, by_variable))
            self._set(field, text, Origin("environment", name), name)

    def apply_flags(self, flags: Mapping[str, object]) -> None:
        for name, given in flags.items():
            field = self._fields[name]
            self._set(field, given, Origin("flag", field.flag), field.flag)

    def result(self) -> LoadedConfig:
        tree: dict[str, Any] = {}
        for name, value in self._values.items():
            field = self._fields[name]
            owner = tree.setdefault(field.section, {}) if field.section else tree
            owner[name] = value
        return LoadedConfig(msgspec.convert(tree, ServeConfig), self._origins)

    def _set(self, field: Field, given: object, origin: Origin, where: str) -> None:
        try:
            self._values[field.name] = parse_value(field, given)
        except BadValue as error:
            said = "" if field.secret else f" = {given!r}"
            hint = _meant(str(given), field.choices) if field.choices else None
            raise ConfigError(f"{where}: {field.key}{said}: {error}", hint=hint) from error
        self._origins[field.key] = origin

    def _field_of(self, entry: Entry, where: str) -> Field:
        key = ".".join(entry.path)
        field = self._fields.get(entry.path[-1])
        if field is not None and field.key == key:
            return field
        if field is not None:
            raise ConfigError(f"{where}: unknown key {key}", hint=f"{field.name} belongs {_place(field)}")
        section = entry.path[0] if len(entry.path) > 1 else ""
        raise ConfigError(f"{where}: unknown key {key}", hint=self._meant_key(entry.path, section))

    def _meant_key(self, path: tuple[str, ...], section: str) -> str | None:
        if section and section not in self._sections:
            return _meant(section, self._sections)
        near = nearest(path[-1].replace("-", "_"), [*self._fields, *(() if section else self._sections)])
        if near is None:
            return "`headwater config docs` lists all keys"
        field = self._fields.get(near)
        belongs = f", {_place(field)}" if field and field.section != section else ""
        return f"did you mean {near}{belongs}?"


def _place(field: Field) -> str:
    return f"under `{field.section}:`" if field.section else "at the top level"


def _meant(name: str, names: Iterable[str]) -> str | None:
    near = nearest(name, names)
    return f"did you mean {near}?" if near else None


def _own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX)
        and not _SERVICE_LINK_NAME.search(name)
        and not (name.endswith("_PORT") and _SERVICE_LINK_VALUE.match(text))
    }
