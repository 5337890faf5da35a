"""From a URL to a registry: memory, a folder, etcd, and whatever `headwater.registries` entry points add.

    memory://name     file:///folder     etcd://host:2379,host2:2379/prefix     etcds://... (TLS; see `etcd`)

An entry point is named after its scheme and loads a function from the URL to a `Registry`.
"""

import difflib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from headwater.errors import ConfigError
from headwater.runtime.registry.base import Registry
from headwater.runtime.registry.file import FileRegistry
from headwater.runtime.registry.memory import open_memory

ENTRY_POINT_GROUP = "headwater.registries"


def open_registry(url: str) -> Registry:
    """Raises `ConfigError` for a URL nobody understands. Nothing is touched before the first use."""
    parts = urlsplit(url)
    opener = _BUILT_IN.get(parts.scheme)
    if opener is not None:
        return opener(parts)
    plugin = _plugins().get(parts.scheme)
    if plugin is None:
        raise ConfigError(f"registry {url!r} has an unknown scheme", hint=_suggest(parts.scheme))
    registry: Registry = plugin.load()(url)
    return registry


def _open_memory(parts: SplitResult) -> Registry:
    if not parts.netloc or parts.path not in ("", "/"):
        raise ConfigError(f"registry {parts.geturl()!r} names no store", hint="memory://name")
    return open_memory(parts.netloc)


def _open_file(parts: SplitResult) -> Registry:
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or parts.query or parts.fragment:
        raise ConfigError(f"registry {parts.geturl()!r} is not an absolute folder", hint="file:///run/headwater")
    return FileRegistry(Path(path))


def _open_etcd(parts: SplitResult) -> Registry:
    try:
        from headwater.runtime.registry.etcd import open_etcd
    except ModuleNotFoundError as error:
        raise ConfigError(f"registry {parts.geturl()!r}: {error}", hint="pip install 'headwater[etcd]'") from error
    return open_etcd(parts)


_BUILT_IN: dict[str, Callable[[SplitResult], Registry]] = {
    "memory": _open_memory,
    "file": _open_file,
    "etcd": _open_etcd,
    "etcds": _open_etcd,
}


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _suggest(scheme: str) -> str:
    known = sorted({*_BUILT_IN, *_plugins()})
    near = difflib.get_close_matches(scheme, known, n=1)
    listed = ", ".join(f"{name}://" for name in known)
    return f"did you mean {near[0]}://? Known: {listed}" if near else f"known: {listed}"
