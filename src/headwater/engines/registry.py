"""Engines by name: the built-in ones, and those that packages offer as `headwater.engines` entry points.

An engine is imported only when it is asked for. An entry point is a callable that takes an `EngineConfig` and a
`Placement` and gives an `Engine`; it cannot take the name of a built-in one.
"""

import difflib
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from headwater.config.schema import EngineConfig
from headwater.engines.base import ALONE, Engine, Placement
from headwater.errors import ConfigError

ENTRY_POINT_GROUP = "headwater.engines"

EngineFactory = Callable[[EngineConfig, Placement], Engine]

_BUILT_IN = {
    "native": ("headwater.engines.native.engine", "NativeEngine"),
    "mocker": ("headwater.engines.mocker.engine", "MockerEngine"),
    "attached": ("headwater.engines.attached.engine", "AttachedEngine"),
    "vllm": ("headwater.engines.vllm.engine", "VllmEngine"),
    "trtllm": ("headwater.engines.trtllm.engine", "TrtllmEngine"),
    "sglang": ("headwater.engines.sglang.engine", "SglangEngine"),
}


def create_engine(config: EngineConfig, placement: Placement = ALONE) -> Engine:
    """The engine that the configuration names, not started. Raises `ConfigError`."""
    return engine_factory("attached" if config.attach else config.engine)(config, placement)


def engine_factory(name: str) -> EngineFactory:
    """Raises `ConfigError` when there is no such engine, or what it needs is not installed."""
    try:
        return _load(name)
    except ImportError as error:
        raise ConfigError(
            f"engine {name!r} cannot be loaded: {error}", hint=f"Install what it needs: pip install 'headwater[{name}]'"
        ) from error


def engine_names() -> list[str]:
    return sorted({*_BUILT_IN, *_offered()})


def _load(name: str) -> EngineFactory:
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        return cast(EngineFactory, getattr(import_module(module), attribute))
    offered = _offered()
    if name not in offered:
        raise _unknown(name)
    factory = offered[name].load()
    if not callable(factory):
        raise ConfigError(f"engine {name!r} ({offered[name].value}) is not callable")
    return cast(EngineFactory, factory)


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _unknown(name: str) -> ConfigError:
    names = engine_names()
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"there is no engine {name!r}{meant}", hint=f"Engines: {', '.join(names)}")
