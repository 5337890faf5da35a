"""Reading a YAML configuration file: plain scalars and lists under known sections, each with its line.

Built on the node tree of the safe loader, because only nodes know their lines. Refuses duplicate keys (YAML would
silently keep the last), several documents, and files that are too large to be a configuration.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headwater.errors import ConfigError

MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """One leaf of the file."""

    path: tuple[str, ...]
    value: Any
    line: int


def read_entries(path: Path) -> list[Entry]:
    """The leaves of the file in order. Raises `ConfigError`."""
    text = _read(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return [] if root is None else list(_leaves(path, root, ()))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply for a configuration file") from error


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes: that is no configuration file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error


def _leaves(path: Path, node: yaml.Node, prefix: tuple[str, ...]) -> Iterator[Entry]:
    if not isinstance(node, yaml.MappingNode):
        where = ".".join(prefix) or "the file"
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {where} must be a mapping of keys to values")
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
        if not key:
            raise ConfigError(f"{path}:{line}: keys must be plain names")
        if key in seen:
            raise ConfigError(f"{path}:{line}: {'.'.join((*prefix, key))} is given twice (first on line {seen[key]})")
        seen[key] = line
        if isinstance(value_node, yaml.MappingNode) and not prefix:
            yield from _leaves(path, value_node, (key,))
        else:
            yield Entry((*prefix, key), _plain(path, key, value_node), line)


def _plain(path: Path, key: str, node: yaml.Node) -> Any:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [_scalar(item) for item in node.value]
    raise ConfigError(f"{path}:{line}: {key} takes a plain value or a list of plain values")


def _scalar(node: yaml.ScalarNode) -> Any:
    """YAML's type for the scalar, except that dates and other exotica stay the text they were."""
    if node.tag.rpartition(":")[2] in ("int", "float", "bool", "null"):
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_object(node)
        finally:
            loader.dispose()
    return node.value
