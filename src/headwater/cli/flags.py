"""Flags made from the configuration schema, and the configuration loaded from them."""

import argparse
import os
from collections.abc import Collection, Mapping
from typing import Any

from headwater.cli.parser import advanced
from headwater.config.fields import Field, fields_of
from headwater.config.load import LoadedConfig, load_config
from headwater.config.values import NONE, spell
from headwater.errors import ConfigError

GRAPH = "graph"
"""Section title of the keys at the top level."""

_PREFIX = "config."
_MODEL = "config_model"

_SHORT_HELP = frozenset(
    {
        "workers",
        "prefill",
        "decode",
        "role",
        "disagg",
        "frontends",
        "served_model_name",
        "engine",
        "device",
        "dtype",
        "max_model_len",
        "kv_cache_memory",
        "max_num_seqs",
        "tensor_parallel_size",
        "threads",
        "host",
        "port",
        "api_key",
        "registry",
        "log_level",
    }
)
_METAVARS = {"bytes": "BYTES", "count": "N", "seconds": "TIME"}


def add_config_flags(
    parser: argparse.ArgumentParser, sections: Collection[str] = (), names: Collection[str] = ()
) -> None:
    """Flags for whole sections (`GRAPH` is the top level) and for single keys, and `--config`."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in sorted(fields_of().values(), key=lambda field: field.section != ""):
        title = field.section or GRAPH
        if title not in sections and field.name not in names:
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        action = _add(groups[title], field)
        if field.name not in _SHORT_HELP:
            advanced(action)
    parser.add_argument("--config", metavar="FILE", help="YAML file with the configuration (HEADWATER_CONFIG)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL, another way to say `--model`."""
    doc = fields_of()["model"].doc
    parser.add_argument(_MODEL, metavar="MODEL", nargs="?", default=None, help=doc)


def config_key(action: argparse.Action) -> str | None:
    """The leaf name of the configuration that a flag sets, if it is one of ours."""
    return action.dest.removeprefix(_PREFIX) if action.dest.startswith(_PREFIX) else None


def load_from(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """The configuration that flags, environment and file add up to. Raises `ConfigError`."""
    flags: dict[str, Any] = {
        name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)
    }
    model = getattr(args, _MODEL, None)
    if model is not None:
        if flags.get("model", model) != model:
            raise ConfigError(f"two models: {model} and --model {flags['model']}", hint="name it once")
        flags["model"] = model
    for name, value in flags.items():
        if isinstance(value, bool):
            flags[name] = "true" if value else "false"
    return load_config(flags, os.environ if environ is None else environ, getattr(args, "config", None))


def _add(group: argparse._ArgumentGroup, field: Field) -> argparse.Action:
    dest = _PREFIX + field.name
    if field.kind == "bool":
        return group.add_argument(
            field.flag,
            dest=dest,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=_help(field),
        )
    return group.add_argument(
        field.flag,
        dest=dest,
        action="append" if field.many else "store",
        default=argparse.SUPPRESS,
        metavar=_metavar(field),
        help=_help(field),
    )


def _metavar(field: Field) -> str:
    if field.choices:
        return "{" + ",".join(field.choices) + "}"
    if field.unit:
        return _METAVARS[field.unit]
    return "N" if field.kind != "str" else "TEXT"


def _help(field: Field) -> str:
    default = spell(field, field.default)
    doc = field.doc if default in ("", NONE) else f"{field.doc} (default {default})"
    return doc.replace("%", "%%")
