"""From the name of a routing policy to the policy: built in, or an entry point in `headwater.router`."""

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from headwater.errors import ConfigError
from headwater.router.policies import BUILTIN
from headwater.router.policy import ConfigurablePolicy, Policy, PolicySettings

ENTRY_POINT_GROUP = "headwater.router"
DEFAULTS = PolicySettings()


def load_policy(name: str, settings: PolicySettings = DEFAULTS) -> Policy:
    """Raises `ConfigError` for a name nobody offers, and what the policy raises for its settings."""
    kind = BUILTIN.get(name) or _plugin(name)
    return kind.configured(settings) if issubclass(kind, ConfigurablePolicy) else kind()


def _plugin(name: str) -> type[Policy]:
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in plugins:
        return _load(plugins[name])
    known = sorted({*BUILTIN, *plugins})
    near = difflib.get_close_matches(name, known, n=1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"no routing policy is called {name!r}", hint=f"{suggestion}Known: {', '.join(known)}")


def _load(point: EntryPoint) -> type[Policy]:
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the routing policy {point.name} cannot be loaded from {point.value}: {error}") from error
    if not isinstance(kind, type):
        raise ConfigError(f"the routing policy {point.name} is not a class: {point.value}")
    return cast(type[Policy], kind)
